"""Conversions to palettes and masks: what is not chosen stays bit for bit, and files hold what the plan says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.conversion.run import convert
from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.memory import anonymous_rss
from ingot.errors import UsageError
from ingot.recipes.load import parse_recipe

SHAPES = {
    "model.layers.0.mlp.up_proj.weight": (80, 64),
    "model.layers.0.self_attn.q_proj.weight": (128, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.embed_tokens.weight": (100, 64),
    "model.layers.0.mlp.small_proj.weight": (8, 64),
}
TAKEN = {"model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    path = tmp_path / "in.safetensors"
    ingot.save(path, {name: cast(rng.normal(0, 0.02, shape), "bf16") for name, shape in SHAPES.items()})
    return path


@pytest.mark.parametrize("preset", ["palette4", "palette4-grouped", "palette8", "sparse50"])
def test_what_is_not_chosen_stays(source: Path, tmp_path: Path, preset: str) -> None:
    out = tmp_path / "out.zt"
    convert(source, out, preset)
    assert ingot.verify(out) == []
    with ingot.open(source) as before, ingot.open(out) as after:
        assert set(after) == set(SHAPES)
        for name in SHAPES:
            old, new = before[name], after[name]
            if name in TAKEN:
                assert new.codec == ("sparse_mask" if preset == "sparse50" else "palette")
                error = np.abs(new.numpy("f32") - old.numpy("f32"))
                assert error.max() < 0.05
                assert error.any()
            else:
                assert (new.codec, new.dtype) == (old.codec, old.dtype)
                assert bytes(new.parts["data"].view()) == bytes(old.parts["data"].view())


def test_threads_and_ceilings_change_no_byte(source: Path, tmp_path: Path) -> None:
    found = set()
    for threads, ram in ((1, None), (3, anonymous_rss() + (400 << 20))):  # beside what the other tests left here
        out = tmp_path / f"{threads}.zt"
        convert(source, out, "palette4-grouped", max_ram=ram, threads=threads)
        found.add(out.read_bytes())
    assert len(found) == 1


def test_importance_bends_codebooks(source: Path, tmp_path: Path) -> None:
    norms, plain, bent = (tmp_path / name for name in ("norms.safetensors", "plain.zt", "bent.zt"))
    name = "model.layers.0.mlp.up_proj.weight"
    vector = np.where(np.arange(64) < 8, 30.0, 0.1).astype(np.float32)
    ingot.save(norms, {name.removesuffix(".weight"): vector, "unknown": vector})
    convert(source, plain, "palette4")
    convert(source, bent, "palette4", importance=norms)
    with ingot.open(source) as old, ingot.open(plain) as one, ingot.open(bent) as two:
        weights = old[name].numpy("f32")
        heavy = [float(((weights - found[name].numpy("f32"))[:, :8] ** 2).sum()) for found in (one, two)]
        assert heavy[1] < 0.9 * heavy[0]
        other = "model.layers.0.self_attn.q_proj.weight"
        assert bytes(one[other].parts["indices"].view()) == bytes(two[other].parts["indices"].view())


@pytest.mark.parametrize(
    "vectors",
    [
        {"unknown": np.ones(64)},
        {"model.layers.0.mlp.up_proj": np.ones(63)},
        {"model.layers.0.mlp.up_proj": np.zeros(64)},
    ],
    ids=["name", "length", "zeros"],
)
def test_importance_that_fits_nothing_is_refused(source: Path, tmp_path: Path, vectors: dict[str, np.ndarray]) -> None:
    ingot.save(tmp_path / "norms.safetensors", vectors)
    with pytest.raises(UsageError) as caught:
        convert(source, tmp_path / "out.zt", "palette4", importance=tmp_path / "norms.safetensors")
    assert caught.value.rule == "convert.importance"


def test_pruning_what_is_pruned_already_asks(source: Path, tmp_path: Path) -> None:
    """A stored mask may not pass for the result of another pruning."""
    half, more, again = (tmp_path / name for name in ("half.zt", "more.zt", "again.zt"))
    convert(source, half, "sparse50")
    rules = (
        '[[rules]]\nmatch = ["*_proj.weight"]\nmin_size = 4096\ncodec = "sparse_mask"\noptions = { sparsity = 0.9 }\n'
    )
    recipe = parse_recipe(rules.encode(), location="r", name="r")
    with pytest.raises(UsageError) as caught:
        convert(half, more, recipe)
    assert caught.value.rule == "convert.requantize"
    convert(half, more, recipe, allow_requantize=True)
    with ingot.open(more) as found:
        for name in TAKEN:
            assert found[name].params["nnz"] == pytest.approx(0.1 * found[name].size, rel=0.1)
    convert(half, again)
    with ingot.open(half) as one, ingot.open(again) as two:
        for name in TAKEN:
            assert dict(one[name].params) == dict(two[name].params)
