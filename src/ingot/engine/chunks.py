"""Chunked reads of tensors, and the rows and columns by which tensors are split."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, prod

import numpy as np

from ingot.codecs.base import empty
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, cast, numpy_dtype
from ingot.core.runtime.parallel import HEAVY, check_cancelled
from ingot.errors import UnsupportedError
from ingot.model.reading.limits import require_in_proportion
from ingot.model.reading.ranges import is_remote
from ingot.model.tensor import Array, Tensor


def matrix_of(tensor: Tensor, *codecs: str) -> tuple[int, int]:
    """Return the rows and columns by which ``tensor`` is split into chunks of rows.

    This is the matrix shape of the tensor. If its codec and all ``codecs`` are elementwise, it is one column of single
    elements, so that a long row can be split too.
    """
    for codec in (tensor.codec, *codecs):
        if codec not in CODECS or not CODECS[codec].elementwise:
            return tensor.matrix_shape
    return prod(tensor.shape), 1


LIGHT = 1 << 14
"""The largest number of bytes of a tensor that is read faster in the calling thread than in another thread."""
_FIRST_ELEMENTS = 1 << 14  # elements of the first rows, which are sufficient for nearly all weights
_MAX_ELEMENTS = 1 << 18
_LARGE = 1 << 23  # elements of a chunk above which the free memory is checked before the allocation


def leading_rows(tensor: Tensor, *more_tensors: Tensor) -> Iterator[tuple[int, list[Array]]]:
    """Yield chunks of decoded rows of tensors of one shape: the index of the first row, and an array per tensor.

    The first chunk is small and later chunks are larger, for callers that may need only the first rows. Digests are not
    checked. Raises the errors of decoding.
    """
    rows, cols = tensor.matrix_shape
    if not tensor.size:  # the number of empty rows is not limited
        return
    readers = [CODECS[item.codec].reader(item) for item in (tensor, *more_tensors)]
    start = 0
    size = _FIRST_ELEMENTS
    while start < rows:
        count = min(max(1, size // max(cols, 1)), rows - start)
        arrays = [empty((count, cols), item.dtype, item.name) for item in (tensor, *more_tensors)]
        for reader, out in zip(readers, arrays, strict=True):
            reader.read_into(out)
        yield start, arrays
        start = start + count
        size = min(4 * size, _MAX_ELEMENTS)


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor's values, or 0 if a value is not finite (encoders refuse it)."""
    amax = max((float(np.abs(cast(rows, "f32")).max(initial=0)) for _, (rows,) in leading_rows(tensor)), default=0.0)
    return amax if isfinite(amax) else 0.0


def weight(tensor: Tensor) -> int:
    """Return the weight of a tensor for ``ordered_together``: an estimate, in bytes, of the work of reading it.

    For tensors on another machine, it is at least ``HEAVY``.
    """
    for part in tensor.parts.values():
        if is_remote(part.source):
            return max(HEAVY, tensor.nbytes)
    return tensor.nbytes + tensor.size


def chunks(tensor: Tensor, matrix: tuple[int, int], chunk_rows: int, *, checked: bool = False) -> Iterator[Array]:
    """Yield the decoded values in arrays of at most ``chunk_rows`` rows, and check the digests at the end.

    ``matrix`` are the rows and columns as which the tensor is read. The arrays are new, or reuse memory of the running
    pipeline that no other object refers to. If ``checked`` is true, the caller has already checked the decoded size
    (``model.reading.limits``).

    Raises ``UnsupportedError`` ``codec.unknown`` for a tensor without a decoder, ``ResourceError`` ``decoded.limit``
    for a decoded size out of proportion, and the errors of decoding.
    """
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"no decoder for codec {tensor.codec!r} and dtype {tensor.dtype!r}", rule="codec.unknown", where=tensor.name
        )
    if not checked:
        require_in_proportion([tensor], tensor.name)
    rows, cols = matrix
    reader = CODECS[tensor.codec].reader(tensor)
    for start in range(0, rows, chunk_rows):
        check_cancelled()
        shape = (min(chunk_rows, rows - start), cols)
        large = prod(shape) > _LARGE
        out = empty(shape, tensor.dtype, tensor.name) if large else scratch(shape, numpy_dtype(tensor.dtype))
        reader.read_into(out)
        yield out
    reader.finish()
