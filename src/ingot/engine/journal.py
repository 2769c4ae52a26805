"""The journal of a run: the list of complete tensors in the staging folder, from which a killed run can be resumed.

The first JSON line is the header: a fingerprint of sources, plan and version. Each further line describes a complete
tensor and is appended after its bytes. An incomplete last line is ignored. On resume the digest of every blob is
checked, which is cheaper than syncing the disk after each tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ingot.core.bytes import checksums
from ingot.core.files.atomic import JOURNAL
from ingot.errors import INGOT_VERSION, IngotError, UsageError
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Store
from ingot.stores.local import LocalSink, LocalTarget

CHUNK = 1 << 22
# Bytes of tensors that a resumed run may have to write again.
_MAX_REPEATED = 1 << 20
_LINE_BUFFER = 1 << 12  # bytes of lines that are written in one call
_ENCODER = msgspec.json.Encoder()
_NO_NOTES: dict[str, Any] = {"digests": {}}


def fingerprint(identities: Sequence[Any], settings: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of everything that determines the output.

    ``identities`` identify the open files of the sources by headers and stamps. ``settings`` and ``steps`` describe the
    plan. The digest also covers Ingot's version, because other versions may encode differently.
    """
    encode = msgspec.json.Encoder(order="sorted").encode
    digest = hashlib.sha256(encode({"ingot": INGOT_VERSION, "files": identities, "what": settings}))
    for step in steps:
        digest.update(encode(step))
    return digest.hexdigest()


class Journal:
    """An append-only list of complete tensors: a file in ``target``, the staging folder."""

    def __init__(self, target: LocalTarget, fingerprint: str) -> None:
        self._target = target
        self._fingerprint = fingerprint
        self._sink: LocalSink | None = None
        self._end = 0
        self._waiting = 0  # bytes of tensors whose lines may not be in the file yet
        self._lines = bytearray()  # lines that are not written to the sink yet

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the header and the records of an earlier run; the journal stays open for further records."""
        lines = [{"fingerprint": self._fingerprint}, *records]
        self._sink = self._target.create(JOURNAL)
        self._end = 0
        self._sink.truncate(0)
        self._lines = bytearray().join(map(_line, lines))
        self._hand_over()
        self._sink.flush()

    def append(self, record: Mapping[str, Any], nbytes: int = _MAX_REPEATED) -> None:
        """Add the record of a complete tensor of ``nbytes`` bytes. Lines of small tensors are written together."""
        self._lines += _line(record)
        self._waiting += nbytes
        if self._waiting >= _MAX_REPEATED or len(self._lines) >= _LINE_BUFFER:
            self._hand_over()
            if self._waiting >= _MAX_REPEATED and self._sink is not None:
                self._sink.flush()
                self._waiting = 0

    def _hand_over(self) -> None:
        """Write pending lines to the file. If an error occurs, they stay pending, and ``close`` tries again."""
        assert self._sink is not None
        lines = self._lines
        self._sink.write_at(self._end, lines)
        self._end = self._end + len(lines)
        self._lines = bytearray()

    def close(self) -> None:
        """Write pending lines and close the file."""
        if self._sink is not None:
            try:
                self._hand_over()
            finally:
                self._sink.close()
                self._sink = None

    def earlier(self) -> list[dict[str, Any]]:
        """Return the records of an interrupted run; the list is empty if the folder has no valid journal.

        Raises
        ------
        UsageError
            ``resume.changed``: sources, options, recipe or version of Ingot differ from those of the interrupted run.
        """
        store = self._target.store()
        if not store.exists(JOURNAL):
            return []
        lines = list(_json_lines(_content(store)))
        if not lines or "fingerprint" not in lines[0]:
            return []
        if lines[0]["fingerprint"] != self._fingerprint:
            raise UsageError(
                "the interrupted run was of another source, recipe, option or Ingot version; "
                "run again without --resume to start anew",
                rule="resume.changed",
                where=store.location,
            )
        return lines[1:]


def _line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON.

    msgspec is faster; ``json`` also supports infinite errors and file names that are not UTF-8.
    """
    if not record.get("error") and not record.get("params") and record.get("notes", _NO_NOTES) == _NO_NOTES:
        try:
            return _ENCODER.encode(record) + b"\n"
        except UnicodeEncodeError:
            pass
    return json.dumps(record).encode() + b"\n"


def _content(store: Store) -> bytes:
    source = store.open(JOURNAL)
    try:
        return read_bytes(source, 0, source.size)
    finally:
        source.close()


def _json_lines(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not isinstance(value, dict):
            return
        yield value


def is_intact(record: Mapping[str, Any], store: Store) -> bool:
    """Return whether every blob of a record is in the store with the digest that it had when it was written."""
    try:
        return all(_digest(store, name, offset, length, digest) for name, offset, length, digest in record["blobs"])
    except IngotError:
        return False


def _digest(store: Store, name: str, offset: int, length: int, digest: str) -> bool:
    """Return whether the CRC-32C of ``length`` bytes at ``offset`` of a file is ``digest``.

    Raises the errors of reading.
    """
    running = checksums.hasher("crc32c")
    buffer = memoryview(bytearray(min(CHUNK, length)))
    source = store.open(name)
    try:
        for start in range(0, length, CHUNK):
            chunk = buffer[: min(CHUNK, length - start)]
            source.readinto(offset + start, chunk)
            running.update(chunk)
    finally:
        source.close()
    return checksums.same(running.text(), digest)
