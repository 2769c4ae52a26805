"""What a budget came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.model.report import Bits, Bytes, Count, Counts, Figure, Line, Report, Table, Texts, figures_of, table_of

_HEADS = {"bits_per_weight": "bits", "loss": "loss"}
_TYPES = {"type": "type", "size": "all of it", **_HEADS, "chosen": "tensors"}
_POINTS = {"size": "best at", **_HEADS, "chosen": " "}


@dataclass(frozen=True, slots=True)
class TypeReport:
    """One type given to every tensor that it fits: bytes of all weight files and per weight, and the estimated loss."""

    type: str
    size: Bytes
    bits_per_weight: Bits
    loss: float
    chosen: Count


@dataclass(frozen=True, slots=True)
class PointReport:
    """A size at which no smaller estimate is known; ``chosen`` marks where the budget is."""

    size: Bytes
    bits_per_weight: Bits
    loss: float
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Tensors that have one type; ``candidates`` are the bytes and the estimated loss of every type."""

    tensors: Texts
    type: str
    nbytes: Bytes
    loss: float
    candidates: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """The recipe that a budget came to.

    ``size`` in bytes is exact, of all weight files; ``loss`` the estimate for all tensors, in nats a token where
    ``absolute``, else a mean relative squared error, and ``least`` a bound: no recipe of these types has less.
    ``measured`` counts matrices by what their errors were weighed by; ``recipe`` is the file that was written, empty
    if none, ``text`` what it says.
    """

    target: Bytes
    size: Bytes
    bits_per_weight: Bits
    loss: float
    least: float
    absolute: bool
    measured: Counts
    recipe: str
    text: str
    types: Sequence[TypeReport]
    points: Sequence[PointReport]
    groups: Sequence[GroupReport]

    def around(self, report: Report) -> Report:
        """Return the report of the conversion with the budget's before it."""
        tables = (table_of("", self.types, TypeReport, _TYPES), table_of("", self.points, PointReport, _POINTS))
        figures = [item for item in figures_of(self) if item.name not in ("types", "points", "groups")]
        data = {item.name: item.value for item in figures}
        more: dict[str, object] = {
            name: [_row(item) for item in getattr(self, name)] for name in ("types", "points", "groups")
        }
        shown = [Figure(f"budget_{item.name}", item.value, item.kind, data=False) for item in figures]
        unit = " nats a token" if self.absolute else ""
        lines = [
            Line(
                f"{{budget_size}} of {{budget_target}}, {{budget_bits_per_weight}} bits per weight; loss by the "
                f"estimate {{budget_loss}}{unit}; errors weighed by {{budget_measured}}",
                "budget",
            ),
            *([Line("{budget_recipe}, to be kept and changed", "recipe")] if self.recipe else []),
        ]
        return Report(
            [*report.figures, Figure("budget", {**data, **more}, "data"), *shown],
            [*report.lines, *lines],
            [*(Table(item.name, item.columns, item.rows, data=False) for item in tables), *report.tables],
            report.closing,
        )


def _row(item: object) -> dict[str, object]:
    return {figure.name: figure.value for figure in figures_of(item)}
