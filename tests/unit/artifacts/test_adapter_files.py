"""Adapters are recognised, and every operation that needs a model says what to do instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.adapter_files import recognise
from ingot.artifacts.open import open as open_checkpoint
from ingot.conversion.matrix import matrix
from ingot.errors import UnsupportedError
from ingot.inspect.inspect import inspect

MODULE = "model.layers.0.self_attn.q_proj"
PEFT_NAME = f"base_model.model.{MODULE}"
A, B = np.ones((4, 64), np.float32), np.ones((64, 4), np.float32)
PEFT = {f"{PEFT_NAME}.lora_A.weight": A, f"{PEFT_NAME}.lora_B.weight": B}
MLX = {f"{MODULE}.lora_a": B, f"{MODULE}.lora_b": A}


def folder(path: Path, file: str, tensors: dict[str, Any], config: dict[str, Any] | None) -> Path:
    path.mkdir()
    ingot.save(path / file, tensors)
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def peft(path: Path) -> Path:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/base"}
    return folder(path / "peft", "adapter_model.safetensors", PEFT, config)


def peft_file(path: Path) -> Path:
    return peft(path) / "adapter_model.safetensors"


def renamed_file(path: Path) -> Path:
    ingot.save(path / "style.safetensors", PEFT)
    return path / "style.safetensors"


def prompts(path: Path) -> Path:
    config = {"peft_type": "PROMPT_TUNING", "base_model_name_or_path": "org/base"}
    return folder(path / "prompts", "adapter_model.safetensors", {"prompt_embeddings": A}, config)


def mlx(path: Path) -> Path:
    return folder(path / "mlx", "adapters.safetensors", MLX, {"fine_tune_type": "dora", "model": "org/base"})


def gguf_file(path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path / "lora.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", A)
    writer.add_tensor("blk.0.attn_q.weight.lora_b", B)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "lora.gguf"


MAKERS = {
    peft: "LoRA adapter (PEFT) of the base 'org/base'",
    peft_file: "LoRA adapter (PEFT) of the base 'org/base'",
    renamed_file: "LoRA adapter (PEFT); merge",
    prompts: "PROMPT_TUNING adapter (PEFT) of the base 'org/base'",
    mlx: "DoRA adapter (MLX) of the base 'org/base'",
    gguf_file: "LoRA adapter (GGUF)",
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "base.safetensors", {f"{MODULE}.weight": np.ones((64, 64), np.float32)})
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize("make", MAKERS)
def test_what_needs_a_model_is_refused(base: Path, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    adapter, out = make(tmp_path), tmp_path / "out.zt"
    state = {f"{MODULE}.weight": np.ones((64, 64), np.float32)}
    attempts: list[Callable[[], Any]] = [
        lambda: ingot.diff(base, adapter, out),
        lambda: ingot.diff(adapter, base, out),
        lambda: ingot.patch(base, adapter, out),
        lambda: ingot.patch(adapter, base, out),
        lambda: ingot.apply_delta(state, adapter),
        lambda: ingot.convert(adapter, tmp_path / "out.gguf"),
        lambda: ingot.convert(adapter, tmp_path / "out.squizd"),
        lambda: ingot.convert(adapter, tmp_path / "out", "int4", "mlx"),
        lambda: ingot.load_model(adapter),
    ]
    for attempt in attempts:
        with pytest.raises(UnsupportedError) as caught:
            attempt()
        assert caught.value.rule == "model.adapter"
        assert MAKERS[make] in str(caught.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("make", MAKERS)
def test_what_reads_any_tensors_says_what_it_is(base: Path, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    adapter = make(tmp_path)
    words = MAKERS[make]
    assert any(words in finding.message for finding in ingot.verify(adapter) if finding.rule == "model.adapter")
    assert any(words in note for note in inspect(adapter).notes)
    assert any(words in note for note in ingot.compare(base, adapter).notes)
    assert any(words in note for note in ingot.Library(tmp_path / "library").add(adapter, "a", base="none").notes)
    report = ingot.convert(adapter, tmp_path / "copy.zt")
    assert report.exact
    assert any(words in note for note in report.notes)
    kept = [note for note in report.notes if "adapter_config.json" in note]
    assert bool(kept) == adapter.is_dir()
    with open_checkpoint(adapter) as first, open_checkpoint(tmp_path / "copy.zt") as copy:
        assert list(first) == list(copy)
    targets = {target.format: target for target in matrix(adapter, to=["gguf", "zt"]).targets}
    assert targets["zt"].moved
    assert targets["gguf"].refused
    assert words in (targets["gguf"].obstacle or "")


def test_a_folder_takes_the_settings_along(tmp_path: Path) -> None:
    report = ingot.convert(peft(tmp_path), tmp_path / "copy", format="safetensors")
    assert (tmp_path / "copy" / "adapter_config.json").exists()
    assert not [note for note in report.notes if "adapter_config.json" in note]


@pytest.mark.parametrize(
    "names",
    [
        [f"{MODULE}.base_layer.weight", f"{MODULE}.lora_A.speech.weight", f"{MODULE}.lora_B.speech.weight"],
        [f"{MODULE}.weight", f"{MODULE}.lora_a", f"{MODULE}.lora_b"],
        [f"{MODULE}.linear.weight", f"{MODULE}.lora_a", f"{MODULE}.lora_b"],
        ["attention.wqkv.weight", "attention.wqkv.Plora_A.weight"],
        ["model.layers.0.attn.w_lora.lora.0.weight", "model.layers.0.attn.w_lora.lora.2.bias"],
        ["flora_A.weight"],
    ],
)
def test_a_model_that_contains_an_adapter_is_none(names: list[str], tmp_path: Path) -> None:
    """Phi-4-multimodal, InternLM-XComposer2, RWKV-7 and unmerged models have all their weights."""
    ingot.save(tmp_path / "m.safetensors", dict.fromkeys(names, A))
    with ingot.open(tmp_path / "m.safetensors") as checkpoint:
        assert recognise(checkpoint, checkpoint.metadata, None) is None


@pytest.mark.parametrize(
    "name",
    [
        f"{PEFT_NAME}.lora_embedding_A",
        f"{PEFT_NAME}.lora_magnitude_vector.weight",
        "lora_unet_down_blocks_0_to_q.lora_down.weight",
        "unet.down_blocks.0.to_q.lora.up.weight",
        "unet.down_blocks.0.to_q_lora.down.weight".replace("to_q_lora", "to_q.lora_linear_layer"),
    ],
)
def test_other_spellings_are_recognised(name: str, tmp_path: Path) -> None:
    ingot.save(tmp_path / "m.safetensors", {name: A, f"{PEFT_NAME}.bias": A[0]})
    with ingot.open(tmp_path / "m.safetensors") as checkpoint:
        adapter = recognise(checkpoint, checkpoint.metadata, None)
    assert adapter is not None
    assert "adapter" in adapter.describe()


def test_a_damaged_configuration_is_no_obstacle(tmp_path: Path) -> None:
    path = peft(tmp_path)
    for text in ("{", "[1]", '{"peft_type": 3, "base_model_name_or_path": ["x"]}'):
        (path / "adapter_config.json").write_text(text)
        with pytest.raises(UnsupportedError) as caught:
            ingot.convert(path, tmp_path / "x.gguf")
        assert caught.value.rule == "model.adapter"
