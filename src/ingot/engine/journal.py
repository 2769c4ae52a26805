"""The journal of a run: which tensors are complete in the staging folder, so that a killed run can go on.

One JSON line for the header (fingerprint of sources, plan and version), then one line per finished tensor. Lines
are appended after the tensor's bytes; a torn last line is ignored. Nothing is trusted: on resume every blob is checked
against its digest, which costs less than syncing the disk after each tensor would.
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
# Bytes of tensors that a killed run may have to do again.
_WORTH = 1 << 20
_TOGETHER = 1 << 12  # bytes of lines that are written in one call
_ENCODER = msgspec.json.Encoder()
_NOTHING: dict[str, Any] = {"digests": {}}


def fingerprint(identities: Sequence[Any], what: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of all that determines the output.

    ``identities`` are those of the sources: their files' headers and the stamps of the open files, so that what was
    read and what is noted are the same. ``what`` and ``steps`` are the plan; Ingot's version is in the digest because
    another version may encode differently.
    """
    encode = msgspec.json.Encoder(order="sorted").encode
    digest = hashlib.sha256(encode({"ingot": INGOT_VERSION, "files": identities, "what": what}))
    for step in steps:
        digest.update(encode(step))
    return digest.hexdigest()


class Journal:
    """Append-only list of finished tensors, a file of ``target``."""

    def __init__(self, target: LocalTarget, fingerprint: str) -> None:
        self._target = target
        self._fingerprint = fingerprint
        self._sink: LocalSink | None = None
        self._end = 0
        self._waiting = 0  # bytes of tensors whose lines may not be in the file yet
        self._lines = bytearray()  # those of them that were not given to the sink

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the header and the records that are taken over from an earlier run, then stay open for more."""
        lines = [{"fingerprint": self._fingerprint}, *records]
        self._sink = self._target.create(JOURNAL)
        self._end = 0
        self._sink.truncate(0)
        self._lines = bytearray().join(map(_line, lines))
        self._hand_over()
        self._sink.flush()

    def append(self, record: Mapping[str, Any], nbytes: int = _WORTH) -> None:
        """Note a finished tensor of so many bytes; lines of small ones reach the file together."""
        self._lines += _line(record)
        self._waiting += nbytes
        if self._waiting >= _WORTH or len(self._lines) >= _TOGETHER:
            self._hand_over()
            if self._waiting >= _WORTH and self._sink is not None:
                self._sink.flush()
                self._waiting = 0

    def _hand_over(self) -> None:
        """Write what waits: kept until it is written, as ``close`` comes after whatever stopped a run."""
        assert self._sink is not None
        lines = self._lines
        self._sink.write_at(self._end, lines)
        self._end = self._end + len(lines)
        self._lines = bytearray()

    def close(self) -> None:
        """Close the file; it stays where it is."""
        if self._sink is not None:
            try:
                self._hand_over()
            finally:
                self._sink.close()
                self._sink = None

    def earlier(self) -> list[dict[str, Any]]:
        """Return the records that an interrupted run left.

        Raises
        ------
        UsageError
            They are of another source, recipe, version or of other options.
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
    """Encode one line. The standard module keeps infinite errors, and file names that are not UTF-8; the quick one is
    for records without numbers that may be infinite."""
    if not record.get("error") and not record.get("params") and record.get("notes", _NOTHING) == _NOTHING:
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


def intact(record: Mapping[str, Any], store: Store) -> bool:
    """Whether every blob of a record lies in the store with the bytes it had when it was written."""
    try:
        return all(_digest(store, name, offset, length, digest) for name, offset, length, digest in record["blobs"])
    except IngotError:
        return False


def _digest(store: Store, name: str, offset: int, length: int, digest: str) -> bool:
    """Whether a range of a file has this digest; errors as ``Store.open`` and ``ByteSource.readinto``."""
    running = checksums.hasher("crc32c")
    buffer = memoryview(bytearray(min(CHUNK, length)))
    source = store.open(name)
    try:
        for start in range(0, length, CHUNK):
            piece = buffer[: min(CHUNK, length - start)]
            source.readinto(offset + start, piece)
            running.update(piece)
    finally:
        source.close()
    return checksums.same(running.text(), digest)
