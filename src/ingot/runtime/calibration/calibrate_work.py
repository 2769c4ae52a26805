"""Files of a calibration under way: activations between layers, and statistics of layers that are done.

Each step notes in a journal which files it made, with their digests, and which it was the last to need. A later run
goes on behind the last step if all files that should be there have these digests, else it begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, BinaryIO

import numpy as np

from ingot.core.bytes import checksums
from ingot.engine.journal import Journal, intact
from ingot.model.tensor import Array
from ingot.stores.local import LocalStore, LocalTarget


class Work:
    """Files in one folder.

    Parameters
    ----------
    files : str
        An existing folder, which is this one's own.
    journal : Journal, optional
        What is noted for a later run.
    resume : bool
        Go on where an earlier run ended; ``resumed`` is then the number of its steps.

    Raises
    ------
    UsageError
        ``resume.changed``: the earlier run was another.
    """

    def __init__(self, files: str, journal: Journal | None = None, *, resume: bool = False) -> None:
        self._files, self._target, self._journal = files, LocalTarget(files), journal
        self._live: dict[str, tuple[int, str]] = {}
        self._done: dict[str, Mapping[str, Any]] = {}
        if journal is not None:
            records = journal.earlier() if resume else []
            if not self._take_over(records):
                records, self._live, self._done = [], {}, {}
            journal.start(records)
        self._cut()
        self.resumed = len(self._done)

    def found(self, step: str) -> Mapping[str, Any] | None:
        """Return what was noted of a finished step beside its files."""
        return self._done.get(step)

    def finish(self, step: str, made: Iterable[Writer] = (), drop: Iterable[str] = (), **more: Any) -> None:
        """Note a step with the files that it made, and remove those that nobody will need again."""
        blobs = [writer.end() for writer in made]
        record = {"step": step, "blobs": blobs, "drop": [*drop], **more}
        if self._journal is not None:
            self._target.flush([str(blob[0]) for blob in blobs])
            self._journal.append(record)
        self._take(record)
        self._cut()

    def writer(self, name: str) -> Writer:
        """Return what a file is written with, from its beginning."""
        return Writer(self._target, name)

    def scratch(self) -> BinaryIO:
        """Return a temporary file without a name, in the same folder."""
        sink = self._target.create("scratch")
        try:
            return sink.scratch()
        finally:
            sink.close()

    def read(self, name: str, offset: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return values of a file in memory of their own."""
        out = np.empty(shape, dtype)
        source = LocalStore(self._files, "pread").open(name)
        try:
            source.readinto(offset, out.reshape(-1).view(np.uint8).data)
        finally:
            source.close()
        return out

    def arrays(self, name: str, index: Iterable[tuple[str, str, list[int], int]]) -> dict[str, Array]:
        """Return arrays of a mapped file by the index that ``Writer.add`` made, without taking memory."""
        source = LocalStore(self._files, "mmap").open(name)
        found = {}
        for key, dtype, shape, offset in index:
            kind = np.dtype(dtype)
            found[key] = np.frombuffer(source.view(offset, prod(shape) * kind.itemsize), kind).reshape(shape)
        return found

    def _take_over(self, records: list[dict[str, Any]]) -> bool:
        for record in records:
            self._take(record)
        blobs = [[name, 0, *known] for name, known in self._live.items()]
        return intact({"blobs": blobs}, self._target.store())

    def _take(self, record: Mapping[str, Any]) -> None:
        self._done[record["step"]] = record
        self._live |= {name: (size, digest) for name, _, size, digest in record["blobs"]}
        for name in record["drop"]:
            self._live.pop(name, None)

    def _cut(self) -> None:
        self._target.cut({name: size for name, (size, _) in self._live.items()})


class Writer:
    """One file, written from its beginning to its end."""

    def __init__(self, target: LocalTarget, name: str) -> None:
        self._name, self._sink, self._size = name, target.create(name), 0
        self._sink.truncate(0)
        self._digest = checksums.hasher("crc32c")
        self.index: list[tuple[str, str, list[int], int]] = []

    def add(self, array: Array, key: str = "") -> None:
        """Write an array behind what is there, and note it in ``index`` under ``key``."""
        values = np.ascontiguousarray(array)
        data = values.reshape(-1).view(np.uint8).data
        self._sink.write_at(self._size, data)
        self._digest.update(data)
        self.index.append((key, values.dtype.str, [*array.shape], self._size))
        self._size += data.nbytes

    def end(self) -> tuple[str, int, int, str]:
        """Close the file; return its name, offset, size and digest."""
        self._sink.close()
        return self._name, 0, self._size, self._digest.text()
