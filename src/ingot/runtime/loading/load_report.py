"""What loading a model took: seconds without imports, memory, and which stored form was read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ingot.core.runtime.memory import anonymous_rss, resident
from ingot.model.stacks import Dispatch
from ingot.reporting.report import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What ``load_model`` did.

    ``format`` is that of the files that were read; ``tier`` and ``why`` say which stored form was chosen and what for;
    ``dtype`` is a canonical name; ``seconds`` from the path to the complete model, without ``imports``: those of the
    runtime and of the architecture's module. ``mapped``, ``decoded`` and
    ``packed`` are the bytes that stay in mapped files, were decoded into memory, and stay packed; ``streamed`` those
    that every pass decodes, of which at most ``window`` are in memory at a time. ``dispatch`` is the
    stack that was taken of those that a ``.squizd`` holds, why, and why not those before it; None for other formats.

    ``ram_before`` is the process's resident set once the runtime was imported, ``ram_delta`` by how much that grew
    until the model was complete, touched pages of mapped files included, ``memory_delta`` the same without these.
    """

    path: str
    format: str
    tier: str
    why: str
    model: str
    dtype: str
    device: str
    seconds: Seconds
    mapped: int
    decoded: int
    packed: int
    streamed: int = 0
    window: int = 0
    dispatch: Dispatch | None = None
    imports: Seconds = 0.0
    ram_before: Bytes = 0
    ram_delta: int = 0
    memory_delta: int = 0


class Meter:
    """Measures one load: begins when it is made; imports are taken off, and memory counts from the last of them."""

    def __init__(self) -> None:
        self._began, self._imports = time.perf_counter(), 0.0
        self._resident = self._anonymous = 0
        self._read()

    def _read(self) -> None:
        self._resident, self._anonymous = resident(), anonymous_rss()

    @contextmanager
    def importing(self) -> Iterator[None]:
        """What happens within is an import."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._imports += time.perf_counter() - began
            self._read()

    def taken(self) -> dict[str, Any]:
        """Return the figures of a ``LoadReport`` that are measured."""
        return {
            "seconds": time.perf_counter() - self._began - self._imports,
            "imports": self._imports,
            "ram_before": self._resident,
            "ram_delta": resident() - self._resident,
            "memory_delta": anonymous_rss() - self._anonymous,
        }
