"""Files as memory, without a descriptor of their own: the system keeps a mapped file open by itself."""

from __future__ import annotations

import mmap

from ingot.core.runtime import native


def map_file(descriptor: int, offset: int, length: int, *, writable: bool = False) -> memoryview:
    """Map ``length`` bytes at ``offset`` of an open file, which may be closed afterwards.

    Parameters
    ----------
    descriptor, offset, length : int
        The range lies inside the file.
    writable : bool
        Copy-on-write memory (``MAP_PRIVATE``): what is written there neither reaches the file nor another mapping.

    Returns
    -------
    memoryview
        Unmapped when its last view is gone.

    Raises
    ------
    OSError
        The system cannot map this file, or has too many mappings.
    """
    if not length:  # an empty mapping does not exist
        return memoryview(bytearray() if writable else b"")
    before = offset % mmap.ALLOCATIONGRANULARITY
    pages = native.kernels.map_file(descriptor, offset - before, before + length, writable)
    return pages.data[before:]
