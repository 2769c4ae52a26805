"""``sparse_patch``: flat positions of changed elements, and the values that replace the base's elements.

Trainers send such patches to inference servers between two steps of reinforcement learning (``spec/sparse_patch.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.cast import flat
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder, NeedsBase
from ingot.codecs.delta.flat import BATCH, require_count
from ingot.codecs.delta.readers import ElementReader
from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES, numpy_dtype
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.delta import GAPS, INDEX_TYPES, RAW, PatchLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = PatchLayout.codec
INDICES = "indices"
VALUES = "values"

_NO_LIMIT = 2**63 - 1


def is_patched(name: str) -> bool:
    """Return whether the codec supports an element type: one that is not complex, and whose elements fill complete
    bytes.
    """
    row = DTYPES.get(name)
    return row is not None and row.bits in (8, 16, 32, 64) and row.category != "c"


def as_unsigned(values: Array) -> Array:
    """Return flat values as unsigned integers of the same bits, as a view if possible."""
    return flat(np.require(values, requirements=("C", "A"))).view(f"u{values.dtype.itemsize}")


def changed_positions(base: Array, tuned: Array) -> Array:
    """Return the flat positions at which two arrays of one type and shape differ in their bits: ascending, i64."""
    return np.flatnonzero(as_unsigned(base) != as_unsigned(tuned))


@dataclass(frozen=True, kw_only=True)
class PatchEncoder(DeltaEncoder):
    """An encoder that stores the elements whose bits differ."""

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
        """Return the positions and the new values of elements that change in these rows.

        Positions count from the first element of the tensor. ``start`` is the index of the first row.
        """
        positions = changed_positions(base, tuned)
        values = as_unsigned(tuned)[positions]
        cols = base.shape[-1] if base.ndim > 1 else 1
        return {INDICES: (positions + start * cols).astype(self.index), VALUES: values}

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write the fine-tune's rows to ``out``; ``parts`` are those that ``encode`` returned for ``start`` 0."""
        out[...] = base
        as_unsigned(out)[parts[INDICES]] = parts[VALUES]


class PatchApplier:
    """A sequential applier for any runs of rows; it buffers a batch of positions and values."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self._tensor = tensor
        self._gaps = tensor.params["encoding"] == GAPS
        self._limit = _NO_LIMIT if tensor.params["flat"] else tensor.size
        self._indices = ElementReader(tensor.parts[INDICES])
        self._values = ElementReader(tensor.parts[VALUES])
        self._dtype = numpy_dtype(dtype)
        self._positions = np.empty(0, np.int64)
        self._changes = np.empty(0, f"u{self._dtype.itemsize}")
        self._last = -1
        self._next = 0

    def apply(self, base: Array, out: Array) -> None:
        if base.dtype != self._dtype or out.dtype != base.dtype or out.shape != base.shape:
            raise CodecError(
                "sparse_patch.base",
                f"expected {list(base.shape)} of {self._dtype}, found {list(out.shape)} of {out.dtype}",
                where=self._tensor.name,
            )
        if out is not base:
            np.copyto(out, base)
        target = as_unsigned(out)
        stop = self._next + base.size
        while True:
            cut = int(np.searchsorted(self._positions, stop))
            target[self._positions[:cut] - self._next] = self._changes[:cut]
            self._positions, self._changes = self._positions[cut:], self._changes[cut:]
            if self._positions.size or not self._indices.remaining:
                break
            self._fill()
        self._next = stop

    def finish(self) -> None:
        """Check the digests, and that no position is beyond the last element."""
        while self._indices.remaining and not self._positions.size:
            self._fill()
        if self._positions.size:
            raise self._outside(int(self._positions[0]), self._next)
        self._indices.finish()
        self._values.finish()

    def _fill(self) -> None:
        """Read the next positions and values; positions must ascend."""
        count = min(self._indices.remaining, BATCH // 4)
        positions = self._indices.next(count).astype(np.int64)
        if self._gaps:  # at most 2**16 gaps of 32 bits: no overflow
            positions = self._last + np.cumsum(positions + 1)
        bad = native.kernels.first_unordered(positions, self._last, self._limit)
        if bad < count:
            position = int(positions[bad])
            if 0 <= position < self._limit:
                raise CodecError(
                    "sparse_patch.order",
                    f"expected positions that ascend, found {position} out of order",
                    where=self._tensor.name,
                )
            raise self._outside(position, self._limit)
        self._positions, self._last = positions, int(positions[-1])
        self._changes = self._values.next(count).view(self._changes.dtype)

    def _outside(self, position: int, size: int) -> CodecError:
        return CodecError(
            "sparse_patch.index", f"expected positions from 0 to {size - 1}, found {position}", where=self._tensor.name
        )


class SparsePatchDelta(DeltaCodec):
    """The codec of positions of changed elements and their new values."""

    id = ID
    exact = True
    elementwise = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``sparse_patch.params``, ``.parts``, ``.dtype``,
        ``.size``.
        """
        check(tensor)

    def fits(self, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Return whether the delta ``tensor`` can be applied to a base with ``shape``.

        The shapes must be equal. Exception: for a flat tensor, the base may have any shape with enough elements.
        """
        return tensor.size <= prod(shape) if tensor.params.get("flat") is True else tensor.shape == shape

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> PatchEncoder:
        """Return the encoder. Option ``count``: the number of changed elements, if the caller counted them.

        Raises ``UnsupportedError`` ``sparse_patch.dtype`` for complex numbers, and for elements that do not fill
        complete bytes; ``UsageError`` ``sparse_patch.option``.
        """
        unknown = sorted(set(options) - {"count"})
        row = resolve_dtype(dtype)
        size = prod(shape)
        count = options.get("count")
        if unknown or not (count is None or (type(count) is int and 0 <= count <= size)):
            value = unknown[0] if unknown else f"count={count!r:.40}"
            raise UsageError(
                f"codec sparse_patch has the option count, up to {size}, found {value}", rule="sparse_patch.option"
            )
        if not is_patched(row.name):
            raise UnsupportedError(
                f"codec sparse_patch stores floats, integers and booleans of full bytes, found {row.name}",
                rule="sparse_patch.dtype",
            )
        index = "i32" if size < 2**31 else "i64"
        type_name = None if row.is_storage else row.name
        widths = {INDICES: STORAGE_DTYPES[index].bits // 8, VALUES: row.bits // 8}
        length = {role: None if count is None else width * count for role, width in widths.items()}
        parts = (
            PartSpec(INDICES, index, length[INDICES], limit=widths[INDICES] * size),
            PartSpec(VALUES, row.storage, length[VALUES], type_name, limit=widths[VALUES] * size),
        )
        return PatchEncoder(dtype=row.name, index=numpy_dtype(index), parts=parts)

    def applier(self, tensor: Tensor, dtype: str) -> PatchApplier:
        """Return a sequential applier; raise ``sparse_patch.base`` for a base with another element type."""
        check(tensor)
        if resolve_dtype(dtype).name != tensor.dtype:
            raise CodecError(
                "sparse_patch.base", f"expected a base of {tensor.dtype}, found {dtype}", where=tensor.name
            )
        return PatchApplier(tensor, tensor.dtype)


class SparsePatchCodec(NeedsBase):
    """Changed elements as a codec: they can be stored and checked, but not decoded without their base."""

    id: ClassVar[str] = ID
    rule: ClassVar[str] = "sparse_patch.base"
    holds: ClassVar[str] = "changed elements, which cannot be decoded without their base"

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``sparse_patch.params``, ``.parts``, ``.dtype``,
        ``.size``.
        """
        check(tensor)


def check(tensor: Tensor) -> None:
    """Check parameters, parts and sizes of a stored tensor; reads no part's bytes.

    Raises
    ------
    CodecError
        ``sparse_patch.params``, ``sparse_patch.parts``, ``sparse_patch.dtype``, ``sparse_patch.size``.
    """
    layout = PatchLayout.from_tensor(tensor)
    encoding = layout.encoding
    if set(tensor.parts) != {INDICES, VALUES}:
        roles = ", ".join(sorted(tensor.parts)) or "none"
        raise CodecError(
            "sparse_patch.parts", f"expected the parts indices and values, found {roles[:80]}", where=tensor.name
        )
    indices = tensor.parts[INDICES]
    values = tensor.parts[VALUES]
    if indices.dtype not in INDEX_TYPES[encoding] or indices.type not in (None, indices.dtype):
        raise _dtype_error(tensor, INDICES, " or ".join(INDEX_TYPES[encoding]), indices.type or indices.dtype)
    if not is_patched(tensor.dtype) or (values.type or values.dtype) != tensor.dtype:
        raise _dtype_error(tensor, VALUES, f"{tensor.dtype} of full bytes", values.type or values.dtype)
    count, remainder = divmod(indices.nbytes, STORAGE_DTYPES[indices.dtype].bits // 8)
    width = DTYPES[tensor.dtype].bits // 8
    if remainder or values.nbytes != count * width:
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


def _dtype_error(tensor: Tensor, role: str, expected: str, actual: str) -> CodecError:
    return CodecError(
        "sparse_patch.dtype", f"expected {expected[:80]}, found {actual[:80]}", where=f"{tensor.name}.{role}"
    )
