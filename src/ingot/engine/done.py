"""What is known of a step when it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.core.numeric.stats import ErrorStats
from ingot.engine.work import Step


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is written: its spec with what was learnt, bytes, sums of its error, what its chunks told."""

    step: Step
    nbytes: int
    error: ErrorStats
    notes: Mapping[str, Any]

    def digest(self, point: int) -> str | None:
        """Return the hex of the values that passed at ``point``; None where they were not hashed."""
        found: Mapping[str, str] = self.notes.get("digests", {})
        return found.get(str(point))
