"""load_model(keep_packed=True): the same function as the decoded model, from the codes as they are stored."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.runtime.layers.packed_linear import PackedEmbedding, PackedLinear
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_packed import put_packed
from ingot.runtime.loading.transformers_weights import Loading, Weight
from ingot.testing.codecs import encode_tensor
from tests.support.models import KINDS, make, output_of


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every matrix of every kind of model in 8 bits, embeddings included."""
    root = tmp_path_factory.mktemp("packed")
    rule = 'match = ["*"]\nmin_ndim = 2\ncodec = "affine"\noptions = { bits = 8, group = 16 }'
    (root / "all.toml").write_text(f'name = "all"\ndescription = "all"\n[[rules]]\nlabel = "all"\n{rule}\n')
    found = {}
    for kind in KINDS:
        make(kind, root / "source" / kind, "float32")
        ingot.convert(root / "source" / kind, root / kind, root / "all.toml")
        found[kind] = root / kind
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_computes_the_same(packed: dict[str, Path], kind: str) -> None:
    reports: list[LoadReport] = []
    model = load_model(packed[kind], keep_packed=True, report=reports.append)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear | PackedEmbedding)]
    assert layers
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert reports[0].packed > 0
    wanted = output_of(load_model(packed[kind]))
    assert torch.allclose(output_of(model), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_nothing_but_norms_is_decoded(packed: dict[str, Path]) -> None:
    reports: list[LoadReport] = []
    model = load_model(packed["llama"], keep_packed=True, report=reports.append)
    assert all(parameter.ndim == 1 for parameter in model.parameters())
    with ingot.open(packed["llama"]) as checkpoint:
        assert reports[0].packed == sum(t.nbytes for t in checkpoint.values() if t.codec == "affine")
    assert reports[0].decoded == 0


def test_a_tied_head_shares_the_codes(packed: dict[str, Path]) -> None:
    model = load_model(packed["tied qwen2"], keep_packed=True)
    assert isinstance(model.lm_head, PackedLinear)
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    assert model.lm_head.packed.data_ptr() == model.model.embed_tokens.packed.data_ptr()


class Scaled(torch.nn.Linear):
    """A layer that computes something else with its weight."""


def test_layers_that_compute_something_else_are_decoded() -> None:
    rng = np.random.default_rng(2)
    names = ("plain", "scaled", "table", "bounded")
    model = torch.nn.ModuleDict(
        {
            "plain": torch.nn.Linear(64, 8),
            "scaled": Scaled(64, 8),
            "table": torch.nn.Embedding(8, 64),
            "bounded": torch.nn.Embedding(8, 64, max_norm=1.0),
        }
    )
    weights = {}
    for name in names:
        tensor = encode_tensor(AffineCodec(), rng.normal(0, 1, (8, 64)).astype(np.float32), {"bits": 8}, dtype="f32")
        tensor.name = name
        weights[name] = Weight(tensor, Loading(torch.device("cpu"), set(names)))

    def attempt(packed: set[str]) -> torch.nn.ModuleDict:
        for name in names:
            model[name].weight = weights[name].to(None, torch.float32)
        return model

    placed = put_packed(attempt, set(names), torch.float32, torch.device("cpu"))
    assert placed.packed == {"plain", "table"}
    assert isinstance(model["plain"], PackedLinear)
    assert isinstance(model["table"], PackedEmbedding)
    for name in ("scaled", "bounded"):
        assert torch.equal(model[name].weight, weights[name].tensor.torch("f32"))
    assert type(model["scaled"]) is Scaled
    assert model["bounded"].max_norm == 1


def test_saving_packed_layers_is_refused(packed: dict[str, Path], tmp_path: Path) -> None:
    """No loader knows their parts; what was loaded is on disk already."""
    model = load_model(packed["tied qwen2"], keep_packed=True)
    for some in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(ingot.IngotError) as caught:
            some.save_pretrained(tmp_path / "out")
        assert caught.value.rule == "model.packed"
    assert not (tmp_path / "out").exists()
    load_model(packed["tied qwen2"]).save_pretrained(tmp_path / "out")
    assert torch.equal(output_of(load_model(tmp_path / "out")), output_of(load_model(packed["tied qwen2"])))


def test_merged_experts_are_decoded(packed: dict[str, Path]) -> None:
    model = load_model(packed["mixtral"], keep_packed=True)
    names = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert any("self_attn" in name for name in names)
    assert not any("experts" in name for name in names)
    assert any("experts" in name for name, _ in model.named_parameters())


def test_needs_no_room_for_what_stays_packed(packed: dict[str, Path]) -> None:
    load_model(packed["llama"], keep_packed=True, max_ram="4KiB")
    with pytest.raises(ingot.IngotError) as caught:
        load_model(packed["llama"], max_ram="4KiB")
    assert caught.value.rule == "ram.guard"


def test_nothing_packed_is_an_ordinary_load(tmp_path: Path) -> None:
    make("llama", tmp_path)
    reports: list[LoadReport] = []
    model = load_model(tmp_path, keep_packed=True, report=reports.append)
    assert reports[0].packed == 0
    assert torch.equal(output_of(model), output_of(load_model(tmp_path)))
