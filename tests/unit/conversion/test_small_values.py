"""Weights and differences too small for f16 scales: other types are chosen and named, or the tensor stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.resolve_range import RULE, merge_options, resolve_range
from ingot.codecs.table import CODECS
from ingot.conversion.plan import PlanRequest, plan_conversion
from ingot.delta import diff as diffing
from ingot.errors import UnsupportedError
from ingot.formats.zt.format import ZtFormat
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array
from ingot.recipes.load import load_recipe
from ingot.testing.codecs import encode_tensor

NAME = "model.layers.1.mlp.up_proj.weight"
SIGNS = {"bits": 1, "group": "row", "scales": "auto", "quantizer": "sign-rms"}
LOSSY: list[tuple[str, dict[str, Any]]] = [
    ("affine", {}),
    ("affine", {"bits": 8, "group": 64, "quantizer": "mse"}),
    ("affine", {"symmetric": False, "zero_kind": "offset"}),
    ("affine", SIGNS),
    ("palette", {}),
    ("palette", {"bits": 8, "entries": "i8"}),
    ("palette", {"bits": 6, "vector": 2, "vector_axis": 1}),
    ("with_outliers", {"options": {"bits": 3}}),
    ("sparse_mask", {"sparsity": 0.5, "inner": "affine", "options": {"bits": 4}}),
    ("sparse_blocks", {"inner": "palette", "options": {"bits": 4}}),
    ("low_rank", {"rank": 12}),
]


def normal(scale: float, rows: int = 16, cols: int = 256) -> Array:
    return (np.random.default_rng(8).normal(0, 1, (rows, cols)) * scale).astype(np.float32)


def error(wanted: Array, found: Array) -> float:
    wide = wanted.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - wide) / np.linalg.norm(wide))


def chosen(codec: str, options: dict[str, Any], array: Array) -> dict[str, Any]:
    def made(options: Any) -> Any:
        return CODECS[codec].encoder(array.shape, "f32", options)

    return dict(resolve_range(made(options), made, options, [(0, array)])[1])


@pytest.mark.parametrize(("codec", "options"), LOSSY, ids=str)
def test_small_values_are_kept_as_well_as_others(codec: str, options: dict[str, Any]) -> None:
    ordinary = normal(0.02)
    assert chosen(codec, options, ordinary) == {}
    assert chosen(codec, options, ordinary * 0) == {}
    wanted = error(ordinary, encode_tensor(CODECS[codec], ordinary, options, dtype="f32").numpy())
    for scale in (1e-8, 1e-15, 1e-30):
        array = normal(scale)
        more = chosen(codec, options, array)
        assert more
        tensor = encode_tensor(CODECS[codec], array, merge_options(options, more), dtype="f32")
        assert error(array, tensor.numpy()) < 1.15 * wanted


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("affine", {"scales": "f16"}),
        ("palette", {"entries": "f16"}),
        ("with_outliers", {"values": "f16", "options": {"scales": "f32"}}),
        ("with_outliers", {"values": "f32", "options": {"scales": "f16"}}),
        ("sparse_mask", {"inner": "palette", "options": {"entries": "f16"}}),
        ("low_rank", {"factors": "f16"}),
        ("delta_sign", {}),
        ("delta_int4", {}),
    ],
    ids=str,
)
def test_types_that_were_named_are_kept_and_what_they_lose_is_refused(codec: str, options: dict[str, Any]) -> None:
    assert chosen(codec, options, normal(1e-5)) == {}
    with pytest.raises(UnsupportedError) as caught:
        chosen(codec, options, normal(1e-18))
    assert caught.value.rule == RULE


def test_looking_ends_where_ordinary_values_begin() -> None:
    def rows() -> Any:
        yield 0, normal(0, 2)
        yield 2, normal(0.02)
        raise AssertionError("nobody needs more")

    encoder = CODECS["affine"].encoder((18, 256), "f32", {})
    assert resolve_range(encoder, lambda options: encoder, {}, rows())[1] == {}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    ingot.save(
        tmp_path / "small.safetensors", {NAME: normal(1e-8, 128, 512), "other.up_proj.weight": normal(0.02, 128, 512)}
    )
    return tmp_path / "small.safetensors"


def test_a_conversion_chooses_and_says_so(small: Path) -> None:
    report = ingot.convert(small, small.parent / "out.zt", "int4")
    rules = {item.name: item.rule for item in report.tensors}
    assert "scales bf16" in rules[NAME]
    assert "bf16" not in rules["other.up_proj.weight"]
    with ingot.open(small) as before, ingot.open(small.parent / "out.zt") as after:
        assert after[NAME].parts["scales"].dtype == "bf16"
        assert after["other.up_proj.weight"].parts["scales"].dtype == "f16"
        assert error(before[NAME].numpy(), after[NAME].numpy()) < 0.12
    again = ingot.convert(small.parent / "out.zt", small.parent / "again.zt", "int4")
    assert again.actions == {"moved": 2}


class _Halves(ZtFormat):
    """A container whose scales are f16."""

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        return (
            "its scales are f16" if any(part.dtype == "bf16" for part in spec.parts) else super().why_unsupported(spec)
        )


def test_a_container_of_f16_scales_keeps_the_tensor_as_it_is(small: Path) -> None:
    with ingot.open(small) as source:
        plan = plan_conversion(source, _Halves(), PlanRequest(recipe=load_recipe("int4")))
    steps = {step.tensor.name: step for step in plan.steps}
    assert steps[NAME].spec.codec == "dense"
    assert steps[NAME].exact
    assert "kept" in steps[NAME].rule
    assert steps["other.up_proj.weight"].spec.codec == "affine"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model of zeros and ones, and what differs from it by 1e-8."""
    base = {"a.weight": np.zeros((256, 512), np.float32), "b.weight": normal(0.02, 256, 512)}
    ingot.save(tmp_path / "base.safetensors", base)
    moved = {"a.weight": normal(1e-8, 256, 512), "b.weight": base["b.weight"] + normal(1e-3, 256, 512)}
    ingot.save(tmp_path / "tuned.safetensors", moved)
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


@pytest.mark.parametrize(
    ("strategy", "most"), [("int8", 0.02), ("int4", 0.12), ("int3", 0.24), ("int2", 0.5), ("int1", 0.7)]
)
def test_small_differences_are_kept_as_well_as_others(pair: tuple[Path, Path], strategy: str, most: float) -> None:
    report = diffing.diff(*pair, pair[0].parent / "delta.zt", strategy)
    for tensor in report.tensors:
        assert tensor.unrestored is not None
        assert tensor.unrestored**0.5 < most
    assert not report.short


def test_a_wdelta_refuses_differences_that_its_scales_cannot_hold(pair: tuple[Path, Path]) -> None:
    for strategy in ("int4", "quantized"):
        with pytest.raises(UnsupportedError) as caught:
            diffing.diff(*pair, pair[0].parent / "delta.wdelta", strategy)
        assert caught.value.rule == RULE
        assert "a.weight" in str(caught.value.where)
    assert diffing.diff(*pair, pair[0].parent / "delta.wdelta", "sparse").tensors


def test_a_difference_of_which_more_than_half_is_left_is_reported(pair: tuple[Path, Path]) -> None:
    report = diffing.diff(*pair, pair[0].parent / "delta.zt", "low-rank")
    assert [tensor.name for tensor in report.short] == sorted(
        ("a.weight", "b.weight"),
        key=lambda name: -next(item.unrestored or 0 for item in report.tensors if item.name == name),
    )
    with ingot.open(pair[0]) as base, ingot.open(pair[1]) as tuned, ingot.open(pair[0].parent / "delta.zt") as delta:
        for tensor in report.tensors:
            one, other = base[tensor.name].numpy(), tuned[tensor.name].numpy()
            found = np.empty_like(one)
            delta_codec("low_rank").applier(delta[tensor.name], "f32").apply(one, found)
            lost = np.square(found.astype(np.float64) - other).sum() / np.square(one.astype(np.float64) - other).sum()
            assert tensor.unrestored == pytest.approx(lost, rel=1e-6)
    exact = diffing.diff(*pair, pair[0].parent / "exact.zt", "exact")
    assert [tensor.unrestored for tensor in exact.tensors] == [None, None]
    assert not exact.short
