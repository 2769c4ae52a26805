"""Report lines about matrices that were rounded by statistics."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.quantization.factors import DAMPING
from ingot.quantization.tensor import Outcome
from ingot.reporting.report import count_text

_SHOWN = 4


def outcome_lines(every: Sequence[Outcome], source: str) -> list[str]:
    """Return report lines about ``every``, the outcomes of all rounded matrices; empty if there are none.

    ``source`` is the location or id of the statistics.
    """
    if not every:
        return []
    errors = [outcome.error for outcome in every]
    error = f"error under them {sum(errors) / len(errors):.3%} on average, {max(errors):.3%} at most"
    unknown = [outcome.matrix for outcome in every if outcome.tokens is None]
    unseen = [outcome.matrix for outcome in every if outcome.tokens == 0]
    dead = [f"{outcome.matrix} ({outcome.dead})" for outcome in every if outcome.dead]
    damped = [f"{outcome.matrix} ({_why(outcome)})" for outcome in every if outcome.singular]
    lines = [
        (f"{count_text(len(every), 'matrix', 'matrices')} rounded by the statistics of {source}: {error}", True),
        (f"without statistics, all errors weighed alike: {few(unknown)}", unknown),
        (f"no token was sent there, all errors weighed alike: {few(unseen)}", unseen),
        (f"inputs that were 0 for every token, whose columns weigh as damping has them: {few(dead)}", dead),
        (f"second moments of inputs that were singular, damped by more than {DAMPING:.0%}: {few(damped)}", damped),
    ]
    return [line for line, matrices in lines if matrices]


def few(names: Sequence[str]) -> str:
    """Return the first names as text, followed by the number of omitted names."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _why(outcome: Outcome) -> str:
    return f"by {outcome.damping:.3g}, of {outcome.tokens} tokens"
