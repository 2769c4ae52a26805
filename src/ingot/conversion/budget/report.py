"""What a budget came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.reporting.report import (
    Bits,
    Bytes,
    Count,
    Counts,
    Figure,
    Line,
    Report,
    Table,
    Texts,
    data_of,
    figures_of,
    table_of,
)

_HEADS = {"bits_per_weight": "bits", "loss": "loss"}
_TYPES = {"type": "type", "size": "all of it", **_HEADS, "chosen": "tensors"}
_POINTS = {"size": "best at", **_HEADS, "chosen": " "}
_STEPS = {"size": "measured at", **_HEADS, "kl": "KL", "kl_low": "from", "kl_high": "to", "chosen": " "}
_TABLES = ("types", "points", "steps", "groups")


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
class StepReport:
    """A recipe whose divergence was measured: its bytes, the estimate, KL(source || result) with its interval of 95 %.

    ``chosen`` marks the one that was kept.
    """

    size: Bytes
    bits_per_weight: Bits
    loss: float
    kl: float
    kl_low: float | None
    kl_high: float | None
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
    if none, ``text`` what it says. ``target`` are the bytes that it had to keep within, or ``max_kl`` the divergence;
    ``kl`` is what was measured of it, in nats a token ``over`` some tokens, and ``steps`` all that were measured.
    """

    target: Bytes | None
    max_kl: float | None
    size: Bytes
    bits_per_weight: Bits
    loss: float
    least: float
    absolute: bool
    kl: float | None
    over: str
    measured: Counts
    recipe: str
    text: str
    types: Sequence[TypeReport]
    points: Sequence[PointReport]
    steps: Sequence[StepReport]
    groups: Sequence[GroupReport]

    def around(self, report: Report) -> Report:
        """Return the report of the conversion with the budget's before it."""
        tables = [table_of("", self.types, TypeReport, _TYPES), table_of("", self.points, PointReport, _POINTS)]
        if self.steps:
            tables.append(table_of("", self.steps, StepReport, _STEPS))
        figures = [item for item in figures_of(self) if item.name not in _TABLES]
        data = {item.name: item.value for item in figures}
        more: dict[str, object] = {name: [data_of(item) for item in getattr(self, name)] for name in _TABLES}
        shown = [Figure(f"budget_{item.name}", item.value, item.unit, data=False) for item in figures]
        of = "" if self.target is None else " of {budget_target}"
        most = "" if self.max_kl is None else " of at most {budget_max_kl}"
        unit = " nats a token" if self.absolute else ""
        lines = [
            Line(
                f"{{budget_size}}{of}, {{budget_bits_per_weight}} bits per weight; loss by the "
                f"estimate {{budget_loss}}{unit}; errors weighed by {{budget_measured}}",
                "budget",
            ),
            *([Line(f"{{budget_kl}}{most} nats a token over {{budget_over}}", "KL")] if self.steps else []),
            *([Line("{budget_recipe}, to be kept and changed", "recipe")] if self.recipe else []),
        ]
        return Report(
            [*report.figures, Figure("budget", {**data, **more}, "data"), *shown],
            [*report.lines, *lines],
            [*(Table(item.name, item.columns, item.rows, data=False) for item in tables), *report.tables],
            report.closing,
        )
