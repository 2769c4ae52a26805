"""Adapters beside the layers of a loaded model: the logits of the merged model, exchanged and removed exactly."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.adapters.read import open_adapter
from ingot.adapters.view import with_adapters
from ingot.errors import IngotError
from tests.support import model_folder
from tests.support.adapters import DOWN, EMBED, Q, lora, peft_folder, values

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import ingot.hf  # noqa: E402
from ingot.runtime.layers.adapter_cache import cache_of  # noqa: E402
from ingot.runtime.layers.adapters import adapters_of  # noqa: E402
from ingot.runtime.layers.packed_linear import PackedLinear  # noqa: E402

HIDDEN, FF, ROWS = model_folder.HIDDEN, 128, model_folder.ROWS
IDS = torch.tensor([[5, 9, 2, 30, 11]])
QUERY = lora(Q, rows=HIDDEN, cols=HIDDEN)


def linear(path: Path) -> Path:
    return peft_folder(path, {**QUERY, **lora(DOWN, rows=HIDDEN, cols=FF)}, use_rslora=True)


def dora(path: Path) -> Path:
    return peft_folder(path, {**QUERY, f"{Q}.lora_magnitude_vector": np.abs(values(HIDDEN)) + 1}, use_dora=True)


def embedding(path: Path) -> Path:
    factors = {f"{EMBED}.lora_embedding_A": values(4, ROWS), f"{EMBED}.lora_embedding_B": values(HIDDEN, 4)}
    return peft_folder(path, {**QUERY, **factors})


def saved_head(path: Path) -> Path:
    return peft_folder(path, {**QUERY, "lm_head.weight": values(ROWS, HIDDEN)}, modules_to_save=["lm_head"])


def tokens(path: Path) -> Path:
    rows = {f"{EMBED}.token_adapter.trainable_tokens_delta": values(2, HIDDEN)}
    return peft_folder(path, {**QUERY, **rows}, trainable_token_indices=[5, 11])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model_folder.write(tmp_path / "base")


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("make", [linear, dora, embedding, saved_head, tokens])
def test_logits_are_those_of_the_merged_model(base: Path, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    adapter = make(tmp_path / "adapter")
    model = ingot.load_model(base)
    before = logits(model)
    parameters = dict(model.named_parameters())
    ingot.hf.use_adapters(model, [adapter])
    ingot.merge(base, adapter, tmp_path / "merged")
    merged = logits(ingot.load_model(tmp_path / "merged"))
    assert torch.allclose(logits(model), merged, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(before, merged, atol=1e-2)
    ingot.hf.use_adapters(model, [])
    assert torch.equal(logits(model), before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_packed_layers_stay_packed(base: Path, tmp_path: Path) -> None:
    adapter = linear(tmp_path / "adapter")
    ingot.convert(base, tmp_path / "q", "mlx-4bit", format="mlx")
    model = ingot.load_model(tmp_path / "q", dtype="f32", keep_packed=True, adapters=[adapter])
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, PackedLinear)
    with ingot.open(tmp_path / "q") as opened, with_adapters(opened, [adapter], exact=True) as view:
        weight = torch.from_numpy(view[f"{Q}.weight"].numpy().copy())
    x = torch.from_numpy(values(3, HIDDEN))
    with torch.inference_mode():
        assert torch.allclose(layer(x), x @ weight.T, atol=1e-2)
    with_adapter = logits(model)
    ingot.hf.use_adapters(model, [])
    assert torch.equal(logits(model), logits(ingot.load_model(tmp_path / "q", dtype="f32", keep_packed=True)))
    ingot.hf.use_adapters(model, [(adapter, 1.0)])
    assert torch.equal(logits(model), with_adapter)


def test_weights_scale_adapters_and_sums_are_those_of_merges(base: Path, tmp_path: Path) -> None:
    adapters = [(linear(tmp_path / "a"), 0.5), (dora(tmp_path / "b"), -0.25)]
    model = ingot.load_model(base, adapters=adapters)
    ingot.merge(base, adapters, tmp_path / "merged")
    assert torch.allclose(logits(model), logits(ingot.load_model(tmp_path / "merged")), atol=2e-4, rtol=1e-3)
    assert [item.weight for item in adapters_of(model)] == [0.5, -0.25]


def test_a_gguf_adapter_runs_in_the_model_of_its_base(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    adapter = linear(tmp_path / "adapter")
    ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    first = logits(ingot.load_model(base, adapters=[adapter]))
    assert torch.allclose(logits(ingot.load_model(base, adapters=[tmp_path / "a.gguf"])), first, atol=1e-5)


def test_a_refused_adapter_leaves_the_base(base: Path, tmp_path: Path) -> None:
    model = ingot.load_model(base)
    before = logits(model)
    ingot.hf.use_adapters(model, [linear(tmp_path / "good")])
    other = peft_folder(tmp_path / "other", {**QUERY, **lora(DOWN, rows=HIDDEN, cols=40)})
    with pytest.raises(IngotError) as error:
        ingot.hf.use_adapters(model, [other])
    assert error.value.rule == "adapter.shape"
    assert torch.equal(logits(model), before)
    assert adapters_of(model) == []
    with pytest.raises(IngotError) as error:
        ingot.hf.use_adapters(model, [peft_folder(tmp_path / "missing", lora("model.layers.8.self_attn.q_proj"))])
    assert error.value.rule == "adapter.base"


def test_new_values_of_a_packed_layer_are_refused(base: Path, tmp_path: Path) -> None:
    ingot.convert(base, tmp_path / "q", "mlx-4bit", format="mlx")
    model = ingot.load_model(tmp_path / "q", dtype="f32", keep_packed=True)
    adapter = peft_folder(tmp_path / "a", {f"{Q}.weight": values(HIDDEN, HIDDEN)}, modules_to_save=["q_proj"])
    with pytest.raises(IngotError) as error:
        ingot.hf.use_adapters(model, [adapter])
    assert error.value.rule == "adapter.model"


def test_a_streamed_model_takes_adapters(base: Path, tmp_path: Path) -> None:
    adapter = linear(tmp_path / "adapter")
    expected = logits(ingot.load_model(base, dtype="bf16", adapters=[adapter]))
    streamed = ingot.load_model(base, dtype="bf16", stream=True, adapters=[adapter])
    assert torch.allclose(logits(streamed), expected, atol=0.1)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each opening of an adapter adds its path."""
    opened: list[str] = []

    def counting(path: Any) -> Any:
        opened.append(str(path))
        return open_adapter(path)

    monkeypatch.setattr("ingot.runtime.layers.adapters.open_adapter", counting)
    return opened


@pytest.mark.parametrize("make", [linear, dora, embedding, saved_head])
def test_the_second_use_reads_no_file(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    first, second = make(tmp_path / "a"), linear(tmp_path / "b")
    model = ingot.load_model(base, adapters=[first])
    expected = logits(model)
    ingot.hf.use_adapters(model, [second])
    opened = count_reads(monkeypatch)
    ingot.hf.use_adapters(model, [first])
    assert torch.equal(logits(model), expected)
    ingot.hf.use_adapters(model, [(second, 0.5)])
    assert opened == []
    ingot.hf.clear_adapter_cache(model)
    ingot.hf.use_adapters(model, [first])
    assert opened == [str(first)]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("make", [tokens, saved_head])
def test_other_weights_of_new_values_are_computed_again(base: Path, tmp_path: Path, make: Any) -> None:
    adapter = make(tmp_path / "a")
    model = ingot.load_model(base, adapters=[adapter])
    ingot.hf.use_adapters(model, [(adapter, 0.5)])
    assert torch.equal(logits(model), logits(ingot.load_model(base, adapters=[(adapter, 0.5)])))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_changed_file_is_read_again(base: Path, tmp_path: Path, name: str) -> None:
    adapter = linear(tmp_path / "a")
    model = ingot.load_model(base, adapters=[adapter])
    before = logits(model)
    if name.endswith(".json"):
        settings = json.loads((adapter / name).read_text())
        (adapter / name).write_text(json.dumps({**settings, "lora_alpha": 3}))
    else:
        (adapter / name).write_bytes((peft_folder(tmp_path / "b", lora(Q, HIDDEN, HIDDEN, seed=5)) / name).read_bytes())
    ingot.hf.use_adapters(model, [adapter])
    assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), logits(ingot.load_model(base, adapters=[adapter])))


@pytest.mark.parametrize("make", [dora, saved_head])
def test_changed_weights_of_the_model_are_used(base: Path, tmp_path: Path, make: Any) -> None:
    adapter = (make(tmp_path / "a"), 0.5)
    model = ingot.load_model(base, adapters=[adapter])
    ingot.hf.use_adapters(model, [])
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(3)
        model.lm_head.weight.mul_(3)
    ingot.hf.use_adapters(model, [adapter])
    with_cache = logits(model)
    ingot.hf.clear_adapter_cache(model)
    ingot.hf.use_adapters(model, [adapter])
    assert torch.equal(logits(model), with_cache)


def test_a_model_of_other_shapes_does_not_use_the_cache(base: Path, tmp_path: Path) -> None:
    adapter = embedding(tmp_path / "a")
    model = ingot.load_model(base, adapters=[adapter])
    ingot.hf.use_adapters(model, [])
    model.resize_token_embeddings(ROWS + 8, mean_resizing=False)
    with pytest.raises(IngotError) as error:
        ingot.hf.use_adapters(model, [adapter])
    assert error.value.rule == "adapter.shape"


def test_the_cache_ends_with_the_model(base: Path, tmp_path: Path) -> None:
    model = ingot.load_model(base, adapters=[linear(tmp_path / "a")])
    factors = weakref.ref(next(iter(cache_of(model).adapters.values())))
    del model
    gc.collect()
    assert factors() is None


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_factors_that_are_not_finite_leave_the_base(base: Path, tmp_path: Path, value: float) -> None:
    factors = lora(Q, HIDDEN, HIDDEN)
    factors[f"{Q}.lora_B.weight"][1, 1] = value
    model = ingot.load_model(base)
    before = logits(model)
    adapter = peft_folder(tmp_path / "a", factors)
    for _ in range(2):
        with pytest.raises(IngotError) as error:
            ingot.hf.use_adapters(model, [adapter])
        assert error.value.rule == "adapter.values"
    assert torch.equal(logits(model), before)
