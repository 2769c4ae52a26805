"""The ``parent_hash`` of a ``.wdelta``: SHA-256 over names and bytes of the base, in every order that is known.

Facts: spec/wdelta.md, "Parent hash". The tensors that the delta covers count, or, where these are fewer, all tensors of
the base: ``load_delta`` of deltatensors hashes all, ``load_delta_from_paths`` what the delta covers. The orders:

``sorted``
    By name: version 2, and version 1 made in memory or as a link of a chain.
``records``
    As the delta's arrays lie in the file: whoever hashed while writing hashed in this order. It is the only one known
    for a fine-tune that was sharded otherwise than its base.
``shards``
    By the base's files, these in the order of the first name in them: version 1 made from folders.

Bytes are as stored (bf16 as its 16 bits); the orders ``sorted-f32`` and ``records-f32`` are over the values in float32,
which is what the in-memory functions of version 1 were given for a bf16 model. ``whole-sorted``, ``whole-shards`` and
``whole-sorted-f32`` are over all tensors of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import Sha256, hex_of
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.engine.chunks import chunks, matrix_of
from ingot.errors import IntegrityError
from ingot.model.bytesource import Buffer
from ingot.model.checkpoint import tensor_map_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import CHUNK
from ingot.model.tensor import Tensor

_PIECE = 4 * CHUNK
_CHUNK = 1 << 20
WIDE = "-f32"
WHOLE = "whole-"

Orders = dict[str, tuple[str, ...]]


def parent_orders(base: Mapping[str, Tensor], names: Sequence[str]) -> Orders:
    """Return the orders in which ``names`` (of the delta's tensors, in the file's order) may have been hashed.

    Orders that are equal come once. Raises ``IntegrityError`` ``delta.base`` where the base lacks a tensor.
    """
    missing = next((name for name in names if name not in base), None)
    if missing is not None:
        raise IntegrityError("delta.base", f"expected a tensor {missing[:200]!r} in the base, found none")
    orders = _orders_of(base, names, "")
    if len(base) > len(names):
        orders |= _orders_of(base, sorted(base), WHOLE)
    return orders


def _orders_of(base: Mapping[str, Tensor], names: Sequence[str], prefix: str) -> Orders:
    """Return the different orders of ``names``, those over float32 last; keys begin with ``prefix``."""
    by_file: dict[str, list[str]] = {}
    tensors = tensor_map_of(base)
    wide = False
    for name in sorted(names):
        tensor = tensors.get_uncached(name)
        wide = wide or tensor.dtype != "f32"
        by_file.setdefault(_file_of(tensor), []).append(name)
    known = {
        "sorted": tuple(sorted(names)),
        "records": tuple(names),
        "shards": tuple(name for members in by_file.values() for name in members),
    }
    orders: Orders = {}
    for key, order in known.items():
        if order not in orders.values():
            orders[f"{prefix}{key}"] = order
    if wide:
        widened = [f"{prefix}{key}" for key in ("sorted", "records")]
        orders |= {f"{key}{WIDE}": orders[key] for key in widened if key in orders}
    return orders


def matching_order(base: Mapping[str, Tensor], names: Sequence[str], expected: str) -> str | None:
    """Return the order in which ``base`` hashes to ``expected``; None if there is none, so that it is another base.

    The likeliest order is tried alone, for it nearly always is the right one; the others then as many at a time as
    there are processors. The right one ends the search.
    """
    orders = parent_orders(base, names)
    workers = default_workers()

    def hashed(key: str) -> tuple[str, str]:
        return key, parent_hash(base, orders[key], wide=key.endswith(WIDE))

    first, *rest = orders
    tries = chain([hashed(first)], ordered(hashed, rest, workers, workers) if rest else ())
    return next((key for key, digest in tries if digest == expected), None)


def parent_hash(base: Mapping[str, Tensor], order: Sequence[str], *, wide: bool = False) -> str:
    """Return the SHA-256, in hex, over name and bytes of the tensors in ``order``; ``wide`` widens values to float32.

    Reading runs ahead of hashing on a thread; memory is bounded by a few pieces.
    """
    running = Sha256()
    pieces = ordered(_call, _pieces(base, order, wide=wide), 1, 3)
    for piece in pieces:
        running.update(piece)
    return hex_of(running)


def _call(read: Callable[[], Buffer]) -> Buffer:
    return read()


def _pieces(base: Mapping[str, Tensor], order: Sequence[str], *, wide: bool) -> Iterator[Callable[[], Buffer]]:
    """Yield calls that read the next bytes; they run in this order, on one thread."""
    for name in order:
        encoded = name.encode("utf-8", "surrogatepass")
        yield partial(bytes, encoded)
        tensor = base[name]
        widen = wide and tensor.dtype != "f32"
        if tensor.codec == DenseLayout.codec and set(tensor.parts) == {"data"} and not widen:
            yield from _raw(tensor)
        else:
            yield from _decoded(tensor, "f32" if widen else tensor.dtype)


def _raw(tensor: Tensor) -> Iterator[Callable[[], Buffer]]:
    part = tensor.parts["data"]
    reader = part.reader()

    def read(size: int) -> Buffer:
        out = scratch((size,), np.uint8).data  # where a pipeline runs, pages that were cleared before
        reader.readinto(out)
        return out

    for start in range(0, part.nbytes, _PIECE):
        yield partial(read, min(_PIECE, part.nbytes - start))


def _decoded(tensor: Tensor, dtype: str) -> Iterator[Callable[[], Buffer]]:
    matrix = matrix_of(tensor)
    rows = iter(chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1))))

    def read() -> Buffer:
        values = next(rows)
        if dtype != tensor.dtype:
            values = (
                CODECS[DenseLayout.codec].encoder(values.shape, tensor.dtype, {"dtype": dtype}).encode(values)["data"]
            )
        return file_bytes(np.ascontiguousarray(values))

    for _ in range(0, matrix[0], max(1, _CHUNK // max(matrix[1], 1))):
        yield read


def _file_of(tensor: Tensor) -> str:
    return next((part.source.name for part in tensor.parts.values()), "")
