"""The tensors of a fine-tune, computed from its base and a delta when they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, file_bytes
from ingot.engine.delta_chain import Link, stages
from ingot.engine.patch_step import PatchChain
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.concat_source import ConcatSource, verify_part
from ingot.model.reading.lazy import LazyMap
from ingot.model.tensor import Tensor


def delta_tensors(base: Checkpoint, link: Link) -> Mapping[str, Tensor]:
    """Return the tensors of a fine-tune, which are computed from the base and a delta when they are read.

    Raises the errors of ``stages``.
    """
    routes = stages(base, [link])[-1]
    return LazyMap(dict.fromkeys(routes), lambda name: _tensor(name, routes[name]))


def _tensor(name: str, chain: PatchChain) -> Tensor:
    if not chain.layers:
        origin = chain.origin
        return origin if origin.decoder is not None or origin.codec not in CODECS else _with_decoder(origin)
    if chain.opaque:
        raise UnsupportedError(f"values of {chain.dtype} cannot be merged", rule="merge.tensors", where=name)
    row = DTYPES[chain.dtype]
    size = int(np.prod(chain.shape, dtype=np.int64)) * row.bits // 8
    source = ConcatSource(name, [_ChainBytes(chain)], np.array([[0], [0], [size]], np.int64))
    part = Part(row.storage, size, source, type=None if row.is_storage else row.name, where=f"{name}: {DATA}")
    codec = CODECS[DenseLayout.codec]
    return Tensor(name, chain.shape, chain.dtype, codec.id, {DATA: part}, {}, codec)


def _with_decoder(tensor: Tensor) -> Tensor:
    return replace(tensor, decoder=CODECS[tensor.codec])


class _ChainBytes:
    """Random access to the values of a chain of deltas (see ``ConcatSource``).

    The values are decoded in ascending order. A read before the current chunk decodes again from the beginning.
    """

    def __init__(self, chain: PatchChain) -> None:
        self._chain = chain
        self._lock = threading.Lock()
        self._chunks: Iterator[memoryview] | None = None
        self._chunk = memoryview(b"")
        self._start = 0

    def readinto(self, start: int, out: memoryview) -> None:
        with self._lock:
            filled = 0
            while filled < out.nbytes:
                self._advance(start + filled)
                skipped = start + filled - self._start
                count = min(self._chunk.nbytes - skipped, out.nbytes - filled)
                out[filled : filled + count] = self._chunk[skipped : skipped + count]
                filled += count

    def _advance(self, position: int) -> None:
        """Decode chunks until the current one contains a position; start again if the position precedes it."""
        if self._chunks is None or position < self._start:
            self._chunks = (memoryview(file_bytes(rows)).cast("B") for rows in self._chain.chunks())
            self._chunk = memoryview(b"")
            self._start = 0
        while position >= self._start + self._chunk.nbytes:
            self._start += self._chunk.nbytes
            self._chunk = next(self._chunks)

    def changed(self) -> bool:
        return any(part.source.changed() for tensor in self._tensors() for part in tensor.parts.values())

    def _tensors(self) -> list[Tensor]:
        return [self._chain.origin, *(layer.tensor for layer in self._chain.layers)]

    def verify_sources(self) -> None:
        for tensor in self._tensors():
            for part in tensor.parts.values():
                verify_part(part)

    def release(self) -> None:
        with self._lock:
            self._chunks = None
            self._chunk = memoryview(b"")
            self._start = 0
