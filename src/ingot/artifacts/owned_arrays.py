"""Loading of full tensors into new arrays, by read calls on a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ingot.codecs.base import empty
from ingot.codecs.dense.codec import DenseReader
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import owns_memory
from ingot.core.numeric.dtypes import DTYPES, little_endian
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.engine.chunks import LIGHT, weight
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.limits import require_room
from ingot.model.tensor import Array, Tensor

# Bytes of one read of a large tensor, and the smallest amount of work for one task of a thread.
CHUNK = 16 << 20
BATCH = 2 << 20
# More threads do not help: the memory bandwidth is the limit.
_MAX_WORKERS = 8

_Job = Callable[[], None]


def load_arrays(
    checkpoint: Checkpoint, names: Iterable[str] | None = None, workers: int | None = None
) -> dict[str, Array]:
    """Return tensors decoded into new writable arrays, without a change of dtype.

    Parameters
    ----------
    checkpoint : Checkpoint
        It stays open; the arrays do not depend on it.
    names : iterable of str, optional
        The names in the order of the result; by default all in file order.
    workers : int, optional
        Number of threads; 0 or 1 uses the calling thread. By default ``default_workers()``, at most 8.

    Raises
    ------
    UsageError
        ``tensor.unknown``.
    IntegrityError, FormatError, CodecError, UnsupportedError
        The errors of ``Tensor.numpy``. Digests are checked.
    """
    chosen = list(checkpoint) if names is None else list(names)
    for name in chosen if names is not None else ():
        if name not in checkpoint:
            raise checkpoint.no_tensor(name)
    tensor_map = checkpoint.tensor_map
    with gc_paused():  # many new objects would trigger useless collections
        tensors = [tensor_map.get_uncached(name) for name in chosen]
        require_room(tensors, checkpoint.location, retyped=True)
    if names is None or (len(chosen) >= len(checkpoint) and set(chosen) == set(checkpoint)):
        checkpoint.require_whole()
    arrays: dict[str, Array] = dict.fromkeys(chosen, np.empty(0))
    workers = min(default_workers(), _MAX_WORKERS) if workers is None else workers
    if all(weight(tensor) <= LIGHT for tensor in tensors):  # threads would take turns at Python's lock
        workers = 0
    for _ in ordered(_run, _batches(tensors, arrays), 0 if workers <= 1 else workers, 2 * max(1, workers)):
        pass
    return arrays


def _run(batch: list[_Job]) -> None:
    for job in batch:
        job()


def _batches(tensors: Iterable[Tensor], arrays: dict[str, Array]) -> Iterator[list[_Job]]:
    """Yield lists of jobs that read about ``BATCH`` bytes or one chunk of a large tensor."""
    batch: list[_Job] = []
    size = 0
    for tensor in tensors:
        for job, nbytes in _jobs(tensor, arrays):
            batch.append(job)
            size += nbytes
            if size >= BATCH:
                yield batch
                batch = []
                size = 0
    yield batch


def _jobs(tensor: Tensor, arrays: dict[str, Array]) -> Iterator[tuple[_Job, int]]:
    """Yield the jobs that fill ``arrays[tensor.name]``, each with the number of bytes that it reads."""
    if tensor.codec != DenseLayout.codec:
        yield partial(_decode, tensor, arrays), tensor.nbytes
        return
    CODECS[DenseLayout.codec].check(tensor)
    if tensor.dtype not in DTYPES:
        yield partial(_decode, tensor, arrays), tensor.nbytes
        return
    out = arrays[tensor.name] = empty(tensor.shape, tensor.dtype, tensor.name)
    if not _can_split(tensor):
        yield partial(_read, tensor, out), out.nbytes
        return
    data = out.reshape(-1).view(np.uint8).data
    for start in range(0, out.nbytes, CHUNK):
        chunk = data[start : start + CHUNK]
        yield partial(tensor.parts["data"].readinto, start, chunk), chunk.nbytes


def _can_split(tensor: Tensor) -> bool:
    """Return whether a tensor can be read in separate ranges.

    It can if the bytes of its part are those of the array, and no digest of the full part must be checked.
    """
    part = tensor.parts["data"]
    is_checked = part.digest is not None and part.verify
    is_plain = part.encoding == "raw" and tensor.dtype != "bool" and little_endian(part.dtype).isnative
    return is_plain and not is_checked and part.nbytes > CHUNK


def _read(tensor: Tensor, out: Array) -> None:
    reader = DenseReader(tensor)
    reader.read_into(out)
    reader.finish()


def _decode(tensor: Tensor, arrays: dict[str, Array]) -> None:
    values = tensor.numpy()
    arrays[tensor.name] = values if owns_memory(values) else values.copy()
