"""Parameters of ``sparse_mask``, and the dense tensor that kept codes are scattered into (``spec/sparse_mask.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingot.codecs.affine.params import params_of as affine_params_of
from ingot.codecs.base import Codec
from ingot.codecs.dense.codec import check_values, require_part
from ingot.codecs.palette.params import read_params as palette_params
from ingot.codecs.table import CODECS
from ingot.core.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part
from ingot.model.tensor import Tensor

ID = "sparse_mask"
VERSION = 1
MASK, NONZEROS = "mask", "nonzeros"
DENSE, PALETTE, AFFINE = "dense", "palette", "quantized_group"
# Where an inner codec keeps the codes that are scattered.
CODES = {PALETTE: "indices", AFFINE: "packed_weight"}
PACKINGS = ("rows_lsb", "flat_lsb")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the inner codec packs dense codes: ``bits`` each, ``cols`` to a row that begins at a byte; 0: one stream."""

    bits: int
    cols: int
    nbytes: int

    def bytes_of(self, count: int) -> int:
        """Return the bytes of ``count`` codes: of whole rows, where there are rows."""
        rows, cols = (count // self.cols, self.cols) if self.cols else (1, count)
        return rows * -(-cols * self.bits // 8)


@dataclass(frozen=True, slots=True)
class MaskParams:
    """A tensor's attributes, checked.

    ``inner`` is the dense tensor without the part of its codes, ``layout`` what these look like; both None where the
    values themselves are stored.
    """

    nnz: int
    inner: Tensor | None = None
    layout: Layout | None = None

    @property
    def codec(self) -> Codec:
        """Return the inner codec, where there is one beside ``dense``."""
        assert self.inner is not None
        return CODECS[self.inner.codec]


def params_of(tensor: Tensor) -> MaskParams:
    """Read and check a tensor's attributes and the types and sizes of its parts; reads no part's bytes.

    Raises
    ------
    CodecError
        ``sparse_mask.params``, ``.inner``, ``.part-missing``, ``.dtype``, ``.size``, and the inner codec's rules.
    """
    attributes, name = tensor.params, tensor.name
    if type(attributes.get("codec_version")) is not int or attributes["codec_version"] != VERSION:
        raise _bad(tensor, f"codec_version {VERSION}", attributes.get("codec_version"))
    if attributes.get("dtype") != tensor.dtype or tensor.dtype not in DTYPES:
        raise _bad(tensor, f"a known dtype, the tensor's {tensor.dtype:.40}", attributes.get("dtype"))
    nnz = attributes.get("nnz")
    if type(nnz) is not int or not 0 <= nnz <= tensor.size:
        raise _bad(tensor, f"nnz from 0 to {tensor.size}", nnz)
    inner = attributes.get("inner")
    if not isinstance(inner, Mapping) or set(inner) != {"codec", "params"} or not isinstance(inner["params"], Mapping):
        raise _bad(tensor, "inner with codec and params", inner)
    mask = require_part(tensor, MASK)
    _require(tensor, mask, "u8", -(-tensor.size // 8))
    kept = require_part(tensor, NONZEROS)
    if inner["codec"] == DENSE:
        return _dense(tensor, nnz, kept, inner["params"])
    if not isinstance(inner["codec"], str) or inner["codec"] not in CODES:
        raise CodecError(
            f"{ID}.inner", f"expected {DENSE}, {' or '.join(CODES)} within, found {inner['codec']!r:.80}", where=name
        )
    params = dict(inner["params"])
    if params.get("dtype", tensor.dtype) != tensor.dtype:
        raise _bad(tensor, f"dtype {tensor.dtype} within too", params["dtype"])
    rest = {role: part for role, part in tensor.parts.items() if role not in (MASK, NONZEROS)}
    whole = replace(tensor, codec=inner["codec"], params=params, parts=rest, decoder=CODECS[inner["codec"]])
    layout = _layout(whole)
    _require(tensor, kept, "u8", -(-nnz * layout.bits // 8))
    codes = Part("u8", layout.nbytes, MemorySource(b""))  # the size is looked at, nothing is read
    found = MaskParams(nnz, whole, layout)
    found.codec.check(with_codes(found, codes))
    return found


def with_codes(params: MaskParams, codes: Part) -> Tensor:
    """Return the inner tensor with its dense codes."""
    assert params.inner is not None
    return replace(params.inner, parts={**params.inner.parts, CODES[params.inner.codec]: codes})


def _dense(tensor: Tensor, nnz: int, kept: Part, params: Mapping[str, Any]) -> MaskParams:
    if params or set(tensor.parts) != {MASK, NONZEROS} or DTYPES[tensor.dtype].bits not in (8, 16, 32, 64):
        raise CodecError(
            f"{ID}.inner",
            f"expected no parameters, no parts but {MASK} and {NONZEROS}, and values of 1, 2, 4 or 8 bytes",
            where=tensor.name,
        )
    check_values(tensor, kept, nnz)
    return MaskParams(nnz)


def _layout(inner: Tensor) -> Layout:
    if inner.codec == PALETTE:
        palette = palette_params(inner.params, inner.shape, inner.name)
        if palette.vector_size > 1:
            raise CodecError(f"{ID}.inner", "expected entries of one value, found vectors", where=inner.name)
        return Layout(palette.bits, 0, palette.index_bytes(inner.shape))
    affine = affine_params_of(inner)
    if affine.packing not in PACKINGS:
        raise CodecError(
            f"{ID}.inner", f"expected packing {' or '.join(PACKINGS)} within, found {affine.packing}", where=inner.name
        )
    rows, cols = affine.matrix_of(inner.shape)
    nbytes = affine.packed_bytes(rows, cols)
    return Layout(affine.bits, cols if affine.packing == "rows_lsb" else 0, nbytes)


def _require(tensor: Tensor, part: Part, dtype: str, nbytes: int) -> None:
    if part.dtype != dtype or part.type not in (None, dtype):
        raise CodecError(f"{ID}.dtype", f"expected {dtype}, found {part.type or part.dtype}", where=tensor.name)
    if part.nbytes != nbytes:
        raise CodecError(f"{ID}.size", f"expected {nbytes} bytes, found {part.nbytes}", where=tensor.name)


def _bad(tensor: Tensor, expected: str, found: object) -> CodecError:
    return CodecError(f"{ID}.params", f"expected {expected}, found {found!r:.80}", where=tensor.name)
