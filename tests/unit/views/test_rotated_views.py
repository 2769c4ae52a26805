"""Views that fold: what they refuse, that they are lazy and the same however they are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
from ingot import views
from ingot.errors import IngotError
from ingot.recipes.load import parse_recipe
from ingot.views.folding.graph import graph_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    f"{LAYER}.input_layernorm.weight": (8,),
    f"{LAYER}.self_attn.q_proj.weight": (16, 8),
    f"{LAYER}.self_attn.k_proj.weight": (8, 8),
    f"{LAYER}.self_attn.v_proj.weight": (8, 8),
    f"{LAYER}.self_attn.o_proj.weight": (8, 16),
    f"{LAYER}.post_attention_layernorm.weight": (8,),
    f"{LAYER}.mlp.gate_proj.weight": (6, 8),
    f"{LAYER}.mlp.up_proj.weight": (6, 8),
    f"{LAYER}.mlp.down_proj.weight": (8, 6),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
}


def weights(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def written(folder: Path, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    ingot.save(folder / "model.safetensors", arrays)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path / "model", weights())


def test_matrices_are_multiplied_as_the_page_says(model: Path) -> None:
    with ingot.open(model) as checkpoint:
        view = views.rotate(checkpoint, r1=True, r2=True)
        old, new = ({name: each[name].numpy().astype(np.float64) for name in each} for each in (checkpoint, view))
    turn = np.linalg.lstsq(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"], rcond=None)[0].T
    np.testing.assert_allclose(turn @ turn.T, np.eye(8), atol=1e-6)
    assert (np.abs(turn) * 8**0.5).round(5).tolist() == np.ones((8, 8)).tolist()
    gain = old[f"{LAYER}.input_layernorm.weight"]
    assert new[f"{LAYER}.input_layernorm.weight"].tolist() == [1] * 8
    q = f"{LAYER}.self_attn.q_proj.weight"
    np.testing.assert_allclose(new[q], old[q] * gain @ turn.T, atol=1e-5)
    down = f"{LAYER}.mlp.down_proj.weight"
    np.testing.assert_allclose(new[down], turn @ old[down], atol=1e-5)
    # Every query head reads its own key-value head: (v, v, w, w) of heads v and w.
    o, v = f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.self_attn.v_proj.weight"
    for query in range(4):
        through = slice(query * 4, query * 4 + 4)
        shared = slice(query // 2 * 4, query // 2 * 4 + 4)
        was = old[o][:, through] @ (old[v][shared] * gain)
        np.testing.assert_allclose(new[o][:, through] @ new[v][shared], turn @ was @ turn.T, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_bytes_are_the_same_in_any_pieces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "pieces"
    if not folder.exists():
        written(folder, weights())
    with ingot.open(folder) as checkpoint:
        name = data.draw(st.sampled_from([name for name in SHAPES if len(SHAPES[name]) == 2]))
        dtype = data.draw(st.sampled_from(["f32", "bf16"]))
        whole = bytes(views.rotate(checkpoint, r2=True, dtype=dtype)[name].parts["data"].view())
        source = views.rotate(checkpoint, r2=True, dtype=dtype)[name].parts["data"].source
        for _ in range(3):
            start = data.draw(st.integers(0, len(whole)))
            size = data.draw(st.integers(0, len(whole) - start))
            assert bytes(source.view(start, size)) == whole[start : start + size]


def test_copies_and_seeds(model: Path) -> None:
    with ingot.open(model) as checkpoint:
        view = views.rotate(checkpoint, seed=1)
        with pickle.loads(pickle.dumps(view)) as again:
            for name in SHAPES:
                assert np.array_equal(view[name].numpy(), again[name].numpy())
            assert again.views == view.views
        other = views.rotate(checkpoint, seed=2)
        assert other.views != view.views
        name = "lm_head.weight"
        assert not np.allclose(other[name].numpy(), view[name].numpy(), atol=0.1)
        assert view[f"{LAYER}.self_attn.k_proj.weight"].dtype == "f32"
        assert views.rotate(checkpoint, dtype="bf16")[name].dtype == "bf16"


@pytest.mark.parametrize("kept", [False, True])
def test_a_tie_is_given_up_and_said(tmp_path: Path, kept: bool) -> None:
    arrays = weights()
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    if not kept:
        del arrays["lm_head.weight"]
    config = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    model = written(tmp_path / "tied", arrays, {**config, "model_type": "gemma"})  # whose default it is
    with ingot.open(model) as checkpoint:
        view = views.rotate(checkpoint)
        stated = Path(view.companions["config.json"])
        assert json.loads(stated.read_text())["tie_word_embeddings"] is False
        head, embedding = (view[name].numpy() for name in ("lm_head.weight", "model.embed_tokens.weight"))
        assert head.shape == embedding.shape
        assert not np.allclose(head, embedding, atol=0.1)
        assert view["model.norm.weight"].numpy().tolist() == [0] * 8  # 1 + w
        alone = views.rotate(checkpoint, r1=False, r2=True)
        assert ("lm_head.weight" in alone) is kept
    assert json.loads((model / "config.json").read_text()) == {**config, "model_type": "gemma"}
    view.close()
    assert not stated.exists()


def test_stacked_experts_are_folded_as_single_ones_are(tmp_path: Path) -> None:
    arrays, experts = weights(), 3
    for part in ("gate", "up", "down"):
        del arrays[f"{LAYER}.mlp.{part}_proj.weight"]
    random = np.random.default_rng(3)
    each = {
        f"{LAYER}.mlp.experts.{number}.{part}_proj.weight": random.normal(size=shape).astype(np.float32)
        for number in range(experts)
        for part, shape in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6)))
    }
    arrays[f"{LAYER}.mlp.gate.weight"] = random.normal(size=(experts, 8)).astype(np.float32)

    def together(single: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        start = f"{LAYER}.mlp.experts"
        rows = [
            [single[f"{start}.{number}.{part}_proj.weight"] for part in ("gate", "up")] for number in range(experts)
        ]
        return {
            f"{start}.gate_up_proj": np.stack([np.concatenate(pair) for pair in rows]),
            f"{start}.down_proj": np.stack([single[f"{start}.{number}.down_proj.weight"] for number in range(experts)]),
        }

    config = {**CONFIG, "model_type": "qwen3_moe"}
    apart = written(tmp_path / "apart", {**arrays, **each}, config)
    stacked = written(tmp_path / "stacked", {**arrays, **together(each)}, config)
    with ingot.open(apart) as one, ingot.open(stacked) as other:
        single, several = views.rotate(one), views.rotate(other)
        for name, values in together({name: single[name].numpy() for name in each}).items():
            assert np.array_equal(several[name].numpy(), values)
            assert not np.allclose(values, other[name].numpy(), atol=0.1)


NORM = f"{LAYER}.input_layernorm.weight"
UP = f"{LAYER}.mlp.up_proj.weight"
REFUSED: dict[str, tuple[dict[str, np.ndarray | None], dict[str, Any], str]] = {
    "another architecture": ({}, {"model_type": "gpt2"}, "fold.architecture"),
    "a tensor that is not known": ({f"{LAYER}.self_attn.g_proj.weight": np.ones((8, 8), "f4")}, {}, "fold.tensor"),
    "a bias of a norm": ({f"{LAYER}.input_layernorm.bias": np.ones(8, "f4")}, {}, "fold.tensor"),
    "no norm": ({NORM: None}, {}, "fold.tensor"),
    "no last norm": ({"model.norm.weight": None}, {}, "fold.tensor"),
    "no up": ({UP: None}, {}, "fold.tensor"),
    "no head": ({"lm_head.weight": None}, {}, "fold.tensor"),
    "a matrix of another width": ({UP: np.ones((6, 9), "f4")}, {}, "fold.tensor"),
    "a matrix of another height": ({UP: np.ones((7, 8), "f4")}, {}, "fold.tensor"),
    "a vector for a matrix": ({UP: np.ones(48, "f4")}, {}, "fold.tensor"),
    "no size of heads": ({}, {"num_attention_heads": 0}, "fold.tensor"),
    "heads that do not share evenly": ({}, {"num_key_value_heads": 3}, "fold.tensor"),
    "heads of another size": ({}, {"head_dim": 3}, "fold.tensor"),
    "text for a number": ({}, {"hidden_size": "8"}, "fold.tensor"),
    "integers for weights": ({UP: np.ones((6, 8), "i4")}, {}, "fold.tensor"),
    "a layer that is counted otherwise": ({UP.replace("0", "00"): np.ones((6, 8), "f4")}, {}, "fold.tensor"),
    "too large for f16": ({UP: np.full((6, 8), 65504, "f2")}, {}, "fold.value"),
    "NaN in a norm": ({NORM: np.full(8, np.nan, "f4")}, {}, "fold.value"),
    "infinity in a matrix": ({UP: np.full((6, 8), np.inf, "f4")}, {}, "fold.value"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    changed, config, rule = REFUSED[case]
    arrays = {name: values for name, values in {**weights(), **changed}.items() if values is not None}
    folder = written(tmp_path / "model", arrays, {**CONFIG, **config})
    with ingot.open(folder) as checkpoint, pytest.raises(IngotError) as refused:
        _ = [tensor.numpy() for tensor in views.rotate(checkpoint, r2=True).values()]
    assert refused.value.rule == rule


def test_a_size_that_would_need_a_huge_matrix_is_refused(tmp_path: Path) -> None:
    wide = 8 * 4099
    shapes = {name: tuple(wide if size == 8 else 2 for size in shape) for name, shape in SHAPES.items()}
    for part, rows in (("q", 2), ("k", 1), ("v", 1)):
        shapes[f"{LAYER}.self_attn.{part}_proj.weight"] = (rows, wide)
    shapes[f"{LAYER}.self_attn.o_proj.weight"] = (wide, 2)
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    sizes = {"hidden_size": wide, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 1}
    model = written(tmp_path / "wide", arrays, {**CONFIG, **sizes})
    with ingot.open(model) as checkpoint, pytest.raises(IngotError) as refused:
        views.rotate(checkpoint)
    assert refused.value.rule == "fold.tensor"
    assert "4099" in str(refused.value)


def test_what_else_is_refused(model: Path, tmp_path: Path) -> None:
    def rule(folder: Path, **how: bool) -> str | None:
        with ingot.open(folder) as checkpoint, pytest.raises(IngotError) as refused:
            views.rotate(checkpoint, **how)
        return refused.value.rule

    assert rule(model, r1=False) == "fold.nothing"
    assert rule(written(tmp_path / "bare", weights(), {})) == "fold.architecture"
    own = parse_recipe('[[rules]]\nmin_ndim = 2\ncodec = "affine"', location="test")
    ingot.convert(model, tmp_path / "int8", own)
    assert rule(tmp_path / "int8") == "fold.packed"
    with ingot.open(model) as checkpoint:
        (model / "config.json").write_text("[]")
        with pytest.raises(IngotError) as refused:
            views.rotate(checkpoint)
    assert refused.value.rule == "fold.config"


def test_every_expert_is_a_stream(tmp_path: Path) -> None:
    arrays = {name: values for name, values in weights().items() if ".mlp." not in name}
    arrays[f"{LAYER}.mlp.gate.weight"] = np.ones((64, 8), np.float32)
    for number in range(64):
        start = f"{LAYER}.mlp.experts.{number}"
        arrays |= {f"{start}.{part}_proj.weight": np.ones((6, 8), np.float32) for part in ("gate", "up")}
        arrays[f"{start}.down_proj.weight"] = np.ones((8, 6), np.float32)
    with ingot.open(written(tmp_path / "m", arrays, {**CONFIG, "model_type": "qwen3_moe"})) as checkpoint:
        graph = graph_of(checkpoint)
    assert len(graph.readers["0.mlp"]) == 129
    assert graph.sizes["0.expert.63"] == 6
