"""The journal of a run: which tensors are complete in the staging folder, so that a killed run can go on.

One JSON line for the header (fingerprint of sources, plan and version), then one line per finished tensor. Lines
are appended after the tensor's bytes; a torn last line is ignored. Nothing is trusted: on resume every blob is checked
against its digest, which costs less than syncing the disk after each tensor would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import ingot
from ingot.core import checksums
from ingot.core.oserrors import write_error
from ingot.errors import FormatError, UsageError
from ingot.model.store import checked_name

CHUNK = 1 << 22


def fingerprint(identities: Sequence[Any], what: Mapping[str, Any]) -> str:
    """Return a digest of all that determines the output.

    ``identities`` are those of the sources: their files' headers and the stamps of the open files, so that what was
    read and what is noted are the same. ``what`` is the plan; Ingot's version is in the digest because another version
    may encode differently.
    """
    text = msgspec.json.encode({"ingot": ingot.__version__, "files": identities, "what": what}, order="sorted")
    return hashlib.sha256(text).hexdigest()


class Journal:
    """Append-only list of finished tensors beside the files being written."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._file: Any = None

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the header and the records that are taken over from an earlier run, then stay open for more."""
        lines = [{"fingerprint": self._fingerprint}, *records]
        try:
            self._path.write_bytes(b"".join(map(_line, lines)))
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise write_error(error, str(self._path)) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Note a finished tensor."""
        try:
            self._file.write(_line(record))
        except OSError as error:
            raise write_error(error, str(self._path)) from error

    def close(self) -> None:
        """Close the file; it stays where it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def earlier(self) -> list[dict[str, Any]]:
        """Return the records that an interrupted run left.

        Raises
        ------
        UsageError
            They are of another source, recipe, version or of other options.
        """
        if not self._path.exists():
            return []
        lines = list(_json_lines(self._path))
        if not lines or "fingerprint" not in lines[0]:
            return []
        if lines[0]["fingerprint"] != self._fingerprint:
            raise UsageError(
                "the interrupted run was of another source, recipe, option or Ingot version; "
                "run again without --resume to start anew",
                rule="resume.changed",
                where=str(self._path.parent),
            )
        return lines[1:]


def _line(record: Mapping[str, Any]) -> bytes:
    """Encode one line. The standard module: it keeps infinite errors, and file names that are not UTF-8."""
    return json.dumps(record).encode() + b"\n"


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not isinstance(value, dict):
            return
        yield value


def intact(record: Mapping[str, Any], folder: Path) -> bool:
    """Whether every blob of a record lies in ``folder`` with the bytes it had when it was written."""
    for name, offset, length, digest in record["blobs"]:
        running = checksums.hasher("crc32c")
        try:
            with (folder / checked_name(name, str(folder))).open("rb") as file:
                file.seek(offset)
                left = length
                while left:
                    chunk = file.read(min(CHUNK, left))
                    if not chunk:
                        return False
                    running.update(chunk)
                    left -= len(chunk)
        except (OSError, FormatError):
            return False
        if not checksums.same(running.text(), digest):
            return False
    return True
