"""Which tensors a Squish directory can carry, and as which arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ingot.core.bytes.checked import MAX_RANK
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.floats import FLOATS
from ingot.core.numeric.retype import HOLDERS
from ingot.errors import CodecError, UnsupportedError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.names import refuses_name
from ingot.model.layouts.affine import NO_ZERO, OFFSETS, POINTS, ROLES, ROWS_LSB, AffineLayout, Constant, Zero
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.spec import TensorSpec

FLAT_GROUP = 64
"""Consecutive elements that share a scale in the three-bit form."""
LEGACY_ZERO = Constant(7)
"""What the older four-bit form adds to a code."""
SCALE = "f32"
"""Type of scales and zero points in the document."""
SHORT_SCALES = (SCALE, "f16")
"""Types of scales and zero points of four bits: squish's loader widens what it reads."""


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
    if spec.codec == DenseLayout.codec:
        arrays = _passthrough(spec)
    elif spec.codec == AffineLayout.codec:
        arrays = _quantized(spec)
    else:
        raise _refuse(
            f"it has {DenseLayout.codec} and {AffineLayout.codec} tensors, this one is {spec.codec[:80]}; use .zt"
        )
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
    return (ArraySpec("pt", DATA, part.dtype if held else row.name, spec.shape),)


def _quantized(spec: TensorSpec) -> tuple[ArraySpec, ...]:
    try:
        layout = AffineLayout.of(spec)
    except CodecError as error:
        raise _refuse(error.message) from error
    if not layout.stream or spec.dtype not in FLOATS:
        raise _refuse("expected the attributes that Ingot writes (codec_version 1) and a float type; repack it")
    if not spec.size:
        raise _refuse("quantized tensors have at least one element")
    rows, cols = layout.matrix_of(spec.shape)
    if layout.packing != ROWS_LSB and (layout.msb or cols * layout.bits % 8):
        raise _refuse(f"codes are packed as {ROWS_LSB}, found {layout.packing!r}")
    zero = NO_ZERO if layout.zero == Constant(0) else layout.zero
    for form in _FORMS:
        if (layout.bits, layout.signed, zero) == (form.bits, form.signed, form.zero):
            if form.flat_group:
                return _flat(spec, layout, form)
            if cols * form.bits % 8:
                raise _refuse(f"two four-bit codes make a byte, and a row has {cols} columns: keep it at 8 bits")
            codes = (form.dtype, (rows, layout.row_bytes(cols)))
            return _arrays(spec, form, codes, _scale_shape(layout, rows, cols))
    raise _refuse(
        "it has forms for 8 bits signed, 4 bits with offsets, 4 bits less 7, 3 bits with zero points; found "
        f"{layout.bits} bits, {'signed' if layout.signed else 'unsigned'}, {layout.zero}"
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """A layout that a directory has names for: suffixes of its arrays, and the element type of its codes.

    ``flat_group`` tells that scales serve runs of ``FLAT_GROUP`` elements, however the tensor is shaped.
    """

    suffixes: tuple[str, ...]
    bits: int
    signed: bool
    zero: Zero
    dtype: str = "u8"
    flat_group: bool = False
    scales: tuple[str, ...] = (SCALE,)


_FORMS = (
    _Form(("q", "s"), 8, True, NO_ZERO, "i8"),
    _Form(("q4a", "s4a", "z4a"), 4, False, OFFSETS, scales=SHORT_SCALES),
    _Form(("q4", "s4"), 4, False, LEGACY_ZERO, scales=SHORT_SCALES),
    _Form(("q3", "s3", "z3"), 3, False, POINTS, flat_group=True),
)


def _flat(spec: TensorSpec, layout: AffineLayout, form: _Form) -> tuple[ArraySpec, ...]:
    cols = layout.matrix_of(spec.shape)[1]
    group = cols if layout.per_row else layout.group_size
    if group != FLAT_GROUP or cols % FLAT_GROUP:
        raise _refuse(f"three-bit codes share a scale in runs of {FLAT_GROUP} elements, found {group}")
    count = spec.size // FLAT_GROUP
    return _arrays(spec, form, (form.dtype, (layout.packed_bytes(count, FLAT_GROUP),)), (count,))


def _arrays(spec: TensorSpec, form: _Form, codes: tuple[str, Shape], shape: Shape) -> tuple[ArraySpec, ...]:
    scales = [part.dtype for part in spec.parts[1:]]
    if len(set(scales)) > 1 or not set(scales) <= set(form.scales):
        wanted = " or ".join(form.scales)
        raise _refuse(f'scales and zero points are {wanted}, found {", ".join(scales)}; quantize with scales = "f32"')
    arrays = (codes, *((dtype, shape) for dtype in scales))
    return tuple(
        ArraySpec(suffix, role, dtype, sizes)
        for suffix, role, (dtype, sizes) in zip(form.suffixes, ROLES, arrays, strict=False)
    )


def _scale_shape(layout: AffineLayout, rows: int, cols: int) -> Shape:
    if layout.per_row:
        return (rows,) if layout.bits == 8 else (rows, 1)
    group = layout.group_size
    if group is None:
        raise _refuse(f"a scale serves a row or a group of columns, found granularity {layout.granularity!r}")
    if cols % group == 0:
        return layout.scale_shape(rows, cols)
    raise _refuse(f"groups have one size, which is not stated: {group} does not divide {cols} columns")
