"""A pause of the cyclic garbage collector while many small objects without cycles are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch automatic collection off for the time of the block, and on again if it was on.

    A manifest of 10,000 tensors makes 100,000 containers; the collector would walk them again and again for nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
