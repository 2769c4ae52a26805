"""Parameters of the affine codec: what a tensor's attributes say, and the sizes that follow (``spec/affine.md``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ingot.core.checked import MAX_RANK
from ingot.core.floats import FLOATS
from ingot.errors import CodecError
from ingot.model.tensor import Tensor

VERSION = 1
SCALE_DTYPES = ("f32", "f16", "bf16")
ROLES = ("packed_weight", "scales", "zeros")

_STREAMS = ("rows_lsb", "rows_msb", "flat_lsb")
_WORDS = re.compile(r"([1-9][0-9]?)_per_([iu])(8|16|32|64)\Z")
# Attributes that zTensor 1.2 section 3 names for this format, and ``dtype``, which Ingot's writer adds.
_PLAIN = frozenset(("bits", "group_size", "packing", "dtype"))


@dataclass(frozen=True, slots=True)
class AffineParams:
    """Everything the decoder needs beside the parts and the shape.

    Parameters
    ----------
    bits : int
        Of one code, 1 to 8.
    granularity : {"group", "row", "tensor", "blocks"}
        What shares one scale: ``group_size`` columns of a row, a row, everything, a ``block``.
    group_size : int or None
        Columns per group; None unless ``granularity`` is ``group``.
    packing : str
        ``rows_lsb`` or ``rows_msb``: each row is a bit stream padded to whole bytes. ``flat_lsb``: the matrix is one
        stream, and a row may begin within a byte; no encoder makes it. ``8_per_i32`` and its like (zTensor 1.2
        section 3): each row is little-endian integers, first code in the low bits.
    signed : bool
        Codes are two's complement.
    zeros : bool
        There is a part ``zeros``.
    dtype : str
        Logical element type.
    zero_kind : {"point", "offset"}
        ``w = s * (q - z)``, or ``w = s * q + z`` with float offsets in the part ``zeros``.
    zero_point : int or None
        The one zero point of every code, where there is no part ``zeros``.
    matrix : (rows, columns) or None
        How the row-major order is cut for packing and scales; None for the tensor's own matrix.
    block : tuple of int or None
        Elements along each dimension that share a scale, for granularity ``blocks`` only; scales are in row-major
        order of the blocks.
    """

    bits: int
    granularity: str
    group_size: int | None
    packing: str
    signed: bool
    zeros: bool
    dtype: str
    zero_kind: str = "point"
    zero_point: int | None = None
    matrix: tuple[int, int] | None = None
    block: tuple[int, ...] | None = None

    @property
    def msb(self) -> bool:
        """Whether the first code lies in the high bits."""
        return self.packing == "rows_msb"

    @property
    def packed_dtype(self) -> str:
        """Storage type of ``packed_weight``."""
        words = _WORDS.match(self.packing)
        return f"{words[2]}{words[3]}" if words else "u8"

    @property
    def no_zero(self) -> float:
        """The zero point of values that are all 0, or of none: the lowest code."""
        return -(2.0 ** (self.bits - 1)) if self.signed else 0.0

    def in_rows(self, cols: int) -> bool:
        """Whether every row begins at a byte; ``flat_lsb`` is ``rows_lsb`` where rows fill their bytes."""
        return self.packing != "flat_lsb" or cols * self.bits % 8 == 0

    def packed_bytes(self, rows: int, cols: int) -> int:
        """Bytes of ``packed_weight``."""
        return rows * self.row_bytes(cols) if self.in_rows(cols) else -(-rows * cols * self.bits // 8)

    def row_bytes(self, cols: int) -> int:
        """Bytes of one packed row that begins at a byte."""
        words = _WORDS.match(self.packing)
        if words:
            return -(-cols // int(words[1])) * int(words[3]) // 8
        return -(-cols * self.bits // 8)

    @property
    def offset(self) -> bool:
        """Whether ``zeros`` are offsets: ``w = s * q + z``."""
        return self.zero_kind == "offset"

    def matrix_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns as codes are packed: ``matrix``, or the tensor's own."""
        return self.matrix or ((prod(shape[:-1]), shape[-1]) if shape else (1, 1))

    def group_columns(self, cols: int) -> int:
        """Columns that share a scale, at least 1."""
        if self.block is not None:
            return max(self.block[-1], 1) if self.block else 1
        return max(cols, 1) if self.group_size is None else self.group_size

    def scale_count(self, shape: tuple[int, ...]) -> int:
        """Elements of ``scales`` (and of ``zeros``) of a tensor of ``shape``."""
        if self.block is not None:
            return prod(size // step for size, step in zip(shape, self.block, strict=True))
        return prod(self.scale_shape(*self.matrix_of(shape)))

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of ``scales`` (and ``zeros``) for a matrix of rows x cols.

        Of granularity ``blocks``, that of scales spread out so that each row has its own.
        """
        if self.block is not None:
            return (rows, cols // self.group_columns(cols))
        if self.group_size is not None:
            return (rows, -(-cols // self.group_size))
        return (1,) if self.granularity == "tensor" else (rows,)

    def attributes(self) -> dict[str, Any]:
        """Return the JSON-able attributes that ``from_attributes`` takes back."""
        group = {} if self.group_size is None else {"group_size": self.group_size}
        return {
            "codec_version": VERSION,
            "bits": self.bits,
            "granularity": self.granularity,
            **group,
            "axis": -1,
            "packing": self.packing,
            "signed": self.signed,
            "zeros": self.zeros,
            "dtype": self.dtype,
            **({"zero_kind": self.zero_kind} if self.offset else {}),
            **({} if self.zero_point is None else {"zero_point": self.zero_point}),
            **({} if self.matrix is None else {"matrix": list(self.matrix)}),
            **({} if self.block is None else {"block": list(self.block)}),
        }


def natural(params: AffineParams, shape: tuple[int, ...]) -> AffineParams:
    """Return parameters without ``matrix`` that say the same of the same bytes; ``params`` itself where there are none.

    Where codes are one bit stream either way, a scale per run of ``n`` elements is a scale per group of ``n`` columns
    if ``n`` divides the columns.
    """
    if params.matrix is None:
        return params
    cut, plain = params.matrix, replace(params, matrix=None)
    own = plain.matrix_of(shape)
    if cut == own:
        return plain
    streams = all(params.packing == "flat_lsb" or cols * params.bits % 8 == 0 for cols in (cut[1], own[1]))
    run = min(params.group_columns(cut[1]), cut[1])
    if not streams or not prod(own):
        return params
    if params.granularity == "tensor":
        return plain
    if cut[1] % run or own[1] % run:
        return params
    per_row = run == own[1]
    return replace(plain, granularity="row" if per_row else "group", group_size=None if per_row else run)


def params_of(tensor: Tensor) -> AffineParams:
    """Read a tensor's attributes.

    With ``codec_version`` they are Ingot's own and complete. Without, they are those of zTensor 1.2 section 3:
    ``bits``, ``group_size``, ``packing`` and nothing else that could change the meaning; then codes are unsigned,
    groups lie along the last dimension, zero points are there where the part is, and the dtype is that of the scales.

    Raises
    ------
    CodecError
        ``affine.params``: an attribute is missing, unknown, of the wrong type or out of range.
    """
    attributes = tensor.params
    reader = _Attributes(attributes, tensor.name)
    if "codec_version" in attributes:
        return _own(reader, tensor)
    strange = sorted(str(key) for key in attributes if key not in _PLAIN)
    if strange:
        raise reader.refuse("only bits, group_size, packing and dtype where there is no codec_version", strange[0])
    bits = reader.integer("bits", 1, 8)
    packing = reader.text("packing")
    words = _WORDS.match(packing)
    if not words or int(words[1]) * bits != int(words[3]):
        raise reader.refuse(f"packing N_per_iW with N * {bits} = W", packing)
    scales = tensor.parts.get("scales")
    dtype = reader.choice("dtype", FLOATS) if "dtype" in attributes else scales.dtype if scales else "f32"
    group_size = reader.integer("group_size", 1, 2**62)
    return AffineParams(bits, "group", group_size, packing, signed=False, zeros="zeros" in tensor.parts, dtype=dtype)


def _own(reader: _Attributes, tensor: Tensor) -> AffineParams:
    reader.integer("codec_version", VERSION, VERSION)
    reader.integer("axis", -1, -1)
    granularity = reader.choice("granularity", ("group", "row", "tensor", "blocks"))
    bits, signed, zeros = reader.integer("bits", 1, 8), reader.boolean("signed"), reader.boolean("zeros")
    zero_kind = reader.choice("zero_kind", ("point", "offset")) if reader.has("zero_kind") else "point"
    if zero_kind == "offset" and not zeros:
        raise reader.refuse("zeros = true where zero_kind is offset", zeros)
    if granularity != "blocks" and reader.has("block"):
        raise reader.refuse("block for granularity blocks only", granularity)
    if reader.has("zero_point") and (zeros or zero_kind == "offset"):
        raise reader.refuse("zero_point only where zeros is false", zeros)
    lowest = -(1 << (bits - 1)) if signed else 0
    return AffineParams(
        bits=bits,
        granularity=granularity,
        group_size=reader.integer("group_size", 1, 2**62) if granularity == "group" else None,
        packing=reader.choice("packing", _STREAMS),
        signed=signed,
        zeros=zeros,
        dtype=reader.choice("dtype", FLOATS),
        zero_kind=zero_kind,
        zero_point=reader.integer("zero_point", lowest, lowest + (1 << bits) - 1) if reader.has("zero_point") else None,
        matrix=_matrix(reader, tensor, granularity) if reader.has("matrix") else None,
        block=_block(reader, tensor) if granularity == "blocks" else None,
    )


def _matrix(reader: _Attributes, tensor: Tensor, granularity: str) -> tuple[int, int]:
    found = reader.integers("matrix", 0, 2**62)
    if granularity == "blocks":
        raise reader.refuse("no matrix beside granularity blocks", list(found))
    if len(found) != 2 or found[0] * found[1] != tensor.size:
        raise reader.refuse(f"a matrix of rows and columns with {tensor.size} elements", list(found))
    return found[0], found[1]


def _block(reader: _Attributes, tensor: Tensor) -> tuple[int, ...]:
    found = reader.integers("block", 1, 2**62)
    if len(found) != len(tensor.shape) or any(size % step for size, step in zip(tensor.shape, found, strict=True)):
        raise reader.refuse(f"a block that divides each dimension of {list(tensor.shape)}", list(found))
    return found


class _Attributes:
    """Typed access to attributes that somebody else wrote."""

    def __init__(self, attributes: Mapping[str, Any], where: str) -> None:
        self._attributes, self._where = attributes, where

    def refuse(self, expected: str, found: object) -> CodecError:
        return CodecError("affine.params", f"expected {expected}, found {str(found)[:80]!r}", where=self._where)

    def has(self, key: str) -> bool:
        return key in self._attributes

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        value = self._attributes.get(key)
        if not isinstance(value, list | tuple) or len(value) > MAX_RANK:
            raise self.refuse(f"a list of whole numbers in attribute {key}", value)
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not low <= item <= high:
                raise self.refuse(f"numbers from {low} to {high} in attribute {key}", item)
        return tuple(value)

    def integer(self, key: str, low: int, high: int) -> int:
        value = self._attributes.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(f"attribute {key} from {low} to {high}", value)
        return value

    def boolean(self, key: str) -> bool:
        value = self._attributes.get(key)
        if not isinstance(value, bool):
            raise self.refuse(f"attribute {key} true or false", value)
        return value

    def text(self, key: str) -> str:
        value = self._attributes.get(key)
        if not isinstance(value, str):
            raise self.refuse(f"text in attribute {key}", value)
        return value

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in known:
            raise self.refuse(f"attribute {key} {' or '.join(known)}", value)
        return value
