"""Rounding of all matrices of a tensor, each by its own statistics, and what there is to tell of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from ingot.core.parallel import go_on
from ingot.errors import CodecError
from ingot.model.report import Count, Ratio
from ingot.model.statistics import MatrixStatistics
from ingot.model.tensor import Array
from ingot.quantizers.choice import Asked, rounded_as
from ingot.quantizers.factors import DAMPING, Factors, factors_of, no_factors
from ingot.quantizers.grid import Rounded
from ingot.quantizers.parts import parts_of
from ingot.quantizers.rounding import IMPORTANCE, error_under, values_of
from ingot.quantizers.table import SAMPLE
from ingot.quantizers.trellis import Made

SIGNS_DAMPING = 0.5
_ELEMENT = 32  # bytes of a weight on its way: in f32 as it was, as it is wanted, as it became, errors, products
_LEARNT = 64  # bytes of a weight that a table is learnt of


class Knowing(Protocol):
    """What statistics are asked for."""

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return what is known of a matrix, None where nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What rounding did to a matrix.

    ``error`` is ``tr(G D A D^T)`` over that of the matrix itself. ``tokens`` are those that its statistics saw: 0 for
    an expert that none was sent to, None where there are no statistics; then all errors weigh alike. ``damping`` is
    what was added to A's diagonal, as a share of its mean, ``dead`` counts columns whose input was always 0.
    ``singular``: A had no triangular factor without more damping than others get.
    """

    matrix: str
    error: float
    tokens: Count | None
    damping: Ratio
    dead: Count
    singular: bool = False


def matrices(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the matrices that a tensor stacks, under the names of their statistics, and where each stands."""
    lead = shape[:-2]
    count = prod(lead)
    for number in range(count):
        place = tuple(map(int, np.unravel_index(number, lead))) if lead else ()
        yield name if count == 1 else f"{name}:expert.{number}", place


def seen(known: Knowing | None, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether there are statistics of a tensor's matrices, or of the first one that it stacks."""
    if known is None or len(shape) < 2:
        return False
    first = next((first for first, _ in matrices(name, shape)), name)
    found = known.for_matrix(first)
    return found is not None and (found.count > 0 or first != name)


def damping_for(asked: Asked) -> float:
    """Return what is added to the diagonals of the factors, as a share of their means.

    Signs are wrong by so much that directions of which the samples say little count too.
    """
    return SIGNS_DAMPING if asked.grid.signs else DAMPING


def known_factors(
    known: Knowing, name: str, rows: int, cols: int, damping: float = DAMPING
) -> tuple[Factors, int | None]:
    """Return a matrix's factors and the tokens that they are of; without statistics all errors weigh alike.

    Raises ``FormatError`` ``statistics.shape``, ``statistics.value``.
    """
    found = known.for_matrix(name)
    if found is None or not found.count:
        return no_factors(cols), None if found is None else 0
    found.require_shape(rows, cols)
    return factors_of(found, damping), found.count


def rounding_memory(asked: Asked, shape: tuple[int, ...], known: MatrixStatistics | None) -> int:
    """Return the bytes that the rounding of a tensor takes at its peak, one of its matrices after the other.

    Without statistics at hand both factors are reckoned with.
    """
    rows, cols = shape[-2:]
    inputs = known is None or known.has_inputs or asked.quantizer != IMPORTANCE
    outputs = known is None or known.rows is not None
    # A: one copy, and another in its order, or its factor turned round; G: one copy, and a trellis takes its factor.
    sides = (1 + (asked.act_order or asked.streams)) * inputs * cols**2 + (1 + asked.streams) * outputs * rows**2
    table = _LEARNT * min(rows * cols, 2 * SAMPLE) * (asked.grid.learnt if not asked.streams else 0)
    return _ELEMENT * rows * cols + 4 * sides + table


def require_finite(values: Array, where: str) -> None:
    """Refuse NaN and infinity; ``CodecError`` ``quantizer.non-finite``."""
    if not np.isfinite(values).all():
        raise CodecError("quantizer.non-finite", "expected finite weights; keep this tensor dense", where=where)


def round_tensor(
    asked: Asked,
    weights: Iterable[tuple[str, Array]],
    known: Knowing,
    settle: Callable[[Sequence[Made], Array, Factors], None] | None = None,
) -> tuple[Mapping[str, Array], list[Outcome]]:
    """Return the parts of a tensor, and what became of its matrices; all have the first one's table.

    Parameters
    ----------
    weights : iterable of (str, f32 [rows, cols])
        Each matrix under the name of its statistics.
    settle : callable, optional
        Has the last word on a matrix: gets what was made of it, which it may change, the matrix and its factors.
    """
    found, outcomes = list[Made](), []
    for name, values in weights:
        go_on()
        rows, cols = values.shape
        factors, tokens = known_factors(known, name, rows, cols, damping_for(asked))
        made = rounded_as(asked, values, factors, found[0].levels if found else None)
        if settle is not None:
            settle(made, values, factors)
        found += made
        error, more = _told(made) if settle is None else None, made[0].more_damping
        if error is None:
            error = error_under(values, values_of(made), factors)
        outcomes.append(Outcome(name, error, tokens, factors.damping + more, factors.dead, more > 0))
    return parts_of(found, asked), outcomes


def _told(made: Sequence[Made]) -> float | None:
    """Return the error under the factors where feedback found it on its way."""
    told = [each.told for each in made if isinstance(each, Rounded)]
    known = [each for each in told if each is not None]
    if not known or len(known) < len(made):
        return None
    whole = sum(each[1] for each in known)
    return sum(each[0] for each in known) / whole if whole > 0 else 0.0
