"""What a diff by statistics will take: rounding matrices is slow, and is told before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.model.layouts.trellis import TrellisLayout
from ingot.ops.delta.strategy import Storage

_TRELLIS, _OTHERS = 10e-6, 3e-6  # seconds a weight, on one thread of the machine that the spec's figures are of


@dataclass(frozen=True, slots=True)
class DiffPlan:
    """Matrices that will be rounded by what they multiply, their weights, and about how many seconds that takes."""

    matrices: int
    weights: int
    seconds: float

    def told(self) -> str:
        """Return it in words."""
        hours, minutes = divmod(int(self.seconds / 60 + 0.5), 60)
        long = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else "less than a minute"
        return (
            f"{self.matrices} tensors, {self.weights / 1e6:.1f} million weights, are rounded by what they multiply: "
            f"about {long}"
        )


def expected(rounded: Sequence[tuple[int, Storage]], workers: int) -> DiffPlan:
    """Return what tensors of so many weights will take on some threads; no sooner than the largest of them."""
    each = [size * (_TRELLIS if way.codec == TrellisLayout.codec else _OTHERS) for size, way in rounded]
    seconds = max(sum(each) / max(min(workers, len(each)), 1), max(each, default=0.0))
    return DiffPlan(len(each), sum(size for size, _ in rounded), seconds)
