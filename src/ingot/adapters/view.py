"""Build the view of a base with adapters applied. Changed tensors are computed in f32 when they are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ingot.adapters.match import match
from ingot.adapters.options import AdapterRef
from ingot.adapters.read import open_adapter
from ingot.adapters.record import Adapter, Addition, Change, LowRank, Replacement
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, cast, file_bytes, numpy_dtype
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.concat_source import ConcatSource, DecodedRange, verify_part
from ingot.model.reading.view import derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.stores.location import AnyPath
from ingot.views.common import BuildTensor, lazy_tensors

_BLOCK = 1 << 20  # multiply-adds per block of rows: small enough for one BLAS thread and for the cache
_STEP = 8  # the rows per block are a multiple of this, so that BLAS always adds products in the same order
_LANES = 8


def with_adapters(
    checkpoint: Checkpoint, adapters: Sequence[AnyPath | tuple[AnyPath, float] | AdapterRef], *, exact: bool = False
) -> Checkpoint:
    """Return the checkpoint plus the weighted sum of the adapters' changes, which is computed when tensors are read.

    One adapter with the weight 1 gives the values of PEFT's ``merge_and_unload`` in f32, rounded once to the element
    type of the tensor. With several adapters, each change is computed from the base alone, multiplied by its weight,
    and added to the base. Changed tensors are dense.

    Parameters
    ----------
    checkpoint : Checkpoint
        The base: a model folder, a GGUF file, or another container with the tensor names of one of them.
    adapters : sequence of path, (path, weight) or "PATH:WEIGHT"
    exact : bool
        Whether changed tensors are f32, not rounded to the element type of the base.

    Raises
    ------
    UsageError
        ``adapter.none``, ``adapter.weight``, ``view.delta``.
    FormatError, UnsupportedError
        The errors of ``open_adapter`` and ``match``.
    """
    references = [AdapterRef.parse(item) for item in adapters]
    with ExitStack() as stack:
        opened = [stack.enter_context(open_adapter(item.path)) for item in references]
        view = apply_adapters(checkpoint, opened, [item.weight for item in references], exact=exact)
        stack.pop_all()
    return view


def _with_adapters(checkpoint: Checkpoint, argument: tuple[Sequence[AdapterRef], bool]) -> Checkpoint:
    references, exact = argument
    return with_adapters(checkpoint, references, exact=exact)


def apply_adapters(
    checkpoint: Checkpoint, opened: Sequence[Adapter], weights: Sequence[float], *, exact: bool = False
) -> Checkpoint:
    """Return the checkpoint with opened adapters applied, as ``with_adapters`` does; closing it closes the adapters."""
    terms: dict[str, list[Term]] = {}
    for adapter, weight in zip(opened, weights, strict=True):
        for name, changes in match(adapter, checkpoint).items():
            terms.setdefault(name, []).append(Term(weight, changes))

    def builder(name: str) -> BuildTensor:
        return lambda: merged_tensor(checkpoint[name], terms[name], exact=exact)

    references = [AdapterRef(item.location, weight) for item, weight in zip(opened, weights, strict=True)]
    description = [[item.source.identity(), weight, exact] for item, weight in zip(opened, weights, strict=True)]

    def close() -> None:
        for item in opened:
            item.close()

    entries = [(name, builder(name) if name in terms else None, name) for name in checkpoint]
    return derive_checkpoint(
        checkpoint,
        lazy_tensors(entries, checkpoint),
        _with_adapters,
        (references, exact),
        description,
        opened=[item.source for item in opened],
        also_close=close,
    )


@dataclass(frozen=True, slots=True)
class Term:
    """The changes of one tensor by one adapter, and the adapter's weight."""

    weight: float
    changes: Sequence[Change]


def merged_tensor(tensor: Tensor, terms: Sequence[Term], *, exact: bool) -> Tensor:
    """Return a tensor with the changes of adapters added: f32 if ``exact``, else in the element type of the tensor."""
    dtype = "f32" if exact else tensor.dtype
    row = DTYPES[dtype]
    size = tensor.size * row.bits // 8
    source = ConcatSource(tensor.name, [_MergedRows(tensor, terms, dtype)], np.array([[0], [0], [size]], np.int64))
    part = Part(row.storage, size, source, type=None if row.is_storage else row.name, where=f"{tensor.name}: {DATA}")
    codec = CODECS[DenseLayout.codec]
    merged = Tensor(tensor.name, tensor.shape, dtype, codec.id, {DATA: part}, {}, codec)
    return replace(merged, source_bits=tensor.stored_bits, stored_like=tensor if exact else None)


class _MergedRows:
    """Reader of any bytes of a changed tensor, for ``ConcatSource``; the rows that contain the bytes are computed."""

    def __init__(self, tensor: Tensor, terms: Sequence[Term], dtype: str) -> None:
        self._tensor = tensor
        self._dtype = dtype
        self._stored_dtype = numpy_dtype(tensor.dtype)
        self._changes = Terms(tensor.name, tensor.shape, terms)
        self._rows = DecodedRange(tensor, scattered=False)
        self._lock = threading.Lock()
        self._cached: memoryview | None = None

    def readinto(self, start: int, out: memoryview) -> None:
        if not out.nbytes:
            return
        if self._changes.needs_all_rows:
            with self._lock:
                if self._cached is None:
                    self._cached = self._read(0, self._changes.rows)
                out[:] = self._cached[start : start + out.nbytes]
            return
        width = self._changes.cols * DTYPES[self._dtype].bits // 8
        first = start // width
        last = -(-(start + out.nbytes) // width)
        out[:] = self._read(first, last)[start - first * width : start - first * width + out.nbytes]

    def _read(self, first: int, last: int) -> memoryview:
        check_cancelled()
        cols = self._changes.cols
        stored = np.empty((last - first, cols), self._stored_dtype)
        self._rows.readinto(first * cols * self._stored_dtype.itemsize, stored.reshape(-1).view(np.uint8).data)
        values = self._changes.apply(cast(stored, "f32"), first)
        return memoryview(file_bytes(cast(values, self._dtype))).cast("B")

    def changed(self) -> bool:
        return self._rows.changed()

    def verify_sources(self) -> None:
        for part in self._tensor.parts.values():
            verify_part(part)

    def release(self) -> None:
        with self._lock:
            self._cached = None
        self._changes.release()
        self._rows.release()


class Terms:
    """The sum of several adapters' changes to one tensor, applied to ranges of its rows.

    The tensor is treated as a matrix [rows, cols]: the matrices of a stack follow one another, and a convolution has
    one row per output.
    """

    def __init__(self, name: str, shape: tuple[int, ...], terms: Sequence[Term]) -> None:
        self._name = name
        self._terms = terms
        low_ranks = [item for term in terms for item in term.changes if isinstance(item, LowRank)]
        self.is_stack = any(len(item.a.shape) == 3 for item in low_ranks)
        self.rows, self.cols = (
            (prod(shape[:-1]), shape[-1]) if self.is_stack else (shape[0], prod(shape[1:])) if shape else (1, 1)
        )
        self.needs_all_rows = any(item.magnitude is not None and item.transposed for item in low_ranks)
        self._lock = threading.Lock()
        self._arrays: dict[int, Array] = {}

    def release(self) -> None:
        """Release the factors in memory."""
        with self._lock:
            self._arrays.clear()

    def _values(self, factor: Any) -> Array:
        """Return the values of a factor, which stay in memory until ``release``."""
        with self._lock:
            values = self._arrays.get(id(factor))
            if values is None:
                values = self._arrays[id(factor)] = factor.values()
            return values

    def apply(self, values: Array, first: int) -> Array:
        """Return rows of the changed tensor, given the f32 rows of the base; ``first`` is the index of the first row.

        Raises ``CodecError`` ``adapter.values``: a result is NaN or infinite, or a factor has such values.
        """
        with np.errstate(all="ignore"):  # the check below refuses the result
            if len(self._terms) == 1 and self._terms[0].weight == 1:
                result = self._changed(values, self._terms[0].changes, first)
            else:
                result = values.copy()
                for term in self._terms:
                    result += np.float32(term.weight) * (self._changed(values, term.changes, first) - values)
        if not np.isfinite(result).all():
            raise CodecError(
                "adapter.values", "expected finite merged weights, found NaN or infinity", where=self._name
            )
        return result

    def _changed(self, values: Array, changes: Sequence[Change], first: int) -> Array:
        for change in changes:
            if isinstance(change, LowRank):
                values = self._add_product(values, change, first)
            elif isinstance(change, Addition):
                added = self._values(change.values).reshape(self.rows, self.cols)[first : first + len(values)]
                values = values + added * np.float32(change.scale)
            else:
                values = self._replaced(values, change, first)
        return values

    def _replaced(self, values: Array, change: Replacement, first: int) -> Array:
        new = self._values(change.values)
        if change.rows is None:
            return new.reshape(self.rows, self.cols)[first : first + len(values)]
        index = np.array(change.rows)
        inside = (index >= first) & (index < first + len(values))
        result = values.copy()
        result[index[inside] - first] = new[inside]
        return result

    def _add_product(self, values: Array, change: LowRank, first: int) -> Array:
        a = self._values(change.a)
        b = self._values(change.b)
        scale = np.float32(change.scale)
        step = max(_STEP, _BLOCK // max(1, self.cols * change.rank) // _STEP * _STEP)
        matrix_rows = b.shape[-2]
        result = np.empty_like(values)
        start = first
        while start < first + len(values):
            matrix, row = divmod(start, matrix_rows) if len(b.shape) == 3 else (0, start)
            stop = min(row + step, row + first + len(values) - start, matrix_rows)
            outputs, inputs = (b[matrix], a[matrix]) if len(b.shape) == 3 else (b, a)
            out = slice(start - first, start - first + stop - row)
            product = outputs[row:stop] @ inputs
            product *= scale
            np.add(values[out], product, out=result[out])
            start += stop - row
        if change.magnitude is not None:
            magnitude = self._values(change.magnitude)
            if change.transposed:
                result = (magnitude / column_norms(result))[None, :] * result
            else:
                result = (magnitude[first : first + len(values)] / row_norms(result))[:, None] * result
        return result


def row_norms(values: Array) -> Array:
    """Return the norm of each row in f32.

    Sums have the order of torch's ``linalg.norm``: squares are added in eight lanes, then the lanes are added.
    """
    squares = values * values
    rows, cols = values.shape
    even = cols // _LANES * _LANES
    lanes = np.add.reduce(squares[:, :even].reshape(rows, -1, _LANES), axis=1)
    total = np.zeros(rows, np.float32)
    for column in (*lanes.T, *squares[:, even:].T):
        total = total + column
    norms: Array = np.sqrt(total)
    return norms


def column_norms(values: Array) -> Array:
    """Return the norm of each column in f32, with squares added from the first row to the last."""
    norms: Array = np.sqrt(np.add.reduce(values * values, axis=0))
    return norms
