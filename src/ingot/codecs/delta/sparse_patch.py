"""``sparse_patch``: the elements of a tensor that changed, at flat positions, to be written over the base's.

What trainers send to inference servers between two steps of reinforcement learning (``spec/sparse_patch.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.cast import flat
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder, NeedsBase
from ingot.codecs.delta.flat import PIECE, require_count
from ingot.codecs.delta.readers import Values
from ingot.core import native
from ingot.core.dtypes import DTYPES, STORAGE_DTYPES, numpy_dtype
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.delta import GAPS, INDEX_TYPES, RAW, PatchLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = PatchLayout.codec
INDICES, VALUES = "indices", "values"

_NO_LIMIT = 2**63 - 1


def is_patched(name: str) -> bool:
    """Return whether the codec takes this element type: whole bytes, and no complex numbers."""
    row = DTYPES.get(name)
    return row is not None and row.bits in (8, 16, 32, 64) and row.kind != "c"


def words(values: Array) -> Array:
    """View values flat, as unsigned integers: bits are compared and moved, never numbers."""
    return flat(np.require(values, requirements=("C", "A"))).view(f"u{values.dtype.itemsize}")


def changed_positions(base: Array, tuned: Array) -> Array:
    """Return the flat positions at which the bits of two arrays of one type and shape differ, ascending, int64."""
    return np.flatnonzero(words(base) != words(tuned))


@dataclass(frozen=True, kw_only=True)
class PatchEncoder(DeltaEncoder):
    """Keeps the elements whose bits differ."""

    dtype: str
    index: np.dtype[Any]
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=PatchLayout(RAW, flat=False).attributes)
    codec: str = ID
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = False
    lossless: bool = True

    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        """Return the positions and values of these rows; ``start`` counts rows of as many elements as these have."""
        positions = changed_positions(base, tuned)
        values = words(tuned)[positions]
        cols = base.shape[-1] if base.ndim > 1 else 1
        return {INDICES: (positions + start * cols).astype(self.index), VALUES: values}

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write the fine-tune's rows, given what ``encode`` returned for the first ones."""
        out[...] = base
        words(out)[parts[INDICES]] = parts[VALUES]


class PatchApplier:
    """Sequential application to any runs of rows; in memory are some positions and their values."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self._tensor = tensor
        self._gaps = tensor.params["encoding"] == GAPS
        self._limit = _NO_LIMIT if tensor.params["flat"] else tensor.size
        self._indices, self._values = Values(tensor.parts[INDICES]), Values(tensor.parts[VALUES])
        self._kind = numpy_dtype(dtype)
        self._at = np.empty(0, np.int64)
        self._what = np.empty(0, f"u{self._kind.itemsize}")
        self._last = -1
        self._next = 0

    def apply(self, base: Array, out: Array) -> None:
        if base.dtype != self._kind or out.dtype != base.dtype or out.shape != base.shape:
            raise CodecError(
                "sparse_patch.base",
                f"expected {list(base.shape)} of {self._kind}, found {list(out.shape)} of {out.dtype}",
                where=self._tensor.name,
            )
        if out is not base:
            np.copyto(out, base)
        target, stop = words(out), self._next + base.size
        while True:
            cut = int(np.searchsorted(self._at, stop))
            target[self._at[:cut] - self._next] = self._what[:cut]
            self._at, self._what = self._at[cut:], self._what[cut:]
            if self._at.size or not self._indices.left:
                break
            self._fill()
        self._next = stop

    def finish(self) -> None:
        """Check that no position lies behind the last element, and the digests."""
        while self._indices.left and not self._at.size:
            self._fill()
        if self._at.size:
            raise self._outside(int(self._at[0]), self._next)
        self._indices.finish()
        self._values.finish()

    def _fill(self) -> None:
        """Read the next positions and values; they must ascend."""
        count = min(self._indices.left, PIECE // 4)
        at = self._indices.next(count).astype(np.int64)
        if self._gaps:  # at most 2**16 gaps of 32 bits: no overflow
            at = self._last + np.cumsum(at + 1)
        bad = native.kernels.first_unordered(at, self._last, self._limit)
        if bad < count:
            position = int(at[bad])
            if 0 <= position < self._limit:
                raise CodecError(
                    "sparse_patch.order",
                    f"expected positions that ascend, found {position} out of order",
                    where=self._tensor.name,
                )
            raise self._outside(position, self._limit)
        self._at, self._last = at, int(at[-1])
        self._what = self._values.next(count).view(self._what.dtype)

    def _outside(self, found: int, size: int) -> CodecError:
        return CodecError(
            "sparse_patch.index", f"expected positions from 0 to {size - 1}, found {found}", where=self._tensor.name
        )


class SparsePatchDelta(DeltaCodec):
    """How changed elements are found, and written over those of a base."""

    id = ID
    exact = True
    elementwise = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``sparse_patch.params``, ``.parts``, ``.dtype``, ``.size``."""
        check(tensor)

    def fits(self, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Return whether the base may have this shape: the tensor's, or any that holds as many values where none is stated."""
        return tensor.size <= prod(shape) if tensor.params.get("flat") is True else tensor.shape == shape

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> PatchEncoder:
        """Prepare to encode. Option ``count``: how many elements differ, where that is known beforehand.

        Raises ``UnsupportedError`` ``sparse_patch.dtype``: no whole bytes, or complex; ``UsageError``
        ``sparse_patch.option``.
        """
        unknown = sorted(set(options) - {"count"})
        row, size, count = resolve_dtype(dtype), prod(shape), options.get("count")
        if unknown or not (count is None or (type(count) is int and 0 <= count <= size)):
            found = unknown[0] if unknown else f"count={count!r:.40}"
            raise UsageError(
                f"codec sparse_patch knows the option count, up to {size}, found {found}", rule="sparse_patch.option"
            )
        if not is_patched(row.name):
            raise UnsupportedError(
                f"sparse_patch takes floats, integers and booleans of whole bytes, found {row.name}",
                rule="sparse_patch.dtype",
            )
        index = "i32" if size < 2**31 else "i64"
        kind = None if row.is_storage else row.name
        widths = {INDICES: STORAGE_DTYPES[index].bits // 8, VALUES: row.bits // 8}
        length = {role: None if count is None else width * count for role, width in widths.items()}
        parts = (
            PartSpec(INDICES, index, length[INDICES], limit=widths[INDICES] * size),
            PartSpec(VALUES, row.storage, length[VALUES], kind, limit=widths[VALUES] * size),
        )
        return PatchEncoder(dtype=row.name, index=numpy_dtype(index), parts=parts)

    def applier(self, tensor: Tensor, dtype: str) -> PatchApplier:
        """Return a sequential applier; ``sparse_patch.base`` refuses a base of another element type."""
        check(tensor)
        if resolve_dtype(dtype).name != tensor.dtype:
            raise CodecError(
                "sparse_patch.base", f"expected a base of {tensor.dtype}, found {dtype}", where=tensor.name
            )
        return PatchApplier(tensor, tensor.dtype)


class SparsePatchCodec(NeedsBase):
    """Changed elements as a codec: checked and moved here, never values alone, for they need their base."""

    id: ClassVar[str] = ID
    rule: ClassVar[str] = "sparse_patch.base"
    holds: ClassVar[str] = "what changed in a tensor, which means nothing without its base"

    def check(self, tensor: Tensor) -> None:
        """Rules ``sparse_patch.params``, ``.parts``, ``.dtype``, ``.size``."""
        check(tensor)


def check(tensor: Tensor) -> None:
    """Check parameters, parts and sizes of a stored tensor; reads no part's bytes.

    Raises
    ------
    CodecError
        ``sparse_patch.params``, ``sparse_patch.parts``, ``sparse_patch.dtype``, ``sparse_patch.size``.
    """
    layout = PatchLayout.of(tensor)
    encoding = layout.encoding
    if set(tensor.parts) != {INDICES, VALUES}:
        found = ", ".join(sorted(tensor.parts)) or "none"
        raise CodecError(
            "sparse_patch.parts", f"expected the parts indices and values, found {found[:80]}", where=tensor.name
        )
    indices, values = tensor.parts[INDICES], tensor.parts[VALUES]
    if indices.dtype not in INDEX_TYPES[encoding] or indices.type not in (None, indices.dtype):
        raise _wrong_type(tensor, INDICES, " or ".join(INDEX_TYPES[encoding]), indices.type or indices.dtype)
    if not is_patched(tensor.dtype) or (values.type or values.dtype) != tensor.dtype:
        raise _wrong_type(tensor, VALUES, f"{tensor.dtype} of whole bytes", values.type or values.dtype)
    count, odd = divmod(indices.nbytes, STORAGE_DTYPES[indices.dtype].bits // 8)
    width = DTYPES[tensor.dtype].bits // 8
    if odd or values.nbytes != count * width:
        raise CodecError(
            "sparse_patch.size",
            f"expected a value of {width} bytes for each position, found {indices.nbytes} bytes of positions and "
            f"{values.nbytes} of values",
            where=tensor.name,
        )
    if layout.flat:
        require_count(tensor, VALUES, count, tensor.size)
    elif count > tensor.size:
        raise CodecError(
            "sparse_patch.size", f"expected at most {tensor.size} positions, found {count}", where=tensor.name
        )


def _wrong_type(tensor: Tensor, role: str, expected: str, found: str) -> CodecError:
    return CodecError(
        "sparse_patch.dtype", f"expected {expected[:80]}, found {found[:80]}", where=f"{tensor.name}.{role}"
    )
