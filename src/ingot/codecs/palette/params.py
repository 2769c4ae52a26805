"""Parameters of the palette codec: what a tensor's attributes say, and the sizes that follow (``spec/palette.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import FLOATS
from ingot.errors import CodecError
from ingot.model.tensor import Array, Tensor

VERSION = 1
BITS = (1, 2, 3, 4, 6, 8)
VECTOR_SIZES = (1, 2, 4)
ENTRY_DTYPES = ("f16", "f32", "bf16", "i8", "u8")
SCALE_DTYPES = ("f16", "f32")
INDICES, CODEBOOK, SCALES = "indices", "codebook", "codebook_scales"

# Vector sizes that the Neural Engine's compiler lets pass: bit v of the mask, 1, 2, 4 and 5. The hardware field holds
# the logarithm to base 2, so that 5 cannot be written.
LEGAL_VECTORS = 0x36


@dataclass(frozen=True, slots=True)
class PaletteParams:
    """Everything the decoder needs beside the parts and the shape.

    Parameters
    ----------
    bits : int
        Of one index: 1, 2, 3, 4, 6 or 8.
    groups : tuple of int
        Codebooks along each dimension of the indices; each divides the dimension.
    vector_size : int
        Values per entry: 1, 2 or 4.
    vector_axis : int
        Dimension along which the values of an entry lie; the indices are ``vector_size`` times shorter there.
    dtype : str
        Logical element type.
    """

    bits: int
    groups: tuple[int, ...]
    vector_size: int
    vector_axis: int
    dtype: str

    @property
    def entries(self) -> int:
        """Entries of a codebook."""
        return 1 << self.bits

    @property
    def codebooks(self) -> int:
        """Number of codebooks."""
        return prod(self.groups)

    def index_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the indices of a tensor of ``shape``."""
        if self.vector_size == 1:
            return shape
        axis = self.vector_axis
        return (*shape[:axis], shape[axis] // self.vector_size, *shape[axis + 1 :])

    def index_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of ``indices``: one stream."""
        return -(-prod(self.index_shape(shape)) * self.bits // 8)

    def codebook_shape(self) -> tuple[int, int, int]:
        """Codebooks, entries, values per entry."""
        return (self.codebooks, self.entries, self.vector_size)

    def run(self, shape: tuple[int, ...]) -> int:
        """How many consecutive indices share a codebook, at least 1."""
        index = self.index_shape(shape)
        last = max((axis for axis, count in enumerate(self.groups) if count > 1), default=None)
        return max(1, prod(index) if last is None else index[last] // self.groups[last] * prod(index[last + 1 :]))

    def run_ids(self, shape: tuple[int, ...], first: int, stop: int) -> Array | None:
        """Return the codebooks of runs ``first`` to ``stop`` as u32; None where there is only one."""
        if self.codebooks == 1:
            return None
        index = self.index_shape(shape)
        last = max(axis for axis, count in enumerate(self.groups) if count > 1)
        spans = [size // count for size, count in zip(index[:last], self.groups, strict=False)]
        left = np.arange(first, stop, dtype=np.int64)
        left, found = np.divmod(left, self.groups[last])
        stride = self.groups[last]
        for axis in range(last - 1, -1, -1):
            left, place = np.divmod(left, index[axis])
            found += place // spans[axis] * stride
            stride *= self.groups[axis]
        return found.astype(np.uint32)

    def attributes(self) -> dict[str, Any]:
        """Return the JSON-able attributes that ``params_of`` takes back."""
        return {
            "codec_version": VERSION,
            "bits": self.bits,
            "groups": list(self.groups),
            "vector_size": self.vector_size,
            "vector_axis": self.vector_axis,
            "dtype": self.dtype,
        }


def read_params(attributes: Mapping[str, Any], shape: tuple[int, ...], where: str) -> PaletteParams:
    """Read and check attributes for a tensor of ``shape``.

    Raises
    ------
    CodecError
        ``palette.params``, ``palette.vector-size``, ``palette.groups``.
    """
    if attributes.get("codec_version") != VERSION or type(attributes["codec_version"]) is not int:
        raise _bad(f"codec_version {VERSION}", attributes.get("codec_version"), where)
    bits = attributes.get("bits")
    if type(bits) is not int or bits not in BITS:
        raise _bad(f"bits {', '.join(map(str, BITS))}", bits, where)
    size = require_vector_size(attributes.get("vector_size"), where)
    axis = attributes.get("vector_axis")
    if type(axis) is not int or not 0 <= axis < max(len(shape), 1):
        raise _bad(f"a vector_axis from 0 to {max(len(shape), 1) - 1}", axis, where)
    if size > 1 and (not shape or shape[axis] % size):
        raise CodecError(
            "palette.vector-size",
            f"expected a vector_size that divides dimension {axis} of {list(shape)}, found {size}",
            where=where,
        )
    if attributes.get("dtype") not in FLOATS:
        raise _bad(f"dtype {', '.join(FLOATS)}", attributes.get("dtype"), where)
    groups = attributes.get("groups")
    if not isinstance(groups, list | tuple) or not all(type(one) is int and 1 <= one < 2**63 for one in groups):
        raise _bad("groups, a positive integer per dimension", groups, where)
    params = PaletteParams(bits, tuple(groups), size, axis, attributes["dtype"])
    index = params.index_shape(shape)
    if len(groups) != len(shape) or any(length % count for length, count in zip(index, groups, strict=True)):
        raise CodecError(
            "palette.groups",
            f"expected groups that divide the indices' shape {list(index)}, found {list(groups)!s:.80}",
            where=where,
        )
    return params


def require_vector_size(value: object, where: str | None = None) -> int:
    """Return a vector size of 1, 2 or 4; ``CodecError`` ``palette.vector-size`` otherwise."""
    if type(value) is int and value in VECTOR_SIZES:
        return value
    legal = type(value) is int and 0 <= value < 8 and bool(LEGAL_VECTORS >> value & 1)
    why = "; the compiler's mask 0x36 lets 5 pass, but no descriptor can hold it" if legal else ""
    raise CodecError("palette.vector-size", f"expected vector_size 1, 2 or 4, found {value!r:.80}{why}", where=where)


def params_of(tensor: Tensor) -> PaletteParams:
    """Read and check a tensor's attributes and the types and sizes of its parts; reads no part's bytes.

    Raises
    ------
    CodecError
        ``palette.params``, ``palette.vector-size``, ``palette.groups``, ``palette.parts``, ``palette.dtype``,
        ``palette.size``.
    """
    params = read_params(tensor.params, tensor.shape, tensor.name)
    if tensor.dtype != params.dtype:
        raise _bad(f"dtype {tensor.dtype}, the tensor's", params.dtype, tensor.name)
    if not {INDICES, CODEBOOK} <= set(tensor.parts) <= {INDICES, CODEBOOK, SCALES}:
        raise CodecError(
            "palette.parts",
            f"expected the parts {INDICES}, {CODEBOOK} and perhaps {SCALES}, found "
            f"{', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    scaled = tensor.params.get("scales", SCALES in tensor.parts)
    if type(scaled) is not bool or scaled != (SCALES in tensor.parts):
        raise CodecError(
            "palette.parts",
            f"expected a part {SCALES} where attribute scales is true, and none where it is false",
            where=tensor.name,
        )
    check_part(tensor, INDICES, ("u8",), params.index_bytes(tensor.shape))
    check_codebook(tensor, params)
    return params


def check_codebook(tensor: Tensor, params: PaletteParams) -> None:
    """Check the types and sizes of codebook and scales: rules ``palette.dtype``, ``palette.size``."""
    check_part(tensor, CODEBOOK, ENTRY_DTYPES, prod(params.codebook_shape()))
    if SCALES in tensor.parts:
        check_part(tensor, SCALES, SCALE_DTYPES, params.codebooks)


def check_part(tensor: Tensor, role: str, dtypes: tuple[str, ...], count: int) -> None:
    """Check that a part holds ``count`` elements of one of ``dtypes``."""
    part, where = tensor.parts[role], f"{tensor.name}.{role}"
    if part.dtype not in dtypes or part.type not in (None, part.dtype):
        raise CodecError(
            "palette.dtype", f"expected {' or '.join(dtypes)}, found {part.type or part.dtype}", where=where
        )
    nbytes = count * numpy_dtype(part.dtype).itemsize
    if part.nbytes != nbytes:
        raise CodecError(
            "palette.size", f"expected {nbytes} bytes for shape {list(tensor.shape)}, found {part.nbytes}", where=where
        )


def _bad(expected: str, found: object, where: str) -> CodecError:
    return CodecError("palette.params", f"expected {expected}, found {found!r:.80}", where=where)
