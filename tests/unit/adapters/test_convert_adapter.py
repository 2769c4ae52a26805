"""``ingot adapter convert``: forms of PEFT, llama.cpp and MLX with equal factors, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.adapters.read import open_adapter
from ingot.adapters.view import with_adapters
from ingot.cli.main import run
from ingot.core.numeric.dtypes import cast
from ingot.errors import IngotError
from tests.support import model_folder
from tests.support.adapters import DOWN, EMBED, Q, lora, peft_folder, values

pytest.importorskip("gguf")
HIDDEN, FF = 64, 128
ATTENTION = {
    **lora(Q, rows=HIDDEN, cols=HIDDEN),
    **lora("model.layers.0.self_attn.k_proj", rows=32, cols=HIDDEN, seed=2),
    **lora(DOWN, rows=HIDDEN, cols=FF, seed=3),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model_folder.write(tmp_path / "base")


def change_of(base: Path, adapter: Path, name: str) -> Any:
    with ingot.open(base) as opened, with_adapters(opened, [adapter], exact=True) as view:
        return view[name].numpy() - opened[name].numpy("f32")


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"k_proj": 3}}])
def test_every_form_makes_the_same_change(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    adapter = peft_folder(tmp_path / "adapter", ATTENTION, **config)
    ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    ingot.convert_adapter(adapter, tmp_path / "mlx")
    ingot.convert_adapter(tmp_path / "a.gguf", tmp_path / "peft", base=base)
    ingot.convert_adapter(tmp_path / "a.gguf", tmp_path / "mlx2", base=base, to="mlx")
    for name in (f"{Q}.weight", "model.layers.0.self_attn.k_proj.weight", f"{DOWN}.weight"):
        expected = change_of(base, adapter, name)
        for form in ("a.gguf", "mlx", "peft", "mlx2"):
            assert np.allclose(change_of(base, tmp_path / form, name), expected, rtol=1e-5, atol=1e-5), (form, name)


def test_factors_keep_their_type_and_bits(base: Path, tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "adapter", {key: cast(item, "bf16") for key, item in ATTENTION.items()})
    ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    ingot.convert_adapter(tmp_path / "a.gguf", tmp_path / "back", base=base)
    with ingot.open(adapter) as first, ingot.open(tmp_path / "back") as second:
        assert set(first) == set(second)
        for name, tensor in first.items():
            assert second[name].dtype == "bf16"
            assert np.array_equal(tensor.numpy().view(np.uint16), second[name].numpy().view(np.uint16))


def test_rows_of_q_and_k_have_the_order_of_llama_cpp(base: Path, tmp_path: Path) -> None:
    """The merged GGUF file has the rows that a merge before the conversion gives."""
    adapter = peft_folder(tmp_path / "adapter", ATTENTION)
    ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    ingot.convert(base, tmp_path / "base.gguf")
    ingot.merge(base, adapter, tmp_path / "first.gguf")
    ingot.merge(tmp_path / "base.gguf", tmp_path / "a.gguf", tmp_path / "second.gguf")
    with ingot.open(tmp_path / "first.gguf") as first, ingot.open(tmp_path / "second.gguf") as second:
        assert set(first) == set(second)
        for name, tensor in first.items():
            assert np.array_equal(tensor.numpy(), second[name].numpy()), name


def test_the_embedding_has_the_order_of_llama_cpp(base: Path, tmp_path: Path) -> None:
    tensors = {
        f"{EMBED}.lora_embedding_A": values(4, model_folder.ROWS),
        f"{EMBED}.lora_embedding_B": values(HIDDEN, 4),
    }
    adapter = peft_folder(tmp_path / "adapter", tensors)
    ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    with ingot.open(tmp_path / "a.gguf") as opened:
        assert opened.metadata["general.type"] == "adapter"
        assert opened.metadata["adapter.lora.alpha"] == 8
        assert opened["token_embd.weight.lora_a"].shape == (model_folder.ROWS, 4)
        assert opened["token_embd.weight.lora_b"].shape == (HIDDEN, 4)
    ingot.convert_adapter(tmp_path / "a.gguf", tmp_path / "back", base=base)
    with ingot.open(tmp_path / "back") as back:
        for name, item in tensors.items():
            assert np.array_equal(back[f"base_model.model.{name}"].numpy(), item)


def test_mlx_pads_smaller_ranks(base: Path, tmp_path: Path) -> None:
    tensors = {**ATTENTION, **lora(Q, rows=HIDDEN, cols=HIDDEN, rank=2)}
    adapter = peft_folder(tmp_path / "adapter", tensors, rank_pattern={"q_proj": 2})
    report = ingot.convert_adapter(adapter, tmp_path / "mlx")
    assert len(report.notes) == 2  # the scale and the rank of q_proj differ
    settings = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    assert settings["lora_parameters"]["rank"] == 4
    with open_adapter(tmp_path / "mlx") as opened:
        assert opened.ranks == [4]
    expected = change_of(base, adapter, f"{Q}.weight")
    assert np.allclose(change_of(base, tmp_path / "mlx", f"{Q}.weight"), expected, atol=1e-5)


def test_dora_goes_between_peft_and_mlx(base: Path, tmp_path: Path) -> None:
    tensors = {**lora(Q, rows=HIDDEN, cols=HIDDEN), f"{Q}.lora_magnitude_vector": np.abs(values(HIDDEN)) + 1}
    adapter = peft_folder(tmp_path / "adapter", tensors, use_dora=True)
    ingot.convert_adapter(adapter, tmp_path / "mlx")
    ingot.convert_adapter(tmp_path / "mlx", tmp_path / "back")
    for form in ("mlx", "back"):
        assert np.array_equal(change_of(base, tmp_path / form, f"{Q}.weight"), change_of(base, adapter, f"{Q}.weight"))
    with pytest.raises(IngotError) as error:
        ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    assert error.value.rule == "adapter.unsupported"
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("to", ["gguf", "mlx"])
def test_new_values_cannot_be_expressed_elsewhere(base: Path, tmp_path: Path, to: str) -> None:
    tensors = {**ATTENTION, "lm_head.weight": values(model_folder.ROWS, HIDDEN)}
    adapter = peft_folder(tmp_path / "adapter", tensors, modules_to_save=["lm_head"])
    out = tmp_path / ("a.gguf" if to == "gguf" else "mlx")
    with pytest.raises(IngotError, match="merge") as error:
        ingot.convert_adapter(adapter, out, base=base, to=to)
    assert error.value.rule == "adapter.unsupported"
    assert not out.exists()


def test_gguf_needs_the_base(tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "adapter", ATTENTION)
    with pytest.raises(IngotError) as error:
        ingot.convert_adapter(adapter, tmp_path / "a.gguf")
    assert error.value.rule == "adapter.option"


def test_another_base_is_refused_with_exit_code_1(base: Path, tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "adapter", lora(Q, rows=48, cols=48))
    command = ["adapter", "convert", str(adapter), "-o", str(tmp_path / "a.gguf"), "--base", str(base), "-q"]
    assert run(command) == 1
    assert not (tmp_path / "a.gguf").exists()


def test_the_command_writes_and_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = peft_folder(tmp_path / "adapter", ATTENTION)
    command = ["adapter", "convert", str(adapter), "-o", str(tmp_path / "out")]
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "mlx"
    assert run(command) != 0
    assert run([*command, "--overwrite"]) == 0
