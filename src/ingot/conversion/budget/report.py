"""The report of a budget search."""

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
    count_text,
    data_of,
    figures_of,
    table_of,
)

_HEADS = {"bits_per_weight": "bits", "loss": "loss"}
_TYPES = {"type": "requested type", "size": "all of it", **_HEADS, "chosen": "tensors"}
_POINTS = {"size": "best at", **_HEADS, "chosen": " "}
_STEPS = {"size": "measured at", **_HEADS, "kl": "KL", "kl_low": "from", "kl_high": "to", "chosen": " "}
_TABLES = ("types", "points", "steps", "groups")


@dataclass(frozen=True, slots=True)
class TypeReport:
    """One type: size of all weight files in bytes, bits per weight and estimated loss if every tensor had this type.

    ``chosen`` is the number of tensors that have the type in the chosen recipe. A tensor that cannot have the type
    stays unchanged.
    """

    type: str
    size: Bytes
    bits_per_weight: Bits
    loss: float
    chosen: Count


@dataclass(frozen=True, slots=True)
class PointReport:
    """A point of the frontier of size and estimated loss; ``chosen`` is true for the point of the chosen recipe."""

    size: Bytes
    bits_per_weight: Bits
    loss: float
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A measured recipe: its size in bytes, the estimated loss, and KL(source || result) with its 95 % interval.

    ``chosen`` is true for the chosen recipe.
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
    """Tensors that share one type; ``candidates`` has the size in bytes and the estimated loss of every type."""

    tensors: Texts
    type: str
    nbytes: Bytes
    loss: float
    candidates: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """The result of a budget search.

    Attributes
    ----------
    target : int or None
        The largest allowed size in bytes.
    max_kl : float or None
        The largest allowed divergence in nats per token.
    size : int
        The exact size of all weight files in bytes.
    loss : float
        The estimated loss of all tensors: nats per token if ``absolute``, else a mean relative squared error.
    lower_bound : float
        A lower bound of the estimated loss that any recipe with these types can have.
    kl : float or None
        The measured divergence in nats per token; ``over`` describes the tokens.
    measured : mapping of str to int
        For each type of statistics, the number of matrices whose errors it weighted.
    recipe, text : str
        The file to which the recipe was written (empty if none), and its text.
    steps : sequence of StepReport
        All measured recipes.
    """

    target: Bytes | None
    max_kl: float | None
    size: Bytes
    bits_per_weight: Bits
    loss: float
    lower_bound: float
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
        """Return the report of the conversion with the figures and tables of the budget search added."""
        tables = [table_of("", self.types, TypeReport, _TYPES), table_of("", self.points, PointReport, _POINTS)]
        if self.steps:
            tables.append(table_of("", self.steps, StepReport, _STEPS))
        figures = [item for item in figures_of(self) if item.name not in _TABLES]
        data = {item.name: item.value for item in figures}
        rows: dict[str, object] = {name: [data_of(item) for item in getattr(self, name)] for name in _TABLES}
        shown = [Figure(f"budget_{item.name}", item.value, item.unit, data=False) for item in figures]
        weights = [f"{name} in {count_text(count, 'matrix', 'matrices')}" for name, count in self.measured.items()]
        shown.append(Figure("budget_weights", ", ".join(weights), data=False))
        target = "" if self.target is None else " of {budget_target}"
        limit = "" if self.max_kl is None else " of at most {budget_max_kl}"
        unit = " nats a token" if self.absolute else ""
        lines = [
            Line(
                f"{{budget_size}}{target}, {{budget_bits_per_weight}} bits per weight; estimated loss "
                f"{{budget_loss}}{unit}; errors weighted by {{budget_weights}}",
                "budget",
            ),
            *([Line(f"{{budget_kl}}{limit} nats a token over {{budget_over}}", "KL")] if self.steps else []),
            *([Line("{budget_recipe}, which you can edit", "recipe")] if self.recipe else []),
        ]
        return Report(
            [*report.figures, Figure("budget", {**data, **rows}, "data"), *shown],
            [*report.lines, *lines],
            [*(Table(item.name, item.columns, item.rows, data=False) for item in tables), *report.tables],
            report.closing,
        )
