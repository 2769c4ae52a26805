"""Plan the operations that express a tensor's codec, in the variants of iOS 16 and iOS 18 (spec/coreml.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.formats.coreml.site import LeftError
from ingot.formats.coreml.types import BY_DTYPE, BY_NAME, MilType, integer_type
from ingot.formats.coreml.weights import Shape, from_numbers
from ingot.model.layouts.affine import SCALES, ZEROS, AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.grid import scale_dims
from ingot.model.layouts.palette import INDICES, PaletteLayout
from ingot.model.layouts.sparse import NONZEROS, MaskLayout
from ingot.model.spec import TensorSpec

FLOATS = ("f16", "f32")
_INT32 = BY_NAME["int32"]
# advice for recipes if the types of these parts are unsuitable
_ADVICE = {
    "scales": '; set scales = "source" in the rule, like preset ane-int8',
    "codebook": "; set the rule's entries to the tensor's type",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """An input array of an operation: the contents of the part ``role``, or the bytes ``constant``.

    ``key`` is the operation's parameter. ``type`` and ``dims`` are declared in the program. ``dtype`` and ``spread``
    have the same meaning as in ``Slot``.
    """

    key: str
    type: MilType
    dims: Shape
    role: str = ""
    dtype: str = ""
    constant: bytes = b""
    spread: Shape | None = None

    @property
    def count(self) -> int:
        """The number of stored elements."""
        return prod(self.dims)

    @property
    def part_length(self) -> int:
        """The number of bytes of the part."""
        if self.spread is None:
            return self.type.nbytes(self.count)
        return prod(self.spread) * DTYPES[self.dtype].bits // 8

    def to_stored(self, data: bytes, location: str) -> bytes:
        """Convert a part's contents to the stored encoding; raises the errors of ``from_numbers``."""
        if self.spread is None:
            return data
        return from_numbers(data, self.dtype, self.spread, self.type, self.dims, location)


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """An operation to write; the last operation of a tensor gets the outputs of the operation that it replaces.

    ``bound`` are inputs that refer to outputs of earlier operations: key, index of the operation, index of the output.
    ``again`` are inputs that repeat an input of an earlier operation: key, index of that operation, key of its input.
    ``outputs`` are types and shapes; the last operation of a tensor has none.
    """

    type: str
    stored: tuple[Stored, ...]
    bound: tuple[tuple[str, int, int], ...] = ()
    again: tuple[tuple[str, int, str], ...] = ()
    outputs: tuple[tuple[MilType, Shape], ...] = ()
    attributes: bool = field(default=False)


def plan_operations(spec: TensorSpec, *, ios18: bool) -> tuple[PlannedOp, ...]:
    """Return the operations for a tensor, in order.

    Raises ``LeftError`` with the reason if no operation can express the tensor.
    """
    plan = _MAKERS.get(spec.codec)
    if plan is None:
        raise LeftError(f"Core ML has no operation for codec {spec.codec}")
    for part in spec.parts:
        if part.encoding != "raw" or part.type not in (None, part.dtype):
            raise LeftError(
                f"Core ML stores uncompressed numbers, found {part.encoding} {part.type or ''} in part {part.role}"
            )
    try:
        operations = plan(spec, ios18)
    except CodecError as error:
        raise LeftError(error.message) from error
    _check_parts(spec, operations)
    return operations


def _check_parts(spec: TensorSpec, planned: tuple[PlannedOp, ...]) -> None:
    stored = {item.role: item for operation in planned for item in operation.stored if item.role}
    lengths = {part.role: part.length for part in spec.parts}
    if set(stored) != set(lengths):
        raise LeftError(f"expected the parts {sorted(stored)}, found {sorted(lengths)}")
    for role, item in stored.items():
        unknown = role == NONZEROS and (lengths[role] is None or MaskLayout.from_tensor(spec).nnz is None)
        if lengths[role] != item.part_length and not unknown:
            raise LeftError(f"expected {item.part_length} bytes of part {role}, found {lengths[role]}")


def _float(spec: TensorSpec, role: str) -> MilType:
    """Return the MIL type of a part of floats; raise ``LeftError`` if it is not the tensor's type, f16 or f32."""
    dtype = _part_dtype(spec, role)
    if dtype not in FLOATS or dtype != spec.dtype:
        raise LeftError(
            f"{role} and tensor must both be f16 or both f32, found {dtype} and {spec.dtype}{_ADVICE.get(role, '')}"
        )
    return BY_DTYPE[dtype]


def _part_dtype(spec: TensorSpec, role: str) -> str:
    try:
        return spec.part(role).dtype
    except KeyError:
        raise LeftError(f"expected a part {role}, but it is missing") from None


def _has(spec: TensorSpec, role: str) -> bool:
    return any(part.role == role for part in spec.parts)


def _dense(spec: TensorSpec, ios18: bool) -> tuple[PlannedOp, ...]:
    type = BY_DTYPE.get(spec.dtype)
    if type is None or type.name.startswith("fp8"):
        raise LeftError(f"Core ML has no constants of {spec.dtype}")
    stored = Stored("val", type, spec.shape, "data", spec.dtype)
    return (PlannedOp("const", (stored,), attributes=True),)


@dataclass(frozen=True, slots=True)
class _Affine:
    """The Core ML types of an affine tensor's codes and scales, the shape of the scales, and the zero points.

    ``zeros`` is None if all zero points equal ``point``.
    """

    codes: MilType
    scale: MilType
    grid: Shape
    zeros: Stored | None
    point: int


def _affine_of(spec: TensorSpec, layout: AffineLayout) -> _Affine:
    codes = integer_type(layout.bits, layout.signed) if layout.bits in (4, 8) else None
    if codes is None:
        raise LeftError(f"codes of {layout.bits} bits; Core ML has 4 and 8")
    if layout.offset:
        raise LeftError("offsets in place of zero points")
    if not layout.is_flat(spec.shape):
        raise LeftError(f"packing {layout.packing}; Core ML has one stream, low bits first")
    grid = scale_dims(layout, spec.shape)
    if grid is None:
        raise LeftError("scales that form no grid of equal blocks")
    zeros = None
    if layout.zeros:
        zeros = Stored("offset", codes, grid, ZEROS, _part_dtype(spec, ZEROS), spread=grid)
    return _Affine(codes, _float(spec, SCALES), grid, zeros, layout.zero_point or 0)


def _affine(spec: TensorSpec, ios18: bool) -> tuple[PlannedOp, ...]:
    grid = _affine_of(spec, AffineLayout.from_tensor(spec))
    if not ios18:
        return (_affine_ios16(spec, grid),)
    data = Stored("data", grid.codes, spec.shape, "packed_weight")
    return (PlannedOp("constexpr_blockwise_shift_scale", (data, *_scales(spec, grid))),)


def _scales(spec: TensorSpec, grid: _Affine) -> tuple[Stored, ...]:
    """Return the arrays ``scale`` and, if zero points are not 0, ``offset`` of an operation of iOS 18."""
    scales = Stored("scale", grid.scale, grid.grid, "scales", spec.dtype)
    zeros = grid.zeros
    if zeros is None and grid.point:
        zeros = Stored(
            "offset", grid.codes, grid.grid, constant=repeat_integer(grid.point, grid.codes, prod(grid.grid))
        )
    return (scales,) if zeros is None else (scales, zeros)


def _affine_ios16(spec: TensorSpec, grid: _Affine) -> PlannedOp:
    if grid.codes.bits != 8:
        raise LeftError(f"codes of {grid.codes.bits} bits; iOS 16 has 8")
    scaled_axes = [axis for axis, size in enumerate(grid.grid) if size != 1]
    if len(scaled_axes) > 1 or any(grid.grid[axis] != spec.shape[axis] for axis in scaled_axes):
        raise LeftError("scales over blocks; iOS 16 has one per tensor, or one per index of one dimension")
    axis = scaled_axes[0] if scaled_axes else 0
    dims = (grid.grid[axis],) if scaled_axes else ()
    data = Stored("quantized_data", grid.codes, spec.shape, "packed_weight")
    scale = Stored("scale", grid.scale, dims, "scales", spec.dtype)
    if grid.zeros is not None:
        zeros = Stored("zero_point", grid.codes, dims, "zeros", grid.zeros.dtype, spread=dims)
    else:
        zeros = Stored("zero_point", grid.codes, (), constant=repeat_integer(grid.point, grid.codes, 1))
    stored_axis = Stored("axis", _INT32, (), constant=axis.to_bytes(4, "little"))
    return PlannedOp("constexpr_affine_dequantize", (data, zeros, scale, stored_axis), attributes=True)


def repeat_integer(value: int, type: MilType, count: int) -> bytes:
    """Return an integer repeated ``count`` times in the encoding of a blob."""
    if type.bits == 4:
        nibble = value & 15
        return bytes([nibble | nibble << 4]) * (count // 2) + (bytes([nibble]) if count % 2 else b"")
    return (value & 0xFF).to_bytes(1, "little") * count


def _palette(spec: TensorSpec, ios18: bool) -> tuple[PlannedOp, ...]:
    layout = PaletteLayout.from_tensor(spec)
    bits = layout.bits
    vector = layout.vector_size
    axis = layout.vector_axis
    groups = layout.groups
    if not ios18:
        return (_palette_ios16(spec, bits, vector, groups),)
    type = integer_type(bits, signed=False)
    if type is None:
        raise LeftError(f"indices of {bits} bits")
    stored = Stored("indices", type, layout.index_shape(spec.shape), INDICES)
    vector_axis = (Stored("vector_axis", _INT32, (), constant=axis.to_bytes(4, "little")),) if vector > 1 else ()
    before, lut, bound = _codebook(spec, groups, bits, vector)
    return (*before, PlannedOp("constexpr_lut_to_dense", (stored, *lut, *vector_axis), bound))


def _codebook(
    spec: TensorSpec, groups: Shape, bits: int, vector: int
) -> tuple[tuple[PlannedOp, ...], tuple[Stored, ...], tuple[tuple[str, int, int], ...]]:
    """Return the palette inputs of an operation: the operations before it, its arrays, and its bound inputs.

    Without scales, the palettes are the array ``lut``. With scales, a scaling operation computes them, and its output
    is bound to the input ``lut``.
    """
    dims = (*groups, 1 << bits, vector)
    if not _has(spec, "codebook_scales"):
        return (), (Stored("lut", _float(spec, "codebook"), dims, "codebook", spec.dtype),), ()
    entries = _part_dtype(spec, "codebook")
    out = _float(spec, "codebook_scales")
    if entries not in ("i8", "u8", "f16", out.dtype):
        raise LeftError(f"scaled palettes of {entries}")
    data = Stored("data", BY_DTYPE[entries], dims, "codebook", entries)
    scale = Stored("scale", out, (*groups, 1, 1), "codebook_scales", spec.dtype)
    return (PlannedOp("constexpr_blockwise_shift_scale", (data, scale), outputs=((out, dims),)),), (), (("lut", 0, 0),)


def _palette_ios16(spec: TensorSpec, bits: int, vector: int, groups: Shape) -> PlannedOp:
    if vector != 1 or prod(groups) != 1 or bits == 3 or _has(spec, "codebook_scales"):
        raise LeftError("iOS 16 has one palette per tensor, of 1, 2, 4, 6 or 8 bits, without scales or vectors")
    indices = Stored("indices", BY_NAME["uint8"], ((prod(spec.shape) * bits + 7) // 8,), "indices")
    lut = Stored("lut", _float(spec, "codebook"), (1 << bits,), "codebook", spec.dtype)
    return PlannedOp("constexpr_lut_to_dense", (indices, lut, _shape(spec)), attributes=True)


def _shape(spec: TensorSpec) -> Stored:
    if any(size >= 1 << 32 for size in spec.shape):
        raise LeftError("a dimension past 2**32")
    numbers = b"".join(size.to_bytes(4, "little") for size in spec.shape)
    return Stored("shape", BY_NAME["uint32"], (len(spec.shape),), constant=numbers)


def _sparse(spec: TensorSpec, ios18: bool) -> tuple[PlannedOp, ...]:
    layout = MaskLayout.from_tensor(spec)
    inner = layout.inner
    count = prod(spec.shape) if layout.nnz is None else layout.nnz
    if isinstance(inner, DenseLayout):
        values = Stored("nonzero_data", _float(spec, "nonzeros"), (count,), "nonzeros", spec.dtype)
        if ios18:
            mask = Stored("mask", BY_NAME["uint1"], spec.shape, "mask")
            return (PlannedOp("constexpr_sparse_to_dense", (mask, values)),)
        mask = Stored("mask", BY_NAME["uint8"], ((prod(spec.shape) + 7) // 8,), "mask")
        return (PlannedOp("constexpr_sparse_to_dense", (mask, values, _shape(spec)), attributes=True),)
    if not ios18:
        raise LeftError("iOS 16 has masks over plain values only")
    if isinstance(inner, PaletteLayout):
        return _sparse_palette(spec, inner, count)
    if not isinstance(inner, AffineLayout):
        raise LeftError(f"masks over {inner.codec}")
    grid = _affine_of(spec, inner)
    mask = Stored("data_mask", BY_NAME["uint1"], spec.shape, "mask")
    codes = Stored("nonzero_data", grid.codes, (count,), "nonzeros")
    outputs = ((BY_NAME["uint1"], spec.shape), (grid.scale, (count,)))
    first = PlannedOp("constexpr_sparse_blockwise_shift_scale", (mask, codes, *_scales(spec, grid)), outputs=outputs)
    return (first, PlannedOp("constexpr_sparse_to_dense", (), (("nonzero_data", 0, 1),), (("mask", 0, "data_mask"),)))


def _sparse_palette(spec: TensorSpec, layout: PaletteLayout, count: int) -> tuple[PlannedOp, ...]:
    type = integer_type(layout.bits, signed=False)
    if layout.vector_size != 1 or type is None:
        raise LeftError("masks over vectors")
    before, lut, bound = _codebook(spec, layout.groups, layout.bits, 1)
    mask = Stored("indices_mask", BY_NAME["uint1"], spec.shape, "mask")
    codes = Stored("indices_nonzero_data", type, (count,), "nonzeros")
    outputs = ((BY_NAME["uint1"], spec.shape), (BY_DTYPE[spec.dtype], (count,)))
    first = PlannedOp("constexpr_lut_to_sparse", (mask, codes, *lut), bound, outputs=outputs)
    index = len(before)
    return (
        *before,
        first,
        PlannedOp("constexpr_sparse_to_dense", (), (("nonzero_data", index, 1), ("mask", index, 0))),
    )


_MAKERS: Mapping[str, Callable[[TensorSpec, bool], tuple[PlannedOp, ...]]] = {
    DenseLayout.codec: _dense,
    AffineLayout.codec: _affine,
    PaletteLayout.codec: _palette,
    MaskLayout.codec: _sparse,
}
