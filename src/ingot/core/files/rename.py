"""Swapping two names in one step, which ``os.rename`` cannot."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# renameat2(2), linux/fs.h; renamex_np(2) of macOS, sys/stdio.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2


def exchange(first: Path, other: Path) -> bool:
    """Let two files or folders of one file system change names, in one step that nobody can see half of.

    False where the system or the file system cannot do that, or refused: nothing has changed then.
    """
    if sys.platform not in ("linux", "darwin"):  # Windows loads no library without a name either
        return False
    library: Any = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(first), os.fsencode(other)
    done: int | None = None
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        done = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE))
    elif sys.platform == "darwin" and hasattr(library, "renamex_np"):
        done = library.renamex_np(*paths, ctypes.c_uint(_RENAME_SWAP))
    return done == 0
