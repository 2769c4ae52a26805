"""Files in a folder that nobody else knows: for packages that read nothing but paths."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from weakref import finalize


class TemporaryFolder:
    """Text files in a temporary folder, which goes with this or when it is closed; ``paths`` by name."""

    def __init__(self, files: Mapping[str, str]) -> None:
        folder = tempfile.mkdtemp(prefix="ingot-")
        self._remove = finalize(self, rmtree, folder, ignore_errors=True)
        self.paths: dict[str, str] = {}
        for name, text in sorted(files.items()):
            path = Path(folder) / name
            path.write_bytes(text.encode())
            self.paths[name] = str(path)

    def close(self) -> None:
        """Remove the files."""
        self._remove()
