"""Folded models in transformers: in f32 they compute what the originals do, and nothing runs for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import ingot
from ingot import views
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import Statistics
from ingot.quantization.grid import Grid
from ingot.views.folding.graph import Graph, graph_of
from ingot.views.folding.rotate import fold_rotations
from ingot.views.folding.scale import ScaleFolding, fold_scales
from ingot.views.folding.statistics import FoldedStatistics

SMALL = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
APART = {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**APART, "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {**APART, "hidden_size": 28}),
    "qwen2": ("Qwen2", APART),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 12, "sliding_window": 8}),
    "phi3": ("Phi3", {**APART, "head_dim": 6, "num_key_value_heads": 1, "hidden_size": 24}),
    "mixtral": ("Mixtral", {**APART, "num_local_experts": 3}),
    "qwen2_moe": ("Qwen2Moe", {**APART, **EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 6}),
    "qwen3_moe": ("Qwen3Moe", {**APART, **EXPERTS}),
}
BEHIND = ("gemma2", "gemma3")


QUICK = ("gemma2", "llama", "mixtral", "phi3", "qwen3")


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(MODELS)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(request.param, tmp_path_factory.mktemp(request.param))


def made(name: str, folder: Path) -> Path:
    kind, options = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**{**SMALL, **options})
    found = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():  # weights of norms and biases that are not the same for all
        for parameter in found.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    found.save_pretrained(folder)
    return folder


def logits(folder: Path) -> np.ndarray:
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(60).reshape(3, 20) * 7 % 40
    with torch.no_grad():
        return np.asarray(found(tokens, attention_mask=torch.ones_like(tokens)).logits.double())


def saved(view: Checkpoint, folder: Path) -> Path:
    """Write a view as its model's folder."""
    folder.mkdir()
    config = json.loads(Path(view.companions["config.json"]).read_text())
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.from_numpy(view[name].numpy(copy=True)) for name in view}, folder / "model.safetensors")
    return folder


def require_same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert wanted.std() > 0.1


def test_turned_and_scaled_it_computes_the_same(model: Path, tmp_path: Path) -> None:
    r1 = not model.name.startswith(BEHIND)
    with ingot.open(model) as checkpoint:
        view = views.rotate(checkpoint, r1=r1, r2=True)
        name = "model.embed_tokens.weight" if r1 else next(each for each in view if each.endswith("o_proj.weight"))
        assert not np.allclose(view[name].numpy(), checkpoint[name].numpy(), atol=0.1)
        saved(view, tmp_path / "turned")
        found, folding = scaled_view(view, {})
        saved(found, tmp_path / "both")
        assert folding.search.gains
        alone, folding = scaled_view(checkpoint, {})
        saved(alone, tmp_path / "scaled")
        gains = folding.search.gains
        assert len(gains) > 3
        assert min(gains.values()) < 0.9
        assert not folding.search.unknown
    wanted = logits(model)
    for folder in ("turned", "both", "scaled"):
        require_same(logits(tmp_path / folder), wanted)


def test_norms_behind_matrices_stand_in_the_way(tmp_path: Path) -> None:
    with ingot.open(made("gemma3", tmp_path)) as checkpoint, pytest.raises(UnsupportedError) as refused:
        views.rotate(checkpoint)
    assert refused.value.rule == "fold.norm"


def scaled_view(checkpoint: Checkpoint, dtypes: dict[str, str]) -> tuple[Checkpoint, ScaleFolding]:
    folding = scales_of(checkpoint, dtypes)
    return fold_scales(folding, ""), folding


def random_statistics(checkpoint: Checkpoint, graph: Graph) -> Statistics:
    """Return statistics of all matrices, channels of very different sizes."""
    random, arrays = np.random.default_rng(2), {}
    for site in graph.sites.values():
        cols = checkpoint[site.name].shape[-1]
        for number in range(len(site.ends) if site.role == "matrix" else 0):
            name = site.name if len(site.ends) == 1 else f"{site.name}:expert.{number}"
            x = random.normal(size=(cols, 40)) * np.exp(2 * random.normal(size=(cols, 1)))
            arrays[f"{name}:inputs"] = (x @ x.T).astype(np.float32)
            arrays[f"{name}:in_sum2"] = np.square(x).mean(1).astype(np.float32)
            arrays[f"{name}:count"] = np.array([40])
    return Statistics.in_memory(arrays)


def scales_of(checkpoint: Checkpoint, dtypes: dict[str, str]) -> ScaleFolding:
    graph = graph_of(checkpoint)
    known = random_statistics(checkpoint, graph)
    grids = {site.name: Grid(3, 8) for site in graph.sites.values() if site.role == "matrix"}
    return ScaleFolding(checkpoint, graph, grids, lambda: known, dtypes)


def test_norms_in_few_bits_lose_nothing(tmp_path: Path) -> None:
    # A norm's weight is rounded to bf16; what that changes is taken by the matrices behind it.
    model = made("gemma2", tmp_path / "model")
    with ingot.open(model) as checkpoint:
        norms = {name: "bf16" for name, site in graph_of(checkpoint).sites.items() if site.role == "norm"}
        view = fold_scales(scales_of(checkpoint, norms), "")
        name = "model.layers.0.input_layernorm.weight"
        assert view[name].dtype == "bf16"
        assert not np.array_equal(view[name].numpy("f32"), checkpoint[name].numpy())
        folder = tmp_path / "scaled"
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        save_file(
            {key: torch.from_numpy(view[key].numpy("f32", copy=True)) for key in view}, folder / "model.safetensors"
        )
    require_same(logits(folder), logits(model))


def test_statistics_are_those_of_the_folded_model(tmp_path: Path) -> None:
    model = made("llama", tmp_path / "model")
    with ingot.open(model) as checkpoint:
        _, folding = fold_rotations(checkpoint, graph_of(checkpoint), (True, True, 3), {})
        saved(views.rotate(checkpoint, r1=True, r2=True, seed=3), tmp_path / "turned")
        for folder in (model, tmp_path / "turned"):
            ingot.calibrate(folder, tmp_path / f"{folder.name}.safetensors", samples=8, length=16)
        of, again = (Statistics.open(tmp_path / f"{name}.safetensors") for name in ("model", "turned"))
        with of, again:
            assert of.metadata["tokens"] == again.metadata["tokens"]
            known = FoldedStatistics(of, folding)
            for name in again.names:
                found, wanted = known.for_matrix(name), again.for_matrix(name)
                assert (found is None) == ("embed_tokens" in name)
                if found is None:
                    continue
                assert wanted is not None
                for field in ("inputs", "outputs", "means"):
                    require_close(getattr(found, field), getattr(wanted, field))
                # Turned, the diagonal is A's, in which tokens weigh what their gradients say.
                plain = name.endswith("down_proj.weight")
                require_close(found.diagonal, wanted.diagonal if plain else np.diag(wanted.inputs))
                assert (found.absmax is None) is not plain


def require_close(found: np.ndarray | None, wanted: np.ndarray | None) -> None:
    assert (found is None) is (wanted is None)
    if found is not None:
        np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())


def test_statistics_of_scaled_inputs_are_those_of_the_scaled_model(tmp_path: Path) -> None:
    model = made("llama", tmp_path / "model")
    with ingot.open(model) as checkpoint:
        folding = scales_of(checkpoint, {})
        saved(fold_scales(folding, ""), tmp_path / "scaled")
        for folder in (model, tmp_path / "scaled"):
            ingot.calibrate(folder, tmp_path / f"{folder.name}.safetensors", samples=8, length=16, fisher=False)
        of, again = (Statistics.open(tmp_path / f"{name}.safetensors") for name in ("model", "scaled"))
        with of, again:
            known = FoldedStatistics(of, folding)
            for name in again.names:
                found, wanted = known.for_matrix(name), again.for_matrix(name)
                assert found is not None
                assert wanted is not None
                for field in ("inputs", "diagonal", "absmax", "means"):
                    require_close(getattr(found, field), getattr(wanted, field))
