"""Tensors made of parts that are there already."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import NO_ZERO, POINTS, ROWS_LSB, AffineLayout, Constant, Group
from ingot.model.layouts.base import OtherLayout
from ingot.model.layouts.dense import DenseLayout

CODES = np.array([[0x10, 0x32], [0x54, 0x76]], np.uint8)
SCALES = np.array([0.5, 1, 2, 4], np.float16)
LAYOUT = AffineLayout(4, Group(2), ROWS_LSB, False, Constant(1), "f32", "f16")


def test_parts_and_a_layout_are_a_tensor(tmp_path: Any) -> None:
    tensor = ingot.Tensor.from_parts(LAYOUT, {"packed_weight": CODES, "scales": SCALES}, (2, 4), "w")
    wanted = (np.arange(8).reshape(2, 4) - 1) * np.repeat(SCALES.reshape(2, 2), 2, 1).astype(np.float32)
    assert tensor.numpy().tolist() == wanted.tolist()
    assert tensor.layout == LAYOUT
    ingot.save(tmp_path / "w.zt", {"w": tensor})
    with ingot.open(tmp_path / "w.zt") as checkpoint:
        assert checkpoint["w"].layout == LAYOUT
        assert checkpoint["w"].numpy().tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("layout", "parts", "shape", "rule"),
    [
        (LAYOUT, {"packed_weight": CODES, "scales": SCALES}, (2, 5), "affine.size"),
        (LAYOUT, {"packed_weight": CODES, "scales": SCALES[:3]}, (2, 4), "affine.size"),
        (LAYOUT, {"packed_weight": CODES.view(np.int8), "scales": SCALES}, (2, 4), "affine.dtype"),
        (LAYOUT, {"packed_weight": CODES}, (2, 4), "affine.parts"),
        (
            AffineLayout(4, Group(2), ROWS_LSB, False, POINTS, "f32", "f16"),
            {"packed_weight": CODES, "scales": SCALES},
            (2, 4),
            "affine.parts",
        ),
        (
            AffineLayout(9, Group(2), ROWS_LSB, False, NO_ZERO, "f32", "f16"),
            {"packed_weight": CODES, "scales": SCALES},
            (2, 4),
            "affine.params",
        ),
        (OtherLayout("nobody", {}), {}, (2, 4), "codec.unknown"),
    ],
)
def test_what_does_not_fit_is_refused(layout: Any, parts: Any, shape: tuple[int, ...], rule: str) -> None:
    with pytest.raises((CodecError, UnsupportedError)) as caught:
        ingot.Tensor.from_parts(layout, parts, shape)
    assert caught.value.rule == rule


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex64"])
def test_parts_of_types_that_files_store_as_others(tmp_path: Any, dtype: str) -> None:
    """Types with a storage type of their own (8-bit floats are bytes) are parts as any other."""
    values = np.arange(6).astype(getattr(ml_dtypes, dtype, dtype)).reshape(2, 3)
    name = resolve_dtype(values.dtype).name
    tensor = ingot.Tensor.from_parts(DenseLayout(name), {"data": values}, (2, 3), "w")
    ingot.save(tmp_path / "w.zt", {"w": tensor})
    with ingot.open(tmp_path / "w.zt") as checkpoint:
        assert checkpoint["w"].dtype == name
        assert checkpoint["w"].numpy().tobytes() == values.tobytes()
