"""Measurement of the divergence of a converted model from its source, and search of a recipe below a limit.

The estimated loss puts recipes into an order, but its absolute value is inaccurate. The divergence of a few recipes is
measured, and relates the estimate to nats per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from typing import Any, NamedTuple, Protocol

from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.destination import destination
from ingot.conversion.options import ConvertOptions
from ingot.core.numeric.knapsack import Allocation, allocate
from ingot.core.registry import Registry
from ingot.core.runtime.bootstrap import Interval
from ingot.stores.location import Location
from ingot.stores.temporary import temporary_folder

STEPS = 6
"""The maximum number of recipes that are measured for one limit."""

# Solutions aim at the first share of the limit; above the second share, a solution is good enough.
_AIM = 0.97
_CLOSE = 0.92
# The maximum factor between the estimates of two consecutive solutions, because extrapolation is inaccurate.
_MAX_FACTOR = 16.0
# The factor that lowers the next estimate for each consecutive recipe above the limit.
_LOWER = 0.8

# Imported by name on first use, because ``ingot.runtime`` imports this package.
_DIVERGENCE: Registry[Any] = Registry("divergence", (("model", "ingot.runtime.evaluation.divergence:Divergence"),))


class Kl(NamedTuple):
    """Mean KL(source || result) in nats per token, and its 95 % bootstrap interval, which is None for few windows."""

    mean: float
    interval: Interval | None = None


class Divergence(Protocol):
    """A function that measures the divergence of models from one source on the same windows of text.

    ``over`` describes the windows.
    """

    @property
    def over(self) -> str: ...

    def __call__(self, path: str, *, alone: bool) -> Kl:
        """Return the divergence of the model at ``path``; ``alone`` states that it is a weight file without a model
        folder.
        """


class Trial:
    """A function that converts into a temporary folder, measures the divergence of the result, and deletes it.

    Raises
    ------
    UnsupportedError
        ``generate.no-head``: the source is no language model.
    IngotError
        The errors of ``ingot.evaluate`` for the source.
    """

    def __init__(self, options: ConvertOptions, convert: Callable[[ConvertOptions], object]) -> None:
        self._convert = convert
        self._target = destination(Location.parse(options.dst), options.format, options.container)
        self._divergence: Divergence = _DIVERGENCE["model"](
            options.src, options.text, options.sequences, progress=options.progress
        )
        self.over = self._divergence.over

    def __call__(self, options: ConvertOptions) -> Kl:
        """Return the divergence of the result; raise the errors of ``convert`` and ``load_model``."""
        name = self._target.location.name
        is_folder = self._target.directory
        with temporary_folder() as folder:
            path = f"{folder}/{name}{'/' if is_folder else ''}"
            trial = replace(options, dst=path, overlay=None, measure=False, overwrite=False, resume=False)
            self._convert(trial)
            return self._divergence(path, alone=not is_folder and not has_model_metadata(self._target.format.name))


@dataclass(frozen=True, slots=True)
class Step:
    """A measured recipe; its estimated loss is ``allocation.cost``."""

    allocation: Allocation
    kl: Kl

    @property
    def loss(self) -> float:
        """The estimated loss."""
        return self.allocation.cost

    def holds(self, limit: float) -> bool:
        """Return whether the divergence is at most the limit; false for NaN."""
        return self.kl.mean <= limit


def search(
    limit: float, solve: Callable[[float], Allocation], measure: Callable[[Allocation], Kl]
) -> tuple[Step | None, list[Step]]:
    """Search the smallest allocation whose measured divergence is at most ``limit``.

    Each step solves for a bound of the estimated loss and measures the resulting allocation. The first bound is the
    limit. Each further bound follows from the measurements: it is scaled by the ratio of limit and divergence. If there
    are measurements on both sides of the limit, it is interpolated (in logarithms) between two of them. If no
    measurement was below the limit, the last of ``STEPS`` is the allocation with the least loss.

    Parameters
    ----------
    limit : float
        The maximum divergence in nats per token.
    solve : callable
        Returns the smallest allocation whose estimated loss is at most a bound; it must have a solution for 0.
    measure : callable
        Measures the divergence of an allocation.

    Returns
    -------
    The smallest allocation below the limit, None if there is none, and all measured allocations in order.
    """
    steps: list[Step] = []
    best: Step | None = None
    bound = limit
    while len(steps) < STEPS:
        allocation = solve(bound)
        if any(allocation.picks == step.allocation.picks for step in steps):
            break
        steps.append(Step(allocation, measure(allocation)))
        if steps[-1].holds(limit) and (best is None or allocation.size < best.allocation.size):
            best = steps[-1]
        if (best is None and allocation.cost <= 0) or (best is not None and best.kl.mean >= _CLOSE * limit):
            break
        bound = _next_bound(limit, steps, best)
    return best, steps


def _next_bound(limit: float, steps: list[Step], best: Step | None) -> float:
    """Return the bound of the estimated loss for which the next allocation is solved."""
    above = [step for step in steps if not step.holds(limit)]
    if best is None:
        if len(steps) == STEPS - 1:
            return 0.0
        return min(step.loss for step in above) * _factor(limit, steps[-1]) * _LOWER ** (len(steps) - 1)
    failed = min((step for step in above if step.loss > best.loss), key=lambda step: step.loss, default=None)
    if failed is None:
        return best.loss * _factor(limit, best) if best.loss > 0 else limit
    if not (best.loss > 0 and best.kl.mean > 0 and isfinite(failed.kl.mean)):
        return (best.loss + failed.loss) / 2
    slope = log(failed.loss / best.loss) / log(failed.kl.mean / best.kl.mean)
    interpolated = best.loss * exp(slope * log(_AIM * limit / best.kl.mean))
    return min(interpolated, failed.loss * _AIM)


def _factor(limit: float, step: Step) -> float:
    """Return the factor by which the bound of the estimated loss changes.

    It is the ratio of the limit, less a small margin, to the measured divergence, within ``_MAX_FACTOR``.
    """
    kl = step.kl.mean
    if not isfinite(kl):
        return 1 / _MAX_FACTOR
    return min(max(_AIM * limit / max(kl, 1e-300), 1 / _MAX_FACTOR), _MAX_FACTOR)


def smallest(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], max_loss: float) -> Allocation:
    """Return the allocation with the fewest bytes whose estimated loss is at most ``max_loss``.

    Among allocations with these bytes it is the one with the least loss. Each group must have an option with a loss of
    0.
    """
    by_size = allocate(sizes, costs, max_loss)
    assert by_size is not None
    by_loss = allocate(costs, sizes, by_size.cost)
    assert by_loss is not None
    if by_loss.cost <= by_size.size:
        return by_loss
    return Allocation(by_size.picks, by_size.size, by_size.cost, by_loss.bound)
