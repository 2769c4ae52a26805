"""Reading a tensor in chunks: the one place that decides how a tensor may be cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ingot.codecs.base import empty
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.runtime.parallel import HEAVY, go_on
from ingot.errors import UnsupportedError
from ingot.model.reading.limits import require_in_proportion
from ingot.model.reading.ranges import is_remote
from ingot.model.tensor import Array, Tensor


def matrix_of(tensor: Tensor, *codecs: str) -> tuple[int, int]:
    """Return the rows and columns to cut ``tensor`` by, for use with its own codec and ``codecs``.

    Whole rows in general; single elements where every codec works element by element, so that one long row is cut too.
    """
    for codec in (tensor.codec, *codecs):
        if codec not in CODECS or not CODECS[codec].elementwise:
            return tensor.matrix_shape
    return prod(tensor.shape), 1


LIGHT = 1 << 14
"""Bytes of a tensor that is not worth a hand-over between threads."""
_LOOK = 1 << 14  # elements of the first piece that is looked at, which does for nearly all weights
_MOST = 1 << 18
_LARGE = 1 << 23  # elements of a chunk that is compared with what memory is free before it is asked for


def pieces(tensor: Tensor, *others: Tensor) -> Iterator[tuple[int, list[Array]]]:
    """Yield the first row and some whole rows of tensors of one shape: few at first, then more; digests stay unchecked.

    For who looks at a tensor's beginning. Raises what decoding raises.
    """
    rows, cols = tensor.matrix_shape
    if not tensor.size:  # there may be any number of empty rows
        return
    readers = [CODECS[item.codec].reader(item) for item in (tensor, *others)]
    start = 0
    size = _LOOK
    while start < rows:
        count = min(max(1, size // max(cols, 1)), rows - start)
        arrays = [empty((count, cols), item.dtype, item.name) for item in (tensor, *others)]
        for reader, out in zip(readers, arrays, strict=True):
            reader.read_into(out)
        yield start, arrays
        start = start + count
        size = min(4 * size, _MOST)


def weight(tensor: Tensor) -> int:
    """Return the bytes of work that reading a tensor's values is, as ``ordered_together`` weighs; ``HEAVY`` at least
    where they come from another machine."""
    for part in tensor.parts.values():
        if is_remote(part.source):
            return max(HEAVY, tensor.nbytes)
    return tensor.nbytes + tensor.size


def chunks(tensor: Tensor, matrix: tuple[int, int], chunk_rows: int, *, checked: bool = False) -> Iterator[Array]:
    """Yield the decoded values in arrays of at most ``chunk_rows`` x columns, then check digests.

    They are fresh, or of memory that the pipeline which runs used before and nobody holds any more.

    ``checked``: whoever asks knows the tensor to be in proportion (``model.reading.limits``).

    Raises ``UnsupportedError`` where there is no decoder, ``ResourceError`` ``decoded.limit``, and whatever decoding
    raises.
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
        go_on()
        shape = (min(chunk_rows, rows - start), cols)
        large = prod(shape) > _LARGE
        out = empty(shape, tensor.dtype, tensor.name) if large else scratch(shape, numpy_dtype(tensor.dtype))
        reader.read_into(out)
        yield out
    reader.finish()
