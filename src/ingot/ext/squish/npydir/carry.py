"""Decide which tensors a Squish directory can store, and in which arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ingot.core.numeric.dtypes import DTYPES, FLOATS, MAX_RANK
from ingot.core.numeric.exact_cast import EXACT_WIDER_DTYPES
from ingot.errors import CodecError, UnsupportedError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.names import why_name_unsupported
from ingot.model.layouts.affine import NO_ZERO, OFFSETS, POINTS, ROLES, ROWS_LSB, AffineLayout, Constant, Zero
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.spec import TensorSpec

FLAT_GROUP = 64
"""Number of consecutive elements that share a scale in the three-bit form."""
LEGACY_ZERO = Constant(7)
"""Zero point that the older four-bit form subtracts from each code."""
SCALE = "f32"
"""Element type of scales and zero points that squish's document specifies."""
SHORT_SCALES = (SCALE, "f16")
"""Element types that four-bit scales and zero points may have; squish's loader converts both to float32."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array to write: its suffix, the role of the part that fills it, its element type and shape."""

    suffix: str
    role: str
    dtype: str
    shape: tuple[int, ...]


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return the reason why a Squish directory cannot store the tensor; None if it can."""
    try:
        arrays_of(spec)
    except UnsupportedError as error:
        return error.message
    return None


def arrays_of(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    """Return the arrays of a tensor in the order of its parts, without the array of its original shape.

    Raises ``UnsupportedError`` ``npydir.carry`` with the reason if the tensor cannot be stored.
    """
    reason = why_name_unsupported(spec.name)
    if reason is not None:
        raise _refuse(reason)
    if len(spec.shape) > MAX_RANK:
        raise _refuse(f"expected at most {MAX_RANK} dimensions, found {len(spec.shape)}")
    if any(part.encoding != "raw" for part in spec.parts):
        raise _refuse("expected uncompressed parts, because its arrays are mapped from the files")
    if spec.codec == DenseLayout.codec:
        arrays = _dense_arrays(spec)
    elif spec.codec == AffineLayout.codec:
        arrays = _quantized_arrays(spec)
    else:
        raise _refuse(f"expected codec {DenseLayout.codec} or {AffineLayout.codec}, found {spec.codec[:80]}; use .zt")
    _check_parts(spec, arrays)
    return arrays


def _refuse(reason: str) -> UnsupportedError:
    return UnsupportedError(f"a Squish directory cannot carry this tensor: {reason}", rule="npydir.carry")


def _check_parts(spec: TensorSpec, arrays: tuple[ArraySpec, ...]) -> None:
    if [part.role for part in spec.parts] != [array.role for array in arrays]:
        roles = ", ".join(array.role for array in arrays)
        raise _refuse(f"expected the parts {roles}, found {', '.join(part.role for part in spec.parts)}")
    for part, array in zip(spec.parts, arrays, strict=True):
        size = prod(array.shape) * DTYPES[array.dtype].bits // 8
        if part.length != size:
            raise _refuse(f"expected {size} bytes in part {part.role!r}, found {part.length}")


def _dense_arrays(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    row = DTYPES.get(spec.dtype)
    if row is None or not spec.parts:
        raise _refuse(f"the element type {spec.dtype[:80]} is unknown")
    part = spec.parts[0]
    is_widened = part.dtype in EXACT_WIDER_DTYPES.get(row.name, ()) and part.type == row.name
    if not is_widened and row.name not in npy.CODE_OF:
        raise _refuse(f"a .npy file cannot have the element type {row.name}; floats can be stored as f16 or f32")
    if not is_widened and (part.dtype, part.type or part.dtype) != (row.storage, row.name):
        raise _refuse(f"expected values stored as {row.name}, found {part.dtype}")
    return (ArraySpec("pt", DATA, part.dtype if is_widened else row.name, spec.shape),)


def _quantized_arrays(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    try:
        layout = AffineLayout.from_tensor(spec)
    except CodecError as error:
        raise _refuse(error.message) from error
    if not layout.stream or spec.dtype not in FLOATS:
        raise _refuse(
            "expected a float element type and the attributes that Ingot writes (codec_version 1); repack the tensor"
        )
    if not spec.size:
        raise _refuse("a quantized tensor has at least one element")
    rows, cols = layout.matrix_of(spec.shape)
    if layout.packing != ROWS_LSB and (layout.msb or cols * layout.bits % 8):
        raise _refuse(f"expected codes packed as {ROWS_LSB}, found {layout.packing!r}")
    zero = NO_ZERO if layout.zero == Constant(0) else layout.zero
    for storage in _STORAGE_FORMS:
        if (layout.bits, layout.signed, zero) == (storage.bits, storage.signed, storage.zero):
            if storage.flat_group:
                return _flat_arrays(spec, layout, storage)
            if cols * storage.bits % 8:
                raise _refuse(
                    f"expected rows of full bytes, found rows of {cols} codes with {storage.bits} bits: keep the "
                    "tensor at 8 bits"
                )
            codes = (storage.dtype, (rows, layout.row_bytes(cols)))
            return _array_specs(spec, storage, codes, _scale_shape(layout, rows, cols))
    raise _refuse(
        "expected 8 bits signed, 4 bits with offsets, 4 bits with zero point 7, or 3 bits with zero points; found "
        f"{layout.bits} bits, {'signed' if layout.signed else 'unsigned'}, {layout.zero}"
    )


@dataclass(frozen=True, slots=True)
class _StorageForm:
    """A quantized layout that a Squish directory can store, and the arrays that store it.

    The fields are the suffixes of the arrays, the type of codes, and the type of scales. If ``flat_group`` is true,
    each run of ``FLAT_GROUP`` elements in row-major order shares a scale, for any shape.
    """

    suffixes: tuple[str, ...]
    bits: int
    signed: bool
    zero: Zero
    dtype: str = "u8"
    flat_group: bool = False
    scales: tuple[str, ...] = (SCALE,)


_STORAGE_FORMS = (
    _StorageForm(("q", "s"), 8, True, NO_ZERO, "i8"),
    _StorageForm(("q4a", "s4a", "z4a"), 4, False, OFFSETS, scales=SHORT_SCALES),
    _StorageForm(("q4", "s4"), 4, False, LEGACY_ZERO, scales=SHORT_SCALES),
    _StorageForm(("q3", "s3", "z3"), 3, False, POINTS, flat_group=True),
)


def _flat_arrays(spec: TensorSpec, layout: AffineLayout, storage: _StorageForm) -> tuple[ArraySpec, ...]:
    cols = layout.matrix_of(spec.shape)[1]
    group = cols if layout.per_row else layout.group_size
    if group != FLAT_GROUP or cols % FLAT_GROUP:
        raise _refuse(f"expected a scale for each {FLAT_GROUP} elements of three bits, found {group}")
    count = spec.size // FLAT_GROUP
    return _array_specs(spec, storage, (storage.dtype, (layout.packed_bytes(count, FLAT_GROUP),)), (count,))


def _array_specs(
    spec: TensorSpec, storage: _StorageForm, codes: tuple[str, Shape], shape: Shape
) -> tuple[ArraySpec, ...]:
    scales = [part.dtype for part in spec.parts[1:]]
    if len(set(scales)) > 1 or not set(scales) <= set(storage.scales):
        allowed = " or ".join(storage.scales)
        raise _refuse(
            f"expected scales and zero points of type {allowed}, found {', '.join(scales)}; quantize with "
            'scales = "f32"'
        )
    arrays = (codes, *((dtype, shape) for dtype in scales))
    return tuple(
        ArraySpec(suffix, role, dtype, sizes)
        for suffix, role, (dtype, sizes) in zip(storage.suffixes, ROLES, arrays, strict=False)
    )


def _scale_shape(layout: AffineLayout, rows: int, cols: int) -> Shape:
    if layout.per_row:
        return (rows,) if layout.bits == 8 else (rows, 1)
    group = layout.group_size
    if group is None:
        raise _refuse(f"expected a scale per row or per group of columns, found granularity {layout.granularity!r}")
    if cols % group == 0:
        return layout.scale_shape(rows, cols)
    raise _refuse(
        f"expected groups of one size, because the files do not name it: {group} does not divide {cols} columns"
    )
