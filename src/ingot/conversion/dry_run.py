"""The report of a planned conversion for ``--dry-run``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ingot.artifacts.attachments import ATTACHMENT_TITLES
from ingot.conversion.budget.report import BudgetReport
from ingot.conversion.plan import ConvertPlan
from ingot.conversion.report import action_of, count_grades, exact, exactness, exactness_summary, source_nbytes
from ingot.engine.work import Step
from ingot.model.account import Account
from ingot.model.layouts.table import codec_name
from ingot.naming.names import equal_layers
from ingot.reporting.report import Column, Figure, Line, Report, Table, Texts

_TENSORS = (
    Column("name"),
    Column("shape", "shape"),
    Column("dtype"),
    Column("rule"),
    Column("action"),
    Column("exact", "flag"),
    Column("codec"),
    Column("params", "data"),
    Column("source_nbytes", "bytes"),
    Column("nbytes", "bytes"),
    Column("equal", "texts"),
)
_GROUPS = (
    Column("", head="tensor"),
    Column("", "shape", "shape", drop=2),
    Column("", head="dtype", drop=1),
    Column("", head="rule"),
    Column("", head="action"),
    Column("", head="codec"),
    Column("", "times", "n", drop=4),
    Column("", "bytes", "from", drop=3),
    Column("", "bytes", "to"),
)


def dry_run(
    plan: ConvertPlan, notes: Sequence[str], budget: BudgetReport | None, inexact: Collection[str], account: Account
) -> Report:
    """Return a report of the rule that applies to each tensor, and of the size of the result.

    ``inexact`` contains the names of tensors whose values a view has changed in f32.
    """
    attachments = [f"with the {ATTACHMENT_TITLES[name]}" for name in plan.attachments.names()]
    elements = max(sum(step.tensor.size for step in plan.steps), 1)
    equal = [exactness(step, plan.format, inexact) for step in plan.steps]
    grades = count_grades(equal)
    repacked = len(equal) - equal.count(None)
    figures = [
        Figure("format", plan.format.name),
        Figure("recipe", plan.recipe),
        Figure("size", plan.size, "bytes"),
        Figure("size_exact", plan.size_exact, "flag"),
        Figure("notes", [*attachments, *notes], "texts"),
        Figure("warnings", plan.warnings, "texts"),
        Figure("superseded", dict(account.superseded), "data"),
        Figure("dropped", dict(account.dropped), "data"),
        Figure("grades", grades, "counts"),
        Figure("equal", exactness_summary(repacked, grades), data=False),
        Figure("count", len(plan.steps), "count", data=False),
        Figure("nbytes", plan.size, "position", data=False),
        Figure("bits", 8 * plan.size / elements, "bits", data=False),
    ]
    precision = "exactly" if plan.size_exact else "at most (if compression saves nothing)"
    lines = [
        Line(
            f"{{count}} tensors, recipe {{recipe}}, format {{format}}: {precision} {{nbytes}} bytes ({{size}}), "
            "{bits} bits per weight; nothing was written"
        ),
        *([Line("equal, {equal}")] if repacked else []),
        Line("note: {item}", items="notes"),
    ]
    report = Report(figures, lines, [_tensors(plan.steps, equal), _groups(plan.steps)])
    return report if budget is None else budget.around(report)


def _tensors(steps: Sequence[Step], equal: Sequence[Texts | None]) -> Table:
    rows = [
        (
            step.tensor.name,
            step.tensor.shape,
            step.tensor.dtype,
            step.rule,
            action_of(step),
            exact(step),
            step.spec.codec,
            step.spec.params,
            source_nbytes(step),
            step.out_bytes,
            grades,
        )
        for step, grades in zip(steps, equal, strict=True)
    ]
    return Table("tensors", _TENSORS, rows, shown=False)


def _groups(steps: Sequence[Step]) -> Table:
    """Return the table of actions; layers with equal actions share one row, with their bytes added up."""

    def key(step: Step) -> tuple[Any, ...]:
        codec = codec_name(step.spec.codec, step.spec.params, (part.encoding for part in step.spec.parts))
        return (step.tensor.shape, step.tensor.dtype, step.rule, action_of(step), codec)

    rows = []
    for name, group in equal_layers(steps, lambda step: step.tensor.name, key):
        sizes = (sum(source_nbytes(step) for step in group), sum(step.out_bytes for step in group))
        rows.append((name, *key(group[0]), len(group), *sizes))
    return Table("", _GROUPS, rows, data=False)
