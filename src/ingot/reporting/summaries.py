"""What reports say of the tensor that lost most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from ingot.reporting.report import Figure, Line


class Measured(Protocol):
    """A tensor of a report; ``error`` is what ``core.stats.ErrorStats.summary`` gave, None where nothing was lost."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> Mapping[str, float] | None: ...


T = TypeVar("T", bound=Measured)


def worst_of(tensors: Iterable[T]) -> T | None:
    """Return the tensor with the lowest signal-to-noise ratio."""
    lossy = [tensor for tensor in tensors if tensor.error]
    return min(lossy, key=lambda tensor: (tensor.error or {})["snr_db"], default=None)


def loss(tensors: Iterable[Measured], exact: str | None) -> tuple[list[Figure], Sequence[Line]]:
    """Return figures and lines on what was lost: ``exact`` words where nothing was, else the worst tensor if any."""
    if exact is not None:
        return [], [Line(exact, "exact")]
    worst = worst_of(tensors)
    return ([], ()) if worst is None or worst.error is None else (_figures(worst.name, worst.error), _LINES)


def _figures(name: str, error: Mapping[str, float]) -> list[Figure]:
    return [
        Figure("worst", name, data=False),
        Figure("snr", error["snr_db"], "number", data=False),
        Figure("rms", error["rms"], "number", data=False),
        Figure("max_abs", error["max_abs"], "number", data=False),
    ]


_LINES = (
    Line("worst tensor {worst}: SNR {snr} dB, RMS {rms}, max {max_abs}", "error"),
    Line("           (weight error is not quality: evaluate the model)"),
)
