"""The report on loading a model: seconds without imports, memory, and the stored variant that was read."""

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
    """The report of ``load_model``.

    ``format`` is the format of the files. ``tier`` and ``why`` name the stored variant that was chosen and the reason.
    ``dtype`` is a canonical name. ``seconds`` is the time of loading without imports. ``imports`` is the time to import
    the runtime and the architecture's module. ``mapped``, ``decoded`` and ``packed`` are the numbers of bytes that stay
    in mapped files, were decoded into memory, and stay packed. ``streamed`` is the number of bytes that every pass
    decodes; at most ``window`` of these bytes are in memory at a time. ``dispatch`` describes the stack that was chosen
    from a ``.squizd`` file, and why stacks before it were rejected. It is None for other formats.

    ``ram_before`` is the resident set of the process after the imports. ``ram_delta`` is its growth until the model was
    complete, including pages of mapped files that were read. ``memory_delta`` is the growth without these pages.
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
    """Measures the seconds and the memory of one load, without imports. The measurement starts with the constructor.

    Growth of memory is measured from the end of the last import on.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._imports = 0.0
        self._resident = self._anonymous = 0
        self._read()

    def _read(self) -> None:
        self._resident, self._anonymous = resident(), anonymous_rss()

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Count the time in this context as an import."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._imports += time.perf_counter() - began
            self._read()

    def measured(self) -> dict[str, Any]:
        """Return the fields of a ``LoadReport`` that this object measures."""
        return {
            "seconds": time.perf_counter() - self._began - self._imports,
            "imports": self._imports,
            "ram_before": self._resident,
            "ram_delta": resident() - self._resident,
            "memory_delta": anonymous_rss() - self._anonymous,
        }
