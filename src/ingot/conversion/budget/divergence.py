"""How far the model that a recipe makes is from its source, measured, and the search for one that keeps to a limit.

The estimate orders recipes and says by how much they differ; what it says in nats is made true by measuring some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from typing import Any, NamedTuple, Protocol

from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.destination import destination
from ingot.conversion.options import ConvertOptions
from ingot.core.files.allocation import Allocation, allocate
from ingot.core.registry import Registry
from ingot.core.runtime.bootstrap import Interval
from ingot.stores.location import Location
from ingot.stores.temporary import temporary_folder

STEPS = 6
"""The most recipes that are measured for one limit."""

# Which share of the limit solutions aim at, and from which on one needs no better.
_AIM = 0.97
_CLOSE = 0.92
# What a next solution's estimate is at least and at most of the one before: far from the limit nothing is a line.
_FARTHEST = 16.0
# After each recipe in a row that is above the limit the next one aims so much lower.
_LOWER = 0.8

# Who runs models lies above this room.
_DIVERGENCE: Registry[Any] = Registry("divergence", (("model", "ingot.runtime.evaluation.divergence:Divergence"),))


class Kl(NamedTuple):
    """Mean KL(source || result) in nats a token, and the interval of 95 % over windows drawn again, if any."""

    mean: float
    interval: Interval | None = None


class Divergence(Protocol):
    """Measures models against one source, on windows that stay the same; ``over`` says on which."""

    @property
    def over(self) -> str: ...

    def __call__(self, path: str, *, alone: bool) -> Kl:
        """Return the divergence of the model at ``path``; ``alone``: a file without config.json beside it."""


class Trial:
    """Measures what options make of a model: the result is written into a temporary folder, which goes again.

    Raises
    ------
    UnsupportedError
        ``generate.no-head``: the source is no language model.
    IngotError
        As ``ingot.evaluate`` of the source.
    """

    def __init__(self, options: ConvertOptions, convert: Callable[[ConvertOptions], object]) -> None:
        self._convert = convert
        self._place = destination(Location.parse(options.dst), options.format, options.container)
        self._measured: Divergence = _DIVERGENCE["model"](
            options.src, options.text, options.sequences, progress=options.progress
        )
        self.over = self._measured.over

    def __call__(self, options: ConvertOptions) -> Kl:
        """Return the divergence of the result; errors as ``convert`` and ``load_model``."""
        name = self._place.location.name
        inside = self._place.directory
        with temporary_folder() as folder:
            path = f"{folder}/{name}{'/' if inside else ''}"
            trial = replace(options, dst=path, overlay=None, measure=False, overwrite=False, resume=False)
            self._convert(trial)
            return self._measured(path, alone=not inside and not has_model_metadata(self._place.format.name))


@dataclass(frozen=True, slots=True)
class Step:
    """A recipe that was measured: its loss by the estimate is ``allocation.cost``."""

    allocation: Allocation
    kl: Kl

    @property
    def loss(self) -> float:
        """The estimate."""
        return self.allocation.cost

    def holds(self, limit: float) -> bool:
        """Whether the divergence is at most the limit."""
        return self.kl.mean <= limit  # NaN does not


def search(
    limit: float, solve: Callable[[float], Allocation], measure: Callable[[Allocation], Kl]
) -> tuple[Step | None, list[Step]]:
    """Look for the smallest allocation whose divergence is at most ``limit``.

    The estimate is taken at its word once; then a bound of the estimate follows from what was measured: by a factor,
    between two on either side of the limit by a line through their logarithms. The last of ``STEPS`` is the most exact
    allocation there is, where none before kept to the limit.

    Parameters
    ----------
    limit : float
        Nats a token.
    solve : callable
        Returns the smallest allocation whose estimated loss is at most a bound; there is one for 0.
    measure : callable

    Returns
    -------
    The smallest that keeps to the limit, None if none does, and all that were measured, in order.
    """
    steps: list[Step] = []
    held: Step | None = None
    bound = limit
    while len(steps) < STEPS:
        found = solve(bound)
        if any(found.picks == step.allocation.picks for step in steps):
            break
        steps.append(Step(found, measure(found)))
        if steps[-1].holds(limit) and (held is None or found.size < held.allocation.size):
            held = steps[-1]
        if (held is None and found.cost <= 0) or (held is not None and held.kl.mean >= _CLOSE * limit):
            break
        bound = _next(limit, steps, held)
    return held, steps


def _next(limit: float, steps: list[Step], held: Step | None) -> float:
    """Return the estimate to allow next."""
    above = [step for step in steps if not step.holds(limit)]
    if held is None:
        if len(steps) == STEPS - 1:
            return 0.0
        return min(step.loss for step in above) * _factor(limit, steps[-1]) * _LOWER ** (len(steps) - 1)
    failed = min((step for step in above if step.loss > held.loss), key=lambda step: step.loss, default=None)
    if failed is None:
        return held.loss * _factor(limit, held) if held.loss > 0 else limit
    if not (held.loss > 0 and held.kl.mean > 0 and isfinite(failed.kl.mean)):
        return (held.loss + failed.loss) / 2
    slope = log(failed.loss / held.loss) / log(failed.kl.mean / held.kl.mean)
    wanted = held.loss * exp(slope * log(_AIM * limit / held.kl.mean))
    return min(wanted, failed.loss * _AIM)


def _factor(limit: float, step: Step) -> float:
    """Return by what the estimate's bound changes: by as much as the divergence has to, a little lower."""
    kl = step.kl.mean
    if not isfinite(kl):
        return 1 / _FARTHEST
    return min(max(_AIM * limit / max(kl, 1e-300), 1 / _FARTHEST), _FARTHEST)


def smallest(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], most: float) -> Allocation:
    """Return the allocation of fewest bytes whose estimated loss is at most ``most``: of those the one of least loss.

    A loss of 0 has to be among the ways of each thing.
    """
    found = allocate(sizes, costs, most)
    assert found is not None
    better = allocate(costs, sizes, found.cost)
    assert better is not None
    return better if better.cost <= found.size else Allocation(found.picks, found.size, found.cost, better.bound)
