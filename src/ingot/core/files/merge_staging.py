"""Staging of files that are added to an existing folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ingot.core.files.atomic import Staging
from ingot.core.files.system import flush, write_error
from ingot.errors import UsageError


class MergeStaging(Staging):
    """A ``Staging`` whose files are added to an existing folder; files with the same names are replaced.

    ``publish`` moves the files in the given order. Each file is flushed to disk before the next one appears, so that
    the last one can be a completion marker: if the process is killed before, readers ignore the other files. The
    staging folder is a hidden subfolder of the target.
    """

    def __init__(self, dst: str | os.PathLike[str], *, resume: bool = False) -> None:
        super().__init__(dst, directory=True, overwrite=True, resume=resume)

    def publish(self, names: Sequence[str]) -> Path:
        """Flush the named files, move them into the target in this order, and remove the staging folder."""
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
