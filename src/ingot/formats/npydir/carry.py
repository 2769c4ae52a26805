"""Which tensors a Squish directory can carry, and as which arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ingot.core.checked import MAX_RANK
from ingot.core.dtypes import DTYPES
from ingot.core.floats import FLOATS
from ingot.core.retype import HOLDERS
from ingot.errors import UnsupportedError
from ingot.formats.npydir import npy
from ingot.formats.npydir.names import refuses_name
from ingot.model.spec import TensorSpec

FLAT_GROUP = 64
"""Consecutive elements that share a scale in the three-bit form."""
LEGACY_ZERO = 7
"""What the older four-bit form adds to a code."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array to be written: its suffix, the role of the part that fills it, element type and shape."""

    suffix: str
    role: str
    dtype: str
    shape: tuple[int, ...]


def refusal(spec: TensorSpec) -> str | None:
    """Return why the directory cannot carry the tensor; None if it can."""
    try:
        arrays_of(spec)
    except UnsupportedError as error:
        return error.message
    return None


def arrays_of(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    """Return a tensor's arrays in the order of its parts, the original's shape not among them.

    Raises ``UnsupportedError`` ``npydir.carry`` with the reason.
    """
    reason = refuses_name(spec.name)
    if reason is not None:
        raise _refuse(reason)
    if len(spec.shape) > MAX_RANK:
        raise _refuse(f"it has at most {MAX_RANK} dimensions, found {len(spec.shape)}")
    if any(part.encoding != "raw" for part in spec.parts):
        raise _refuse("its arrays are mapped as they lie in the files, so parts are not compressed")
    if spec.codec == "dense":
        arrays = _passthrough(spec)
    elif spec.codec == "quantized_group":
        arrays = _quantized(spec)
    else:
        raise _refuse(f"it has dense and quantized_group tensors, this one is {spec.codec[:80]}; use .zt")
    _check_parts(spec, arrays)
    return arrays


def _refuse(reason: str) -> UnsupportedError:
    return UnsupportedError(f"a Squish directory cannot carry this tensor: {reason}", rule="npydir.carry")


def _check_parts(spec: TensorSpec, arrays: tuple[ArraySpec, ...]) -> None:
    if [part.role for part in spec.parts] != [array.role for array in arrays]:
        wanted = ", ".join(array.role for array in arrays)
        raise _refuse(f"expected the parts {wanted}, found {', '.join(part.role for part in spec.parts)}")
    for part, array in zip(spec.parts, arrays, strict=True):
        size = prod(array.shape) * DTYPES[array.dtype].bits // 8
        if part.length != size:
            raise _refuse(f"expected {size} bytes in part {part.role!r}, found {part.length}")


def _passthrough(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    row = DTYPES.get(spec.dtype)
    if row is None or not spec.parts:
        raise _refuse(f"element type {spec.dtype[:80]} is not known")
    part = spec.parts[0]
    held = part.dtype in HOLDERS.get(row.name, ()) and part.type == row.name
    if not held and row.name not in npy.CODE_OF:
        raise _refuse(f"a .npy file has no name for {row.name}; f16 or f32 hold such values where they are floats")
    if not held and (part.dtype, part.type or part.dtype) != (row.storage, row.name):
        raise _refuse(f"expected values stored as {row.name}, found {part.dtype}")
    return (ArraySpec("pt", "data", part.dtype if held else row.name, spec.shape),)


def _quantized(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    params = spec.params
    if params.get("codec_version") != 1 or spec.dtype not in FLOATS:
        raise _refuse("expected the attributes that Ingot writes (codec_version 1) and a float type; repack it")
    if not spec.size:
        raise _refuse("quantized tensors have at least one element")
    rows, cols = _matrix(spec)
    bits, signed, zeros = params.get("bits"), params.get("signed"), params.get("zeros")
    kind = (bits, signed, zeros, params.get("zero_kind", "point"), params.get("zero_point", 0))
    if params.get("packing") != "rows_lsb" and cols * (bits if isinstance(bits, int) else 1) % 8:
        raise _refuse(f"codes are packed as rows_lsb, found {params.get('packing')!r}")
    if params.get("packing") not in ("rows_lsb", "flat_lsb"):
        raise _refuse(f"codes are packed low bits first, found {params.get('packing')!r}")
    if kind == (8, True, False, "point", 0):
        return _arrays(spec, ("q", "s", None), ("i8", (rows, cols)), _scale_shape(params, rows, cols))
    if kind == (4, False, True, "offset", 0):
        _require_even(cols)
        return _arrays(spec, ("q4a", "s4a", "z4a"), ("u8", (rows, cols // 2)), _scale_shape(params, rows, cols))
    if kind == (4, False, False, "point", LEGACY_ZERO):
        _require_even(cols)
        return _arrays(spec, ("q4", "s4", None), ("u8", (rows, cols // 2)), _scale_shape(params, rows, cols))
    if kind == (3, False, True, "point", 0):
        group = cols if params.get("granularity") == "row" else params.get("group_size")
        if group != FLAT_GROUP or cols % FLAT_GROUP:
            raise _refuse(f"three-bit codes share a scale in runs of {FLAT_GROUP} elements, found {group}")
        return _arrays(spec, ("q3", "s3", "z3"), ("u8", (spec.size * 3 // 8,)), (spec.size // FLAT_GROUP,))
    raise _refuse(
        f"it has forms for 8 bits signed, 4 bits with offsets, 4 bits less {LEGACY_ZERO}, 3 bits with zero points; "
        f"found {bits} bits, signed={signed}, zeros={zeros}, zero_kind={kind[3]!r}, zero_point={kind[4]}"
    )


def _arrays(
    spec: TensorSpec, suffixes: tuple[str, str, str | None], codes: tuple[str, tuple[int, ...]], scales: tuple[int, ...]
) -> tuple[ArraySpec, ...]:
    for part in spec.parts[1:]:
        if part.dtype != "f32":
            raise _refuse(f'scales and zero points are f32, found {part.dtype}; quantize with scales = "f32"')
    packed, scale, zero = suffixes
    return (
        ArraySpec(packed, "packed_weight", *codes),
        ArraySpec(scale, "scales", "f32", scales),
        *((ArraySpec(zero, "zeros", "f32", scales),) if zero else ()),
    )


def _matrix(spec: TensorSpec) -> tuple[int, int]:
    matrix = spec.params.get("matrix")
    if matrix is None:
        return (prod(spec.shape[:-1]), spec.shape[-1]) if spec.shape else (1, 1)
    if not isinstance(matrix, list | tuple) or len(matrix) != 2 or prod(matrix) != spec.size:
        raise _refuse(f"expected rows and columns that hold {spec.size} elements, found {matrix!r}")
    return int(matrix[0]), int(matrix[1])


def _scale_shape(params: Mapping[str, Any], rows: int, cols: int) -> tuple[int, ...]:
    granularity, group = params.get("granularity"), params.get("group_size")
    if granularity == "row":
        return (rows,) if params.get("bits") == 8 else (rows, 1)
    if granularity != "group" or not isinstance(group, int):
        raise _refuse(f"a scale serves a row or a group of columns, found granularity {granularity!r}")
    if group > 0 and cols % group == 0:
        return (rows, cols // group)
    raise _refuse(f"groups have one size, which is not stated: {group} does not divide {cols} columns")


def _require_even(cols: int) -> None:
    if cols % 2:
        raise _refuse(f"two four-bit codes make a byte, and a row has {cols} columns: keep it at 8 bits")
