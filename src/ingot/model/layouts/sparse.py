"""Layouts of sparse tensors, which omit zeros or dropped blocks. Attributes: ``spec/sparse_*.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.blocks import mask_bytes
from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts.base import (
    Attributes,
    Layout,
    LayoutSource,
    Shape,
    Storable,
    element_count,
    file_id,
    matrix_shape,
)
from ingot.model.layouts.table import inner_layout
from ingot.model.spec import PartSpec

VERSION = 1
MASK = "mask"
NONZEROS = "nonzeros"
FULL_SIZE = "whole"
CSR_RULE = "sparse_csr.params"
MASK_RULE = "sparse_mask.params"
BLOCKS_RULE = "sparse_blocks.params"
WORD = 64
"""Bits of a word. Each row of an aligned mask is padded to full words."""


@dataclass(frozen=True, slots=True)
class CsrLayout:
    """Compressed sparse rows as in zTensor 1.2, section 3: values, column indices and row pointers.

    Parameters
    ----------
    dtype : str
        Logical element type.
    ascending : bool
        Whether columns ascend in every row, as zTensor's profile ``zt.sparse_csr/1`` requires; else their order is
        arbitrary.
    indices : str
        Element type of indices and pointers, u64 or u32.
    nnz : int or None
        The number of stored values; None if it is not known yet.
    """

    dtype: str
    ascending: bool = False
    indices: str = "u64"
    nnz: int | None = None
    codec: ClassVar[str] = "sparse_csr"

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a matrix of ``shape``; ``nnz`` must be known."""
        width = DTYPES[self.indices].bits // 8
        nnz = self.nnz or 0
        return (
            _values(self.dtype, nnz),
            PartSpec("indices", self.indices, width * nnz),
            PartSpec("indptr", self.indices, width * (shape[0] + 1)),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes: only whether columns ascend; the parts determine everything else."""
        return {"ascending": True} if self.ascending else {}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> CsrLayout:
        """Return the layout from a tensor's attributes. Raises ``CodecError`` ``sparse_csr.params``."""
        reader = Attributes(tensor.params, CSR_RULE, tensor.name)
        ascending = reader.has("ascending") and reader.boolean("ascending")
        return cls(tensor.dtype, ascending, *_indices(tensor, "indices"))


@dataclass(frozen=True, slots=True)
class CooLayout:
    """Coordinates and values as in zTensor 1.2, section 3.

    Parameters
    ----------
    dtype : str
        Logical element type.
    indices : str
        Element type of the coordinates, u64 or u32.
    count : int or None
        The number of coordinates in all dimensions together; None if it is not known yet.
    """

    dtype: str
    indices: str = "u64"
    count: int | None = None
    codec: ClassVar[str] = "sparse_coo"

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``; ``count`` must be known."""
        count = self.count or 0
        coords = PartSpec("coords", self.indices, DTYPES[self.indices].bits // 8 * count)
        return _values(self.dtype, count // max(len(shape), 1)), coords

    def attributes(self) -> dict[str, Any]:
        """Return no attributes: the parts determine the layout."""
        return {}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> CooLayout:
        """Return the layout from a tensor's element types."""
        return cls(tensor.dtype, *_indices(tensor, "coords"))


def _indices(tensor: LayoutSource, role: str) -> tuple[str, int | None]:
    """Return the element type of a part of indices, and their number; None if it is not known yet."""
    dtype = tensor.part_dtypes.get(role, "u64")
    size = tensor.part_nbytes.get(role)
    return dtype, None if size is None or dtype not in DTYPES else size * 8 // DTYPES[dtype].bits


def _values(dtype: str, count: int) -> PartSpec:
    row = DTYPES[dtype]
    return PartSpec("values", row.storage, row.nbytes(count), None if row.is_storage else row.name)


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """A bit for each element, and the values or codes of the elements whose bit is set.

    Parameters
    ----------
    dtype : str
        Logical element type.
    nnz : int or None
        The number of set bits; None until a fit pass has counted them.
    inner : Layout
        The layout of the dense tensor whose values or codes are stored. Its other parts are stored unchanged.
    aligned : bool
        Whether every row of the mask is padded with zeros to words of 64 bits.
    """

    dtype: str
    nnz: int | None
    inner: Layout
    aligned: bool = False
    codec: ClassVar[str] = "sparse_mask"

    def padding(self, shape: Shape) -> int:
        """Return the padding bits of every row of the mask."""
        return -matrix_shape(shape)[1] % WORD if self.aligned else 0

    def mask_length(self, shape: Shape) -> int:
        """Return the number of bytes of the part ``mask`` for a tensor of ``shape``."""
        rows, cols = matrix_shape(shape)
        return -(-rows * (cols + self.padding(shape)) // 8)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {
            "codec_version": VERSION,
            "dtype": self.dtype,
            **({} if self.nnz is None else {"nnz": self.nnz}),
            **({"row_alignment": WORD} if self.aligned else {}),
            "inner": {"codec": file_id(self.inner.codec), "params": self.inner.attributes()},
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> MaskLayout:
        """Return the layout from a tensor's attributes.

        Raises ``CodecError`` ``sparse_mask.params`` and the errors of the inner layout.
        """
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
        return cls(dtype, nnz, inner_layout(tensor, tensor.shape, codec, params), aligned)


@dataclass(frozen=True, slots=True)
class BlocksLayout:
    """A matrix with dropped blocks of rows or columns. A mask marks the kept blocks.

    Parameters
    ----------
    dtype : str
        Logical element type.
    axis : {0, 1}
        Whether blocks consist of rows (0) or of columns (1).
    block : int
        Rows or columns of a block.
    channels : int
        Rows or columns of the full matrix.
    kept_channels : int
        Rows or columns in kept blocks.
    inner : Layout
        The layout of the stored matrix.
    full_size : bool
        Whether the stored matrix has the full size. Its values in dropped blocks are ignored and decode to zeros.
    """

    dtype: str
    axis: int
    block: int
    channels: int
    kept_channels: int
    inner: Layout
    full_size: bool = False
    codec: ClassVar[str] = "sparse_blocks"

    @property
    def sparsity(self) -> float:
        """The fraction of channels in dropped blocks."""
        return 1 - self.kept_channels / self.channels if self.channels else 0.0

    def inner_shape(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns of the stored matrix."""
        return stored_shape(matrix_shape(shape), self.axis, None if self.full_size else self.kept_channels)

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the mask and, if the inner layout lists its parts, the inner parts of a tensor of ``shape``."""
        mask = PartSpec(MASK, "u8", mask_bytes(self.channels, self.block))
        inner = self.inner.part_specs(self.inner_shape(shape)) if isinstance(self.inner, Storable) else ()
        return (mask, *inner)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {
            "codec_version": VERSION,
            "axis": self.axis,
            "block": self.block,
            "channels": self.channels,
            "kept": self.kept_channels,
            "inner": file_id(self.inner.codec),
            "inner_params": self.inner.attributes(),
            "dtype": self.dtype,
            **({"stored": FULL_SIZE} if self.full_size else {}),
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> BlocksLayout:
        """Return the layout from a tensor's attributes.

        Raises ``CodecError`` ``sparse_blocks.params`` and the errors of the inner layout.
        """
        reader = Attributes(tensor.params, BLOCKS_RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        axis = reader.integer("axis", 0, 1)
        block = reader.integer("block", 1, 2**62)
        channels = reader.integer("channels", 0, 2**62)
        kept_channels = reader.integer("kept", 0, channels)
        codec = reader.text("inner")
        params = reader.mapping("inner_params")
        dtype = reader.choice("dtype", (tensor.dtype,))
        if params.get("dtype", dtype) != dtype:
            raise reader.refuse(f"dtype {dtype} here and within", params["dtype"])
        full_size = reader.has("stored") and reader.choice("stored", (FULL_SIZE,)) == FULL_SIZE
        shape = stored_shape(matrix_shape(tensor.shape), axis, None if full_size else kept_channels)
        return cls(dtype, axis, block, channels, kept_channels, inner_layout(tensor, shape, codec, params), full_size)


def stored_shape(matrix: tuple[int, int], axis: int, kept_channels: int | None) -> tuple[int, int]:
    """Return the shape of a stored matrix, which has ``kept_channels`` rows or columns along ``axis``.

    If ``kept_channels`` is None, it is the shape ``matrix``.
    """
    rows, cols = matrix
    if kept_channels is None:
        return rows, cols
    return (kept_channels, cols) if axis == 0 else (rows, kept_channels)
