"""Reading a tensor in slabs: the one place that decides how a tensor may be cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ingot.codecs.base import empty
from ingot.codecs.table import CODECS
from ingot.core.dtypes import DTYPES
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array, Tensor


def matrix_of(tensor: Tensor, *codecs: str) -> tuple[int, int]:
    """Return the rows and columns to cut ``tensor`` by, for use with its own codec and ``codecs``.

    Whole rows in general; single elements where every codec works element by element, so that one long row is cut too.
    """
    if all(codec in CODECS and CODECS[codec].elementwise for codec in (tensor.codec, *codecs)):
        return prod(tensor.shape), 1
    return tensor.matrix_shape


def slabs(tensor: Tensor, matrix: tuple[int, int], slab_rows: int) -> Iterator[Array]:
    """Yield the decoded values in fresh arrays of at most ``slab_rows`` x columns, then check digests.

    Raises ``UnsupportedError`` where there is no decoder, and whatever decoding raises.
    """
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"no decoder for codec {tensor.codec!r} and dtype {tensor.dtype!r}", rule="codec.unknown", where=tensor.name
        )
    rows, cols = matrix
    reader = CODECS[tensor.codec].reader(tensor)
    for start in range(0, rows, slab_rows):
        out = empty((min(slab_rows, rows - start), cols), tensor.dtype, tensor.name)
        reader.read_into(out)
        yield out
    reader.finish()
