"""Load whole tensors into arrays of their own, by read calls on a few threads, as fast as memory takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ingot.codecs.base import empty
from ingot.codecs.dense.codec import DenseReader
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import is_own
from ingot.core.numeric.dtypes import DTYPES, little_endian
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.engine.chunks import LIGHT, weight
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.limits import require_room
from ingot.model.tensor import Array, Tensor

# Bytes per read of a big tensor, and the least that is worth a hand-over between threads.
PIECE = 16 << 20
BATCH = 2 << 20
# Threads beyond this wait for memory, not for processors.
_MAX_WORKERS = 8

_Job = Callable[[], None]


def load_owned(
    checkpoint: Checkpoint, names: Iterable[str] | None = None, workers: int | None = None
) -> dict[str, Array]:
    """Return every tensor, or those named, decoded in its own dtype into a writable array of its own.

    Parameters
    ----------
    checkpoint : Checkpoint
        Stays open; the arrays do not depend on it.
    names : iterable of str, optional
        In the order wanted; all in file order by default.
    workers : int, optional
        Threads; 0 or 1 works in the calling thread. ``default_workers()``, at most 8, by default.

    Raises
    ------
    UsageError
        ``tensor.unknown``.
    IntegrityError, FormatError, CodecError, UnsupportedError
        As ``Tensor.numpy``. Digests are checked along the way.
    """
    chosen = list(checkpoint) if names is None else list(names)
    for name in chosen if names is not None else ():
        if name not in checkpoint:
            raise checkpoint.no_tensor(name)
    many = checkpoint.tensor_map
    with gc_paused():  # many small objects, none of them garbage
        tensors = [many.get_uncached(name) for name in chosen]
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
    """Cut the work into lists of jobs that each move about ``BATCH`` bytes or one big piece."""
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
    """Yield the jobs that fill ``arrays[tensor.name]``, each with the bytes it moves."""
    if tensor.codec != DenseLayout.codec:
        yield partial(_decode, tensor, arrays), tensor.nbytes
        return
    CODECS[DenseLayout.codec].check(tensor)
    if tensor.dtype not in DTYPES:
        yield partial(_decode, tensor, arrays), tensor.nbytes
        return
    out = arrays[tensor.name] = empty(tensor.shape, tensor.dtype, tensor.name)
    if not _in_pieces(tensor):
        yield partial(_read, tensor, out), out.nbytes
        return
    data = out.reshape(-1).view(np.uint8).data
    for start in range(0, out.nbytes, PIECE):
        piece = data[start : start + PIECE]
        yield partial(tensor.parts["data"].readinto, start, piece), piece.nbytes


def _in_pieces(tensor: Tensor) -> bool:
    """Whether ranges of the part are ranges of the array, and no digest or check wants to see them in one go."""
    part = tensor.parts["data"]
    checked = part.digest is not None and part.verify
    plain = part.encoding == "raw" and tensor.dtype != "bool" and little_endian(part.dtype).isnative
    return plain and not checked and part.nbytes > PIECE


def _read(tensor: Tensor, out: Array) -> None:
    reader = DenseReader(tensor)
    reader.read_into(out)
    reader.finish()


def _decode(tensor: Tensor, arrays: dict[str, Array]) -> None:
    values = tensor.numpy()
    arrays[tensor.name] = values if is_own(values) else values.copy()
