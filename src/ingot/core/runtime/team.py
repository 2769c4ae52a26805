"""Whose threads do the work of products with packed weights."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from ingot.core.runtime import native


@cache
def share_team() -> bool:
    """Do that work by the threads of the OpenMP library that this process has loaded for all, from now on.

    OpenMP's threads look for work all the time for some milliseconds, and so leave no processor to threads of ours that
    come next. Returns whether there is such a library; without it the kernels keep threads of their own, as they do in
    a process that was forked, which has none of its parent's. On Linux only.
    """
    if not sys.platform.startswith("linux"):
        return False
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    address = ctypes.cast(entry, ctypes.c_void_p).value if entry else None
    native.kernels.share_team(address or 0)
    return address is not None
