"""Publishing into a folder that stays: files join those that are there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ingot.core.files.atomic import Staging
from ingot.core.files.system import flush, write_error
from ingot.errors import UsageError


class Joining(Staging):
    """A place to write files that join those of an existing folder, where files of their names are replaced.

    They appear one after the other, in the order in which they are named, each complete and all before it on disk. So
    the last can be a sentinel that makes the others count: whoever is killed before leaves files that do not. The
    staging folder lies in the folder itself, hidden.
    """

    def __init__(self, dst: str | os.PathLike[str], *, resume: bool = False) -> None:
        super().__init__(dst, directory=True, overwrite=True, resume=resume)

    def publish(self, names: Sequence[str]) -> Path:
        """Flush the named files, move them into their folders in this order, remove the staging folder."""
        self._require_open()
        try:
            self._flush(names)
            for name, after in zip(names, (*names[1:], ""), strict=True):
                target = self.dst / name
                (self.files / name).replace(target)
                if after and (target.parent == self.dst or (self.dst / after).parent != target.parent):
                    flush(target.parent)
        except OSError as error:
            raise write_error(error, str(self.dst)) from error
        self._committed(*((self.dst / names[-1]).parent for _ in names[-1:]))
        return self.dst

    def _staged_in(self) -> Path:
        return self.dst

    def _check_target(self) -> None:
        if not self.dst.is_dir():
            raise UsageError("expected an existing folder", rule="target.not-a-folder", where=str(self.dst))
