"""A view whose matrices are encoded by a codec, one at a time, when their bytes are read.

It serves containers that have the same integers in a layout that no encoder writes: the engine then repacks the
encoded tensor, as it would repack one from a file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import cast
from ingot.core.numeric.stats import ErrorStats, measure
from ingot.core.runtime.parallel import default_workers
from ingot.model.bytesource import DerivedSource
from ingot.model.checkpoint import Checkpoint
from ingot.model.part import Part
from ingot.model.reading.view import derived
from ingot.model.tensor import Tensor
from ingot.views.common import Make, mapping, require_known

_BYTES_PER_WEIGHT = 16  # the values, in f32 too, the codes, the decoded values


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoders by tensor name, a text for each, and the errors of the tensors that were read."""

    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    errors: dict[str, ErrorStats] = field(default_factory=dict)


def encode(checkpoint: Checkpoint, encoding: Encoding) -> Checkpoint:
    """Return the checkpoint with some matrices encoded; such a view cannot be sent to another process."""
    require_known(checkpoint, encoding.encoders)
    if not encoding.encoders:
        return checkpoint

    cache = _PartCache(default_workers() + 2)

    def make(name: str) -> Make | None:
        return (lambda: _tensor(checkpoint[name], encoding, cache)) if name in encoding.encoders else None

    entries = [(name, make(name), name) for name in checkpoint]
    return derived(checkpoint, mapping(entries, checkpoint), encode, encoding, dict(encoding.texts))


class _PartCache:
    """The parts of the tensors that were encoded last: a reader that stores one part soon reads the others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def entry(self, name: str) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            self._entries.move_to_end(name)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
            return entry


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: Mapping[str, memoryview] | None = None


class _Work:
    """The encoding of one tensor, whose parts are computed together."""

    def __init__(self, tensor: Tensor, encoding: Encoding, cache: _PartCache) -> None:
        self.tensor = tensor
        self._encoding = encoding
        self._cache = cache

    def part(self, role: str) -> memoryview:
        entry = self._cache.entry(self.tensor.name)
        with entry.lock:
            if entry.parts is None:
                entry.parts = self._encode()
            return entry.parts[role]

    def _encode(self) -> Mapping[str, memoryview]:
        name = self.tensor.name
        encoder = self._encoding.encoders[name]
        rows = np.ascontiguousarray(self.tensor.numpy()).reshape(self.tensor.matrix_shape)
        for _ in range(encoder.fit_passes):
            encoder.fit_pass(rows)
        parts = encoder.encode(rows)
        decoded = np.empty(rows.shape, np.float32)
        encoder.decode(parts, decoded)
        self._encoding.errors[name] = measure(cast(rows, "f32"), decoded)
        return {role: np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for role, array in parts.items()}


def _tensor(tensor: Tensor, encoding: Encoding, cache: _PartCache) -> Tensor:
    encoder = encoding.encoders[tensor.name]
    work = _Work(tensor, encoding, cache)
    parts = {
        spec.role: Part(
            spec.dtype,
            int(spec.length or 0),
            _Bytes(work, spec.role, int(spec.length or 0)),
            type=spec.type,
            where=f"{tensor.name}: {spec.role}",
        )
        for spec in encoder.parts
    }
    return replace(
        tensor,
        codec=encoder.codec,
        parts=parts,
        params=dict(encoder.params),
        decoder=CODECS[encoder.codec],
        origin=None,
        decoded_from=tensor.decoded_from or tensor.codec,
        source_bits=tensor.stored_bits,
    )


class _Bytes(DerivedSource):
    """One part of an encoded tensor as a ``ByteSource``."""

    mapped = False

    def __init__(self, work: _Work, role: str, size: int) -> None:
        self._work = work
        self._role = role
        self.size = size
        self.name = work.tensor.name

    def view(self, offset: int, length: int) -> memoryview:
        return self._work.part(self._role)[offset : offset + length].toreadonly()

    def readinto(self, offset: int, out: memoryview) -> None:
        out.cast("B")[:] = self._work.part(self._role)[offset : offset + out.nbytes]

    def computing_bytes(self) -> int:
        """Return the memory that encoding takes."""
        return self._work.tensor.size * _BYTES_PER_WEIGHT

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._work.tensor.parts.values())

    def close(self) -> None:
        """Do nothing: the bytes that are read belong to the checkpoint."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("encoded matrices are computed where they are read")
