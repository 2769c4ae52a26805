"""Records of complete runs with ``--resume``. If the same command runs again, the record shows that its result is
complete.

A record is a hidden file beside the result. It contains a digest of Ingot's version, of the command's values, and of
the sizes and times of files. These are all files below the paths that the values name: sources and results. If one of
these changes, the record is invalid. There is no record if a value names weights that are not local files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.errors import INGOT_VERSION

_MAX_FILES = 100_000
OUTPUTS = ("out", "dst")
_ANY_PATH = re.compile(r"[/\\:]")


class RunRecord:
    """The record of a command with its values. An earlier run may have written it.

    Parameters
    ----------
    command : str
    values : mapping of str to object
        The values of all parameters as the user wrote them.
    """

    def __init__(self, command: str, values: Mapping[str, Any]) -> None:
        self._settings = {name: value for name, value in values.items() if name not in ("json", "quiet")}
        self._command = command
        names = (values.get(name) for name in OUTPUTS)
        self.output = next((str(name) for name in names if name), "")
        self._paths = _paths(_texts(values.values()))
        self._before = {path: _stamp_of(path) for path in (self.output, *(self._paths or ()))}

    @property
    def _file(self) -> Path:
        path = Path(self.output).absolute()
        return path.with_name(f".{path.name}.ingot-finished")

    def is_complete(self) -> bool:
        """Return whether an earlier run of the same command has written the result, and no file changed since."""
        if self._before[self.output] is None or self._paths is None:
            return False
        try:
            recorded = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(recorded, dict) and recorded.get("digest") == self._digest()

    def write(self) -> None:
        """Write the record if this run has written the result, and no source changed meanwhile.

        There is no record if its folder cannot be written.
        """
        before = dict(self._before)
        is_written = _stamp_of(self.output) not in (None, before.pop(self.output))
        if self._paths is None or not is_written or any(_stamp_of(path) != before[path] for path in before):
            return
        self._paths = _paths(_texts(self._settings.values()))
        digest = self._digest()
        if digest is None:
            return
        temporary = self._file.with_name(f"{self._file.name}-{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"digest": digest}), "utf-8")
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _digest(self) -> str | None:
        """Return the digest of the command and the files; None if there are too many files, or a file cannot be
        read.
        """
        stamps = [_stamp_of(path) for path in self._paths or ()]
        if None in stamps:
            return None
        content = [INGOT_VERSION, self._command, sorted(self._settings.items()), stamps]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def _stamp_of(path: str) -> str | None:
    """Return a digest of the sizes and times of all files below ``path``.

    Returns None if there is no such path, if it has too many files, or if a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for index, (name, stat) in enumerate(_files(Path(path)) if path else ()):
            if index == _MAX_FILES:
                return None
            digest.update(f"{name!r} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    except OSError:
        return None
    return digest.hexdigest() if _exists(path) else None


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    if not path.is_dir():
        yield "", path.stat()
        return
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            yield file.relative_to(path).as_posix(), file.stat()


def _raise(error: OSError) -> None:
    raise error


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple | list):
            yield from _texts(value)


def _paths(texts: Iterable[str]) -> list[str] | None:
    """Return the local paths in texts; None if a text may name a remote model, whose changes cannot be detected.

    A text is a path, a list of paths with commas, or a path followed by a colon and a weight.
    """
    paths: list[str] = []
    for text in texts:
        items = [text] if _exists(text) else text.split(",")
        for item in items:
            candidates = (item, item.rpartition(":")[0])
            existing = [path for path in candidates if _exists(path)]
            if not existing and _ANY_PATH.search(item) and not _is_new(item):
                return None
            paths += existing[:1]
    return paths


def _is_new(text: str) -> bool:
    """Return whether a text is the path of a local file that a run may create."""
    return ":" not in text and _exists(str(Path(text).absolute().parent))


def _exists(text: str) -> bool:
    """Return whether a text is the path of an existing file or folder; false for a text that cannot be a path."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False
