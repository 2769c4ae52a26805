"""Parameters of ``sparse_mask``, and the dense tensor into which selected codes are scattered
(``spec/sparse_mask.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ingot.codecs.base import Codec
from ingot.codecs.dense.codec import check_values, require_part
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.bytesource import MemorySource
from ingot.model.layouts import affine, palette
from ingot.model.layouts.affine import FLAT_LSB, ROWS_LSB, AffineLayout
from ingot.model.layouts.base import Layout, codec_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.sparse import MASK, NONZEROS, MaskLayout
from ingot.model.part import Part
from ingot.model.tensor import Tensor

ID = MaskLayout.codec
# by inner codec, the role of the part with the codes
CODES = {PaletteLayout.codec: palette.INDICES, AffineLayout.codec: affine.CODES}
PACKINGS = (ROWS_LSB, FLAT_LSB)


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The packing of the inner codec's dense codes: ``bits`` per code, in rows of ``cols`` codes that begin at bytes.

    If ``cols`` is 0, all codes are one stream.
    """

    bits: int
    cols: int
    nbytes: int

    def bytes_of(self, count: int) -> int:
        """Return the number of bytes of ``count`` codes, which must be full rows unless the codes are one stream."""
        rows, cols = (count // self.cols, self.cols) if self.cols else (1, count)
        return rows * -(-cols * self.bits // 8)


@dataclass(frozen=True, slots=True)
class MaskParams:
    """The checked attributes of a tensor.

    ``padding`` is the number of bits after each row of the mask. If the tensor stores codes, ``inner`` is the dense
    tensor without its codes, and ``layout`` their packing; if it stores values, both are None.
    """

    nnz: int
    padding: int = 0
    inner: Tensor | None = None
    layout: CodeLayout | None = None

    @property
    def codec(self) -> Codec:
        """The inner codec of a tensor that stores codes."""
        assert self.inner is not None
        return CODECS[self.inner.codec]


def params_of(tensor: Tensor) -> MaskParams:
    """Check a tensor's parameters, and the types and sizes of its parts; return the parameters. Reads no part's bytes.

    Raises
    ------
    CodecError
        ``sparse_mask.params``, ``.inner``, ``.part-missing``, ``.dtype``, ``.size``, and the inner codec's rules.
    """
    _refuse_inner(tensor)
    stored = MaskLayout.from_tensor(tensor)
    if tensor.dtype not in DTYPES:
        raise _params_error(tensor, "a known dtype", tensor.dtype)
    if stored.nnz is None:
        raise _params_error(tensor, f"nnz from 0 to {tensor.size}", None)
    mask = require_part(tensor, MASK)
    _require(tensor, mask, "u8", stored.mask_length(tensor.shape))
    padding = stored.padding(tensor.shape)
    selected = require_part(tensor, NONZEROS)
    if isinstance(stored.inner, DenseLayout):
        _check_dense(tensor, stored.nnz, selected)
        return MaskParams(stored.nnz, padding)
    inner_parts = {role: part for role, part in tensor.parts.items() if role not in (MASK, NONZEROS)}
    codec = stored.inner.codec
    params = dict(tensor.params["inner"]["params"])
    inner = replace(tensor, codec=codec, params=params, parts=inner_parts, decoder=CODECS[codec])
    layout = _layout(stored.inner, inner)
    _require(tensor, selected, "u8", -(-stored.nnz * layout.bits // 8))
    codes = Part("u8", layout.nbytes, MemorySource(b""))  # only the size is used
    checked = MaskParams(stored.nnz, padding, inner, layout)
    checked.codec.check(with_codes(checked, codes))
    return checked


def _refuse_inner(tensor: Tensor) -> None:
    inner = tensor.params.get("inner")
    stored = inner.get("codec") if isinstance(inner, Mapping) else None
    if isinstance(stored, str) and codec_of(stored) not in (DenseLayout.codec, *CODES):
        raise CodecError(
            f"{ID}.inner",
            f"expected the inner codec {DenseLayout.codec}, {' or '.join(CODES)}, found {stored!r:.80}",
            where=tensor.name,
        )


def with_codes(params: MaskParams, codes: Part) -> Tensor:
    """Return the inner tensor of a mask with the part ``codes``, which contains the codes of all elements."""
    assert params.inner is not None
    return replace(params.inner, parts={**params.inner.parts, CODES[params.inner.codec]: codes})


def _check_dense(tensor: Tensor, nnz: int, selected: Part) -> None:
    if (
        tensor.params["inner"]["params"]
        or set(tensor.parts) != {MASK, NONZEROS}
        or DTYPES[tensor.dtype].bits not in (8, 16, 32, 64)
    ):
        raise CodecError(
            f"{ID}.inner",
            f"expected no parameters, no parts but {MASK} and {NONZEROS}, and values of 1, 2, 4 or 8 bytes",
            where=tensor.name,
        )
    check_values(tensor, selected, nnz)


def _layout(stored: Layout, inner: Tensor) -> CodeLayout:
    if isinstance(stored, PaletteLayout):
        if stored.vector_size > 1:
            raise CodecError(f"{ID}.inner", "expected entries of one value, found vectors", where=inner.name)
        return CodeLayout(stored.bits, 0, stored.index_bytes(inner.shape))
    assert isinstance(stored, AffineLayout)
    if stored.packing not in PACKINGS:
        raise CodecError(
            f"{ID}.inner",
            f"expected packing {' or '.join(PACKINGS)} in inner, found {stored.packing}",
            where=inner.name,
        )
    rows, cols = stored.matrix_of(inner.shape)
    return CodeLayout(stored.bits, cols if stored.packing == ROWS_LSB else 0, stored.packed_bytes(rows, cols))


def _require(tensor: Tensor, part: Part, dtype: str, nbytes: int) -> None:
    if part.dtype != dtype or part.type not in (None, dtype):
        raise CodecError(f"{ID}.dtype", f"expected {dtype}, found {part.type or part.dtype}", where=tensor.name)
    if part.nbytes != nbytes:
        raise CodecError(f"{ID}.size", f"expected {nbytes} bytes, found {part.nbytes}", where=tensor.name)


def _params_error(tensor: Tensor, expected: str, value: object) -> CodecError:
    return CodecError(f"{ID}.params", f"expected {expected}, found {value!r:.80}", where=tensor.name)
