"""The ``parent_hash`` of a ``.wdelta``: SHA-256 over names and bytes of the base's tensors, in one of several orders.

See spec/wdelta.md, "Parent hash". The hash covers the delta's tensors (``load_delta_from_paths`` of deltatensors), or
all tensors of the base if there are more (``load_delta``). The orders:

``sorted``
    By name. Version 2 uses it, and version 1 for weights in memory and for the links of a chain.
``records``
    The order of the arrays in the delta's file. Writers that hash while they write use it. If the shards of the
    fine-tune differ from the base's, this is the only order available.
``shards``
    Names sorted within each file of the base, and the files sorted by the first name in each. Version 1 uses it for
    folders.

Bytes are hashed as stored (bf16 as 16 bits). ``sorted-f32`` and ``records-f32`` hash values as f32, as the in-memory
functions of version 1 do for a bf16 model. ``whole-sorted``, ``whole-shards`` and ``whole-sorted-f32`` cover all
tensors of the base.
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

_READ_BYTES = 4 * CHUNK
_CHUNK_ELEMENTS = 1 << 20
WIDE = "-f32"
ALL_TENSORS = "whole-"

Orders = dict[str, tuple[str, ...]]


def parent_orders(base: Mapping[str, Tensor], names: Sequence[str]) -> Orders:
    """Return the sequences of tensor names that a writer may have hashed, by the names of the orders.

    ``names`` are the delta's tensors in the order of the file. Equal orders are listed once. Raises ``IntegrityError``
    ``delta.base`` if the base lacks one of ``names``.
    """
    missing = next((name for name in names if name not in base), None)
    if missing is not None:
        raise IntegrityError("delta.base", f"the base lacks the tensor {missing[:200]!r}, which the delta changes")
    orders = _orders_of(base, names, "")
    if len(base) > len(names):
        orders |= _orders_of(base, sorted(base), ALL_TENSORS)
    return orders


def _orders_of(base: Mapping[str, Tensor], names: Sequence[str], prefix: str) -> Orders:
    """Return the distinct orders of ``names``; keys begin with ``prefix``. Orders that hash values as f32 are last."""
    by_file: dict[str, list[str]] = {}
    tensors = tensor_map_of(base)
    wide = False
    for name in sorted(names):
        tensor = tensors.get_uncached(name)
        wide = wide or tensor.dtype != "f32"
        by_file.setdefault(_file_of(tensor), []).append(name)
    named = {
        "sorted": tuple(sorted(names)),
        "records": tuple(names),
        "shards": tuple(name for members in by_file.values() for name in members),
    }
    orders: Orders = {}
    for key, order in named.items():
        if order not in orders.values():
            orders[f"{prefix}{key}"] = order
    if wide:
        widened = [f"{prefix}{key}" for key in ("sorted", "records")]
        orders |= {f"{key}{WIDE}": orders[key] for key in widened if key in orders}
    return orders


def matching_order(base: Mapping[str, Tensor], names: Sequence[str], expected: str) -> str | None:
    """Return the name of the order in which ``base`` hashes to ``expected``, or None if no order matches.

    The first order, which is nearly always right, is tried alone. The others are then tried in parallel until one
    matches.
    """
    orders = parent_orders(base, names)
    workers = default_workers()

    def hash_order(key: str) -> tuple[str, str]:
        return key, parent_hash(base, orders[key], wide=key.endswith(WIDE))

    first, *remaining = orders
    tries = chain([hash_order(first)], ordered(hash_order, remaining, workers, workers) if remaining else ())
    return next((key for key, digest in tries if digest == expected), None)


def parent_hash(base: Mapping[str, Tensor], order: Sequence[str], *, wide: bool = False) -> str:
    """Return the SHA-256 in hex over name and bytes of each tensor in ``order``.

    If ``wide`` is true, values are hashed as f32.

    One thread reads while another hashes; memory holds a few chunks.
    """
    running = Sha256()
    buffers = ordered(_call, _reads(base, order, wide=wide), 1, 3)
    for buffer in buffers:
        running.update(buffer)
    return hex_of(running)


def _call(read: Callable[[], Buffer]) -> Buffer:
    return read()


def _reads(base: Mapping[str, Tensor], order: Sequence[str], *, wide: bool) -> Iterator[Callable[[], Buffer]]:
    """Yield functions that return the next bytes to hash; they must be called in order, on one thread."""
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
        out = scratch((size,), np.uint8).data  # reuses already zeroed pages inside a pipeline
        reader.readinto(out)
        return out

    for start in range(0, part.nbytes, _READ_BYTES):
        yield partial(read, min(_READ_BYTES, part.nbytes - start))


def _decoded(tensor: Tensor, dtype: str) -> Iterator[Callable[[], Buffer]]:
    matrix = matrix_of(tensor)
    rows = iter(chunks(tensor, matrix, max(1, _CHUNK_ELEMENTS // max(matrix[1], 1))))

    def read() -> Buffer:
        values = next(rows)
        if dtype != tensor.dtype:
            values = (
                CODECS[DenseLayout.codec].encoder(values.shape, tensor.dtype, {"dtype": dtype}).encode(values)["data"]
            )
        return file_bytes(np.ascontiguousarray(values))

    for _ in range(0, matrix[0], max(1, _CHUNK_ELEMENTS // max(matrix[1], 1))):
        yield read


def _file_of(tensor: Tensor) -> str:
    return next((part.source.name for part in tensor.parts.values()), "")
