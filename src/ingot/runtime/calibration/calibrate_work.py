"""Files of a calibration in progress: activations between layers, and statistics of finished layers.

A journal records for each step the files that it created, with digests, and the files that later steps do not need. If
all expected files have these digests, a later run resumes after the last step; otherwise it starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, BinaryIO

import numpy as np

from ingot.core.bytes import checksums
from ingot.engine.journal import Journal, is_intact
from ingot.model.tensor import Array
from ingot.stores.local import LocalStore, LocalTarget


class Work:
    """The files of a calibration in one folder, and their journal.

    Parameters
    ----------
    files : str
        An existing folder that contains no other files.
    journal : Journal, optional
        The record that a later run resumes from.
    resume : bool
        Whether to resume an earlier run; the attribute ``resumed`` is the number of its finished steps.

    Raises
    ------
    UsageError
        ``resume.changed``: the earlier run had another input.
    """

    def __init__(self, files: str, journal: Journal | None = None, *, resume: bool = False) -> None:
        self._files = files
        self._target = LocalTarget(files)
        self._journal = journal
        self._live: dict[str, tuple[int, str]] = {}
        self._done: dict[str, Mapping[str, Any]] = {}
        if journal is not None:
            records = journal.earlier() if resume else []
            if not self._restore(records):
                records = []
                self._live = {}
                self._done = {}
            journal.start(records)
        self._truncate()
        self.resumed = len(self._done)

    def finished(self, step: str) -> Mapping[str, Any] | None:
        """Return the record of a finished step; None if it is not finished."""
        return self._done.get(step)

    def finish(self, step: str, writers: Iterable[Writer] = (), drop: Iterable[str] = (), **values: Any) -> None:
        """Record a step as finished with the files that it created; delete the files that later steps do not need."""
        blobs = [writer.end() for writer in writers]
        record = {"step": step, "blobs": blobs, "drop": [*drop], **values}
        if self._journal is not None:
            self._target.flush([str(blob[0]) for blob in blobs])
            self._journal.append(record)
        self._apply(record)
        self._truncate()

    def writer(self, name: str) -> Writer:
        """Return a writer for a new file."""
        return Writer(self._target, name)

    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file in the folder."""
        sink = self._target.create("scratch")
        try:
            return sink.scratch()
        finally:
            sink.close()

    def read(self, name: str, offset: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Read values of a file into a new array of ``shape``."""
        out = np.empty(shape, dtype)
        source = LocalStore(self._files, "pread").open(name)
        try:
            source.readinto(offset, out.reshape(-1).view(np.uint8).data)
        finally:
            source.close()
        return out

    def arrays(self, name: str, index: Iterable[tuple[str, str, list[int], int]]) -> dict[str, Array]:
        """Return the arrays of a file, mapped without allocating memory; ``index`` is ``Writer.index``."""
        source = LocalStore(self._files, "mmap").open(name)
        arrays = {}
        for key, dtype, shape, offset in index:
            item_dtype = np.dtype(dtype)
            arrays[key] = np.frombuffer(source.view(offset, prod(shape) * item_dtype.itemsize), item_dtype).reshape(
                shape
            )
        return arrays

    def _restore(self, records: list[dict[str, Any]]) -> bool:
        for record in records:
            self._apply(record)
        blobs = [[name, 0, *size_and_digest] for name, size_and_digest in self._live.items()]
        return is_intact({"blobs": blobs}, self._target.store())

    def _apply(self, record: Mapping[str, Any]) -> None:
        self._done[record["step"]] = record
        self._live |= {name: (size, digest) for name, _, size, digest in record["blobs"]}
        for name in record["drop"]:
            self._live.pop(name, None)

    def _truncate(self) -> None:
        self._target.cut({name: size for name, (size, _) in self._live.items()})


class Writer:
    """A writer that appends arrays to a file."""

    def __init__(self, target: LocalTarget, name: str) -> None:
        self._name = name
        self._sink = target.create(name)
        self._size = 0
        self._sink.truncate(0)
        self._digest = checksums.hasher("crc32c")
        self.index: list[tuple[str, str, list[int], int]] = []

    def add(self, array: Array, key: str = "") -> None:
        """Append an array to the file, and record it in ``index`` under ``key``."""
        values = np.ascontiguousarray(array)
        data = values.reshape(-1).view(np.uint8).data
        self._sink.write_at(self._size, data)
        self._digest.update(data)
        self.index.append((key, values.dtype.str, [*array.shape], self._size))
        self._size += data.nbytes

    def end(self) -> tuple[str, int, int, str]:
        """Close the file; return its name, offset 0, size and digest."""
        self._sink.close()
        return self._name, 0, self._size, self._digest.text()
