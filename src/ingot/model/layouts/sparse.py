"""Layouts of tensors that leave zeros out; attributes as in ``spec/sparse_*.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.blocks import mask_bytes
from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts.base import (
    Attributes,
    Described,
    Layout,
    Shape,
    Storable,
    element_count,
    file_id,
    matrix_shape,
)
from ingot.model.layouts.table import layout_within
from ingot.model.spec import PartSpec

VERSION = 1
MASK = "mask"
NONZEROS = "nonzeros"
WHOLE = "whole"
CSR_RULE = "sparse_csr.params"
MASK_RULE = "sparse_mask.params"
BLOCKS_RULE = "sparse_blocks.params"
WORD = 64
"""Bits of the words that rows of a mask fill where they are aligned."""


@dataclass(frozen=True, slots=True)
class CsrLayout:
    """Compressed rows, as zTensor 1.2 section 3 has them: values, column indices, row pointers.

    Parameters
    ----------
    dtype : str
        Logical element type.
    ascending : bool
        Whether columns ascend in every row, as zTensor's profile ``zt.sparse_csr/1`` asks; else they may have any
        order.
    indices : str
        Element type of indices and pointers, u64 or u32.
    nnz : int or None
        Stored values; None where only the bytes tell.
    """

    dtype: str
    ascending: bool = False
    indices: str = "u64"
    nnz: int | None = None
    codec: ClassVar[str] = "sparse_csr"

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a matrix of ``shape``, whose number of values is known."""
        width = DTYPES[self.indices].bits // 8
        nnz = self.nnz or 0
        return (
            _values(self.dtype, nnz),
            PartSpec("indices", self.indices, width * nnz),
            PartSpec("indptr", self.indices, width * (shape[0] + 1)),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back; the parts tell all but the order."""
        return {"ascending": True} if self.ascending else {}

    @classmethod
    def of(cls, tensor: Described) -> CsrLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``sparse_csr.params``."""
        reader = Attributes(tensor.params, CSR_RULE, tensor.name)
        ascending = reader.has("ascending") and reader.boolean("ascending")
        return cls(tensor.dtype, ascending, *_indices(tensor, "indices"))


@dataclass(frozen=True, slots=True)
class CooLayout:
    """Coordinates, of u64 or u32, and values, as zTensor 1.2 section 3 has them."""

    dtype: str
    indices: str = "u64"
    count: int | None = None
    """Coordinates, of all dimensions together; None where only the bytes tell."""
    codec: ClassVar[str] = "sparse_coo"

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, whose number of coordinates is known."""
        count = self.count or 0
        coords = PartSpec("coords", self.indices, DTYPES[self.indices].bits // 8 * count)
        return _values(self.dtype, count // max(len(shape), 1)), coords

    def attributes(self) -> dict[str, Any]:
        """Return no attributes: the parts tell everything."""
        return {}

    @classmethod
    def of(cls, tensor: Described) -> CooLayout:
        """Read a tensor's element types."""
        return cls(tensor.dtype, *_indices(tensor, "coords"))


def _indices(tensor: Described, role: str) -> tuple[str, int | None]:
    """Return the element type of a part of indices, and how many there are, where that is known."""
    dtype = tensor.part_dtypes.get(role, "u64")
    size = tensor.part_nbytes.get(role)
    return dtype, None if size is None or dtype not in DTYPES else size * 8 // DTYPES[dtype].bits


def _values(dtype: str, count: int) -> PartSpec:
    row = DTYPES[dtype]
    return PartSpec("values", row.storage, row.nbytes(count), None if row.is_storage else row.name)


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """A bit per element, and the kept values or codes one after the other.

    Parameters
    ----------
    dtype : str
        Logical element type.
    nnz : int or None
        Kept elements; None until a fit pass has counted them.
    inner : Layout
        Of the dense tensor whose values or codes are kept; its other parts lie beside the mask.
    aligned : bool
        Every row's bits are filled up with zeros to whole words of 64.
    """

    dtype: str
    nnz: int | None
    inner: Layout
    aligned: bool = False
    codec: ClassVar[str] = "sparse_mask"

    def padding(self, shape: Shape) -> int:
        """Return the bits behind the columns of every row of the mask."""
        return -matrix_shape(shape)[1] % WORD if self.aligned else 0

    def mask_length(self, shape: Shape) -> int:
        """Return the bytes of the mask."""
        rows, cols = matrix_shape(shape)
        return -(-rows * (cols + self.padding(shape)) // 8)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {
            "codec_version": VERSION,
            "dtype": self.dtype,
            **({} if self.nnz is None else {"nnz": self.nnz}),
            **({"row_alignment": WORD} if self.aligned else {}),
            "inner": {"codec": file_id(self.inner.codec), "params": self.inner.attributes()},
        }

    @classmethod
    def of(cls, tensor: Described) -> MaskLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``sparse_mask.params`` and the rules of what is within."""
        reader = Attributes(tensor.params, MASK_RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        dtype = reader.choice("dtype", (tensor.dtype,))
        nnz = reader.integer("nnz", 0, element_count(tensor.shape)) if reader.has("nnz") else None
        inner = reader.mapping("inner")
        codec = inner.get("codec")
        params = inner.get("params")
        if set(inner) != {"codec", "params"} or not isinstance(params, Mapping) or not isinstance(codec, str):
            raise reader.refuse("inner with codec and params", dict(inner))
        if params.get("dtype", dtype) != dtype:
            raise reader.refuse(f"dtype {dtype} within too", params["dtype"])
        aligned = reader.has("row_alignment") and reader.integer("row_alignment", WORD, WORD) == WORD
        return cls(dtype, nnz, layout_within(tensor, tensor.shape, codec, params), aligned)


@dataclass(frozen=True, slots=True)
class BlocksLayout:
    """A matrix without some blocks of its rows or columns; a mask tells which blocks are kept.

    Parameters
    ----------
    dtype : str
        Logical element type.
    axis : {0, 1}
        Blocks of rows, or of columns.
    block : int
        Rows or columns of a block.
    channels, kept : int
        Rows or columns of the whole matrix, and of what is stored.
    inner : Layout
        Of the matrix that is stored: the smaller one, or the whole one.
    whole : bool
        The matrix is stored in its full size; what it holds in dropped blocks counts as zeros.
    """

    dtype: str
    axis: int
    block: int
    channels: int
    kept: int
    inner: Layout
    whole: bool = False
    codec: ClassVar[str] = "sparse_blocks"

    @property
    def sparsity(self) -> float:
        """Share of the channels that are left out."""
        return 1 - self.kept / self.channels if self.channels else 0.0

    def inner_shape(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of the matrix that is stored."""
        return stored_shape(matrix_shape(shape), self.axis, None if self.whole else self.kept)

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape`` whose inner layout knows its own."""
        mask = PartSpec(MASK, "u8", mask_bytes(self.channels, self.block))
        inner = self.inner.part_specs(self.inner_shape(shape)) if isinstance(self.inner, Storable) else ()
        return (mask, *inner)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {
            "codec_version": VERSION,
            "axis": self.axis,
            "block": self.block,
            "channels": self.channels,
            "kept": self.kept,
            "inner": file_id(self.inner.codec),
            "inner_params": self.inner.attributes(),
            "dtype": self.dtype,
            **({"stored": WHOLE} if self.whole else {}),
        }

    @classmethod
    def of(cls, tensor: Described) -> BlocksLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``sparse_blocks.params`` and what the inner layout does."""
        reader = Attributes(tensor.params, BLOCKS_RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        axis = reader.integer("axis", 0, 1)
        block = reader.integer("block", 1, 2**62)
        channels = reader.integer("channels", 0, 2**62)
        kept = reader.integer("kept", 0, channels)
        codec = reader.text("inner")
        params = reader.mapping("inner_params")
        dtype = reader.choice("dtype", (tensor.dtype,))
        if params.get("dtype", dtype) != dtype:
            raise reader.refuse(f"dtype {dtype} here and within", params["dtype"])
        whole = reader.has("stored") and reader.choice("stored", (WHOLE,)) == WHOLE
        shape = stored_shape(matrix_shape(tensor.shape), axis, None if whole else kept)
        return cls(dtype, axis, block, channels, kept, layout_within(tensor, shape, codec, params), whole)


def stored_shape(matrix: tuple[int, int], axis: int, kept: int | None) -> tuple[int, int]:
    """Return rows and columns of what is stored of a matrix: all, or ``kept`` channels along ``axis``."""
    rows, cols = matrix
    if kept is None:
        return rows, cols
    return (kept, cols) if axis == 0 else (rows, kept)
