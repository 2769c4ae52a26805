"""Structured pruning: which matrices belong together, which blocks go, and what comes out of ``convert``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.table import CODECS
from ingot.conversion.run import prepare
from ingot.core.numeric.blocks import Blocks
from ingot.core.runtime.memory import anonymous_rss
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import CodecError, IntegrityError, UnsupportedError, UsageError
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor
from ingot.views.pruning.prune import Ffn, PruneOptions, Skipped, channel_norms, choose, find_ffns

UP, GATE, DOWN = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "gate", "down"))


def tensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "f32") -> dict[str, Tensor]:
    dense = CODECS["dense"]
    return {name: encode_tensor(dense, np.zeros(shape, np.float32), dtype=dtype) for name, shape in shapes.items()}


def found(shapes: Mapping[str, tuple[int, ...]]) -> list[Ffn | Skipped]:
    return list(find_ffns(tensors(shapes)))


@pytest.mark.parametrize(
    ("module", "words", "last"),
    [
        ("model.layers.0.mlp", "gate_proj up_proj", "down_proj"),
        ("layers.0.feed_forward", "w1 w3", "w2"),
        ("model.layers.2.mlp.experts.7", "gate_proj up_proj", "down_proj"),
        ("decoder.block.1.layer.2.DenseReluDense", "wi_0 wi_1", "wo"),
        ("decoder.block.1.layer.2.DenseReluDense", "wi", "wo"),
        ("model.decoder.layers.0", "fc1", "fc2"),
        ("gpt_neox.layers.0.mlp", "dense_h_to_4h", "dense_4h_to_h"),
        ("encoder.layer.0", "intermediate.dense", "output.dense"),
        ("blk.0", "ffn_gate ffn_up", "ffn_down"),
        ("model.layers.0.mlp", "up_proj", "down_proj"),
    ],
)
def test_the_usual_names(module: str, words: str, last: str) -> None:
    inputs, down = tuple(f"{module}.{word}.weight" for word in words.split()), f"{module}.{last}.weight"
    others = {"encoder.layer.0.attention.output.dense.weight": (8, 8), "model.norm.weight": (8,)}
    (ffn,) = found({**others, **dict.fromkeys(inputs, (12, 8)), down: (8, 12)})
    assert isinstance(ffn, Ffn)
    assert (ffn.inputs, ffn.down, ffn.channels) == (inputs, down, 12)
    assert ffn.channel_axis == {**dict.fromkeys(inputs, 0), down: 1}


@pytest.mark.parametrize(
    ("up", "down", "bias", "axis"),
    [((8, 12), (12, 8), 12, 1), ((12, 8), (8, 12), 12, 0), ((8, 8), (8, 8), 8, None), ((8, 12), (12, 8), None, None)],
)
def test_gpt2_and_its_descendants_are_told_by_the_bias(
    up: tuple[int, int], down: tuple[int, int], bias: int | None, axis: int | None
) -> None:
    names = {"transformer.h.0.mlp.c_fc.weight": up, "transformer.h.0.mlp.c_proj.weight": down}
    if bias is not None:
        names["transformer.h.0.mlp.c_fc.bias"] = (bias,)
    (ffn,) = found(names)
    if axis is None:
        assert isinstance(ffn, Skipped)
    else:
        assert isinstance(ffn, Ffn)
        assert ffn.channels == 12
        assert list(ffn.channel_axis.values()) == [axis, 1 - axis]


@pytest.mark.parametrize(
    "shapes",
    [
        {UP: (12, 8), GATE: (12, 8), DOWN: (8, 11)},
        {UP: (12, 8), GATE: (11, 8), DOWN: (8, 12)},
        {UP: (2, 12, 8), GATE: (2, 12, 8), DOWN: (2, 8, 12)},
        {"model.layers.0.mlp.gate_up_proj.weight": (24, 8), "model.layers.0.mlp.down_proj.weight": (8, 12)},
        {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 24), "model.layers.0.mlp.experts.down_proj": (4, 12, 8)},
    ],
)
def test_what_cannot_be_pruned_is_told(shapes: dict[str, tuple[int, ...]]) -> None:
    items = found(shapes)
    assert items
    assert all(isinstance(item, Skipped) and item.reason for item in items)


# Scores.


@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (300, 1500)])
def test_norms_are_those_of_rows_and_columns(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tensor = encode_tensor(CODECS["dense"], values, dtype="f32")
    np.testing.assert_allclose(channel_norms(tensor, 0), np.linalg.norm(values.astype(np.float64), axis=1))
    np.testing.assert_allclose(channel_norms(tensor, 1), np.linalg.norm(values.astype(np.float64), axis=0))


@pytest.mark.parametrize(
    ("scores", "fraction", "block", "kept"),
    [
        ([3, 1, 2, 4], 0.5, 1, "1001"),
        ([3, 1, 2, 4], 0.25, 1, "1011"),
        ([3, 1, 2, 4], 0.1, 1, "1111"),
        ([3, 1, 2, 4], 0, 1, "1111"),
        ([3, 1, 2, 4], 1, 1, "0001"),
        ([3, 1, 2, 4], 0.5, 2, "01"),
        ([3, 1, 2, 4], 1, 64, "1"),
        ([1, 1, 1, 1], 0.5, 1, "0011"),
        ([5, 5, 4, 4, 9], 0.4, 2, "101"),  # a short block is judged by its mean
        ([np.nan, 1, 2, 3], 0.75, 1, "1000"),
        ([], 0.5, 4, ""),
    ],
)
def test_the_lowest_blocks_go(scores: list[float], fraction: float, block: int, kept: str) -> None:
    found = choose(np.array(scores, np.float64), PruneOptions(fraction, block))
    assert found == Blocks.from_flags(len(scores), block, [char == "1" for char in kept])


# Converting.

BLOCK = 16


@pytest.fixture
def weak(model: Path, weights: dict[str, np.ndarray]) -> tuple[Path, dict[str, list[int]]]:
    """The model with some weak channels in each FFN: which blocks of 16 ought to go, by layer prefix."""
    changed, expected = dict(weights), {}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp."
        blocks = [layer, layer + 3]
        for block in blocks:
            span = slice(block * BLOCK, (block + 1) * BLOCK)
            up = changed[prefix + "up_proj.weight"].copy()
            up[span] = (up[span].astype(np.float32) / 8).astype(up.dtype)
            changed[prefix + "up_proj.weight"] = up
        expected[prefix] = blocks
    ingot.save(model / "model.safetensors", changed, {"format": "pt"})
    return model, expected


def zero_blocks(path: Path, prefix: str) -> list[list[int]]:
    """Which blocks of channels are zero in gate, up and down."""
    with ingot.open(path) as checkpoint:
        arrays = [checkpoint[f"{prefix}{name}_proj.weight"].numpy("f32") for name in ("gate", "up", "down")]
    arrays[2] = arrays[2].T
    return [[b for b in range(len(a) // BLOCK) if not a[b * BLOCK : (b + 1) * BLOCK].any()] for a in arrays]


@pytest.mark.parametrize("recipe", [None, "int4", "lossless"])
def test_the_weak_blocks_of_all_three_matrices_go(
    weak: tuple[Path, dict[str, list[int]]], tmp_path: Path, recipe: str | None
) -> None:
    path, expected = weak
    report = ingot.convert(path, tmp_path / "out.zt", recipe, prune=0.2, prune_block=BLOCK)
    for prefix, blocks in expected.items():
        assert zero_blocks(tmp_path / "out.zt", prefix) == [blocks] * 3
    assert len(report.pruned) == 9
    assert report.sparsity == pytest.approx(0.2)
    assert not report.exact
    for item in report.pruned:
        assert (item.codec, item.action, item.exact) == ("sparse_blocks", "encoded", False)
        assert item.error is not None
        assert "pruned 20.0 %" in item.rule
    others = [item for item in report.tensors if not item.sparsity]
    assert all(item.codec != "sparse_blocks" for item in others)
    plain = ingot.convert(path, tmp_path / "whole.zt", recipe)
    assert report.size < plain.size
    assert not ingot.verify(tmp_path / "out.zt", strict=True)


def test_the_error_counts_what_was_dropped(weak: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = weak
    report = ingot.convert(path, tmp_path / "out.zt", prune=0.5, prune_block=BLOCK)
    compared = {item.name: item.stats for item in ingot.compare(path, tmp_path / "out.zt").tensors}
    for item in report.pruned:
        stats = compared[item.name]
        assert stats is not None
        assert item.error is not None
        assert item.error["rms"] == pytest.approx(stats.rms)
        assert item.error["max_abs"] > 0


def test_activations_decide_with_the_down_projection(weak: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = weak
    norms = np.ones(160, np.float32)
    norms[5 * BLOCK : 6 * BLOCK] = 0
    for end in (".weight", ""):
        names = [f"model.layers.{layer}.mlp.down_proj{end}" for layer in range(3)]
        ingot.save(tmp_path / "act.safetensors", dict.fromkeys(names, norms))
        out = tmp_path / f"out{end}.zt"
        ingot.convert(path, out, prune=0.1, prune_block=BLOCK, activations=tmp_path / "act.safetensors")
        assert zero_blocks(out, "model.layers.2.mlp.") == [[5]] * 3


@pytest.mark.parametrize(
    ("vectors", "where"),
    [
        ({}, ""),
        ({"model.layers.0.mlp.down_proj": np.ones(159, np.float32)}, "model.layers.0.mlp.down_proj"),
        ({"model.layers.0.mlp.down_proj": np.ones(160, np.int32)}, "model.layers.0.mlp.down_proj"),
        ({"model.layers.0.mlp.down_proj": -np.ones(160, np.float32)}, "model.layers.0.mlp.down_proj"),
        ({"model.layers.0.mlp.down_proj": np.full(160, np.nan, np.float32)}, "model.layers.0.mlp.down_proj"),
    ],
)
def test_activations_that_do_not_fit(model: Path, tmp_path: Path, vectors: dict[str, Any], where: str) -> None:
    ingot.save(tmp_path / "act.zt", vectors)
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "out.zt", prune=0.1, activations=tmp_path / "act.zt")
    assert caught.value.rule == "convert.activations"
    assert (caught.value.where or "") == where
    assert not (tmp_path / "out.zt").exists()


@pytest.mark.parametrize(
    "options",
    [{"prune": -0.1}, {"prune": 1.1}, {"prune": 0.1, "prune_block": 0}, {"prune_block": 8}, {"activations": "x"}],
)
def test_options_that_mean_nothing(model: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "out.zt", **options)
    assert caught.value.rule == "convert.prune"


def test_nothing_to_prune(tmp_path: Path) -> None:
    ingot.save(tmp_path / "in.safetensors", {"lm_head.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "in.safetensors", tmp_path / "out.zt", prune=0.5)
    assert caught.value.rule == "convert.prune"


def test_a_target_that_does_not_carry_the_codec_says_so(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(model, tmp_path / "out.safetensors", prune=0.5)
    assert caught.value.rule == "convert.unsupported"


def test_what_is_pruned_stays_pruned(weak: tuple[Path, dict[str, list[int]]], tmp_path: Path) -> None:
    path, expected = weak
    ingot.convert(path, tmp_path / "at-once.zt", "int4", prune=0.2, prune_block=BLOCK)
    ingot.convert(path, tmp_path / "pruned.zt", prune=0.2, prune_block=BLOCK)
    report = ingot.convert(tmp_path / "pruned.zt", tmp_path / "later.zt", "int4")
    assert (tmp_path / "later.zt").read_bytes() == (tmp_path / "at-once.zt").read_bytes()
    assert report.sparsity == pytest.approx(0.2)
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "later.zt", tmp_path / "again.zt", "int3")
    assert caught.value.rule == "convert.requantize"
    exact = ingot.convert(tmp_path / "pruned.zt", tmp_path / "small.zt", "lossless")
    assert exact.exact
    assert ingot.compare(tmp_path / "pruned.zt", tmp_path / "small.zt").same
    moved = ingot.convert(tmp_path / "later.zt", tmp_path / "moved.zt")
    assert set(moved.actions) == {"moved"}
    ingot.convert(tmp_path / "pruned.zt", tmp_path / "back.safetensors")
    for prefix, blocks in expected.items():
        assert zero_blocks(tmp_path / "back.safetensors", prefix) == [blocks] * 3


def test_threads_and_ceilings_change_nothing_and_progress_counts_both_passes(model: Path, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    ingot.convert(model, tmp_path / "1.zt", "int4", prune=0.3, prune_block=BLOCK, threads=1, progress=events.append)
    ceiling = anonymous_rss() + (128 << 20)  # this process holds what all tests before it left
    ingot.convert(model, tmp_path / "3.zt", "int4", "zt", ceiling, prune=0.3, prune_block=BLOCK, threads=3)
    assert (tmp_path / "1.zt").read_bytes() == (tmp_path / "3.zt").read_bytes()
    assert len({event.total for event in events}) == 1
    done = [event.processed for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total


class StopHereError(Exception):
    """Raised by a progress callback."""


def stop_after(fraction: float) -> Callable[[ProgressEvent], None]:
    def callback(event: ProgressEvent) -> None:
        if event.processed > fraction * event.total:
            raise StopHereError

    return callback


def test_resuming_needs_the_same_masks(model: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
        ingot.save(tmp_path / f"{seed}.zt", {name: rng.random(160, np.float32) for name in names})
    options: Any = {"prune": 0.3, "prune_block": BLOCK, "activations": tmp_path / "0.zt"}
    ingot.convert(model, tmp_path / "whole.zt", "int4", **options)
    with pytest.raises(StopHereError):
        ingot.convert(model, tmp_path / "out.zt", "int4", resume=True, progress=stop_after(0.7), **options)
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "out.zt", "int4", resume=True, **{**options, "activations": tmp_path / "1.zt"})
    assert caught.value.rule == "resume.changed"
    report = ingot.convert(model, tmp_path / "out.zt", "int4", resume=True, **options)
    assert report.resumed
    assert report.sparsity == pytest.approx(0.3)
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "whole.zt").read_bytes()


def test_damage_is_seen_while_scoring(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "in.zt")
    data = bytearray((tmp_path / "in.zt").read_bytes())
    with ingot.open(tmp_path / "in.zt") as checkpoint:
        data[checkpoint[DOWN].parts["data"].offset + 2] ^= 1
    (tmp_path / "in.zt").write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        prepare(tmp_path / "in.zt", tmp_path / "out.zt", prune=0.5)
    assert caught.value.rule == "part.digest-mismatch"


@pytest.mark.parametrize("key", ["axis", "channels", "kept"])
def test_a_pruned_tensor_without_a_parameter_is_refused(tmp_path: Path, key: str) -> None:
    tensor = encode_tensor(CODECS["sparse_blocks"], np.ones((128, 8), np.float32), {"mask": b"\1"}, dtype="f32")
    ingot.save(tmp_path / "in.zt", {"w": tensor})
    data = (tmp_path / "in.zt").read_bytes()
    assert data.count(key.encode()) == 1
    (tmp_path / "in.zt").write_bytes(data.replace(key.encode(), b"_" * len(key)))
    with pytest.raises(CodecError) as caught:
        ingot.convert(tmp_path / "in.zt", tmp_path / "out.zt", verify=False)
    assert caught.value.rule == "sparse_blocks.params"
