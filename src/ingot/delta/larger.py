"""A delta that takes more bytes than the fine-tune itself is refused, with the strategy that would be smaller."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ingot.core.runtime.memory import format_size
from ingot.core.runtime.parallel import ordered
from ingot.delta.auto import estimate
from ingot.delta.pairs import Both
from ingot.delta.strategy import choices
from ingot.errors import UsageError

STRATEGIES = ("exact", "int8", "int4", "int3", "int2", "int1")
"""Strategies of a ``.zt`` that are proposed, the nearest to the fine-tune first."""
_SPARE, _PER_TENSOR = 4096, 64
"""Bytes that a delta may take beyond the fine-tune's: chunk sizes and scales count in tiny tensors, and hurt nobody."""


def require_smaller(
    nbytes: int, tuned_nbytes: int, changed: Iterable[Both], count: int, strategy: str, location: str, workers: int
) -> None:
    """Raise ``UsageError`` ``delta.larger`` if parts of ``nbytes`` are more than those of the fine-tune.

    Parameters
    ----------
    nbytes, tuned_nbytes : int
        Stored bytes of all parts.
    changed : iterable of Both
        The tensors that the delta stores; read only to find a smaller strategy.
    count : int
        Their number.
    strategy : str
        The delta's, which is not proposed.
    """
    if nbytes <= tuned_nbytes + _SPARE + _PER_TENSOR * count:
        return
    advice = _advice([*changed], strategy, tuned_nbytes, workers)
    raise UsageError(
        f"the delta would take {format_size(nbytes)}, the fine-tune itself takes {format_size(tuned_nbytes)}; "
        f"{advice}; --allow-larger (allow_larger=True) writes it all the same",
        rule="delta.larger",
        where=location,
    )


def _advice(changed: list[Both], refused: str, limit: int, workers: int) -> str:
    for strategy in (name for name in STRATEGIES if name != refused):
        size = sum(ordered(partial(_size, strategy=strategy), changed, workers))
        if size < limit:
            exactness = "exact" if strategy == "exact" else "not exact"
            return f"--strategy {strategy} into a .zt would take about {format_size(int(size))} ({exactness})"
    return "no strategy is smaller: keep the fine-tune as it is"


def _size(both: Both, strategy: str) -> float:
    """Return about how many bytes a strategy of a ``.zt`` takes for a tensor: by a sample where need be."""
    assert both.tuned is not None
    tuned = both.tuned
    if not (both.is_alike or both.is_fitted):
        return tuned.nbytes
    base, shared = both.shared()
    storage = choices(strategy, tuned.name, tuned.shape, tuned.dtype)
    return estimate(base, shared, storage) + both.added_nbytes
