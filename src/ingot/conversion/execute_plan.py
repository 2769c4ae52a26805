"""Execute the plan of a conversion that another process wrote (``spec/operations.md``, "Plans")."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ingot.conversion.options import ExecuteOptions
from ingot.conversion.planfile import PlanData, open_plan, read_plan
from ingot.conversion.prepared import Prepared, with_config
from ingot.conversion.report import ConvertReport
from ingot.conversion.run import run
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.engine.data import RULE as STEP
from ingot.engine.resources import Resources
from ingot.errors import FormatError
from ingot.formats.base import Format
from ingot.model.account import Account
from ingot.model.spec import TensorSpec
from ingot.stores.location import Location


@takes(ExecuteOptions, "execute")
def execute(options: ExecuteOptions) -> ConvertReport:
    """Execute a plan of a conversion that ``ingot convert --plan-out`` wrote.

    The result has the same bytes as if ``ingot convert`` had executed the plan. If steps were removed from the plan,
    the artifact contains only the tensors of the remaining steps.

    Returns
    -------
    ConvertReport

    Raises
    ------
    FormatError
        ``plan.json``, ``plan.version``: the file is no plan, or a plan of another version of Ingot. ``plan.step``: a
        step does not fit its source or the format.
    IntegrityError
        ``plan.source``: the source or an attachment has changed since the plan was made.
    UsageError, UnsupportedError, CodecError, ResourceError
        See ``ingot.convert``. If an error is raised, nothing is written under the final name.

    Examples
    --------
    >>> from ingot.cli.main import run
    >>> run(["convert", "model", "small.zt", "--recipe", "int8", "--plan-out", "plan.json", "-q"])
    0
    >>> ingot.execute("plan.json").format
    'zt'
    """
    started = time.perf_counter()
    data = read_plan(Location.parse(options.plan), PlanData)
    out = None if options.out is None else Location.parse(options.out)
    with _prepared(data, out) as prepared:
        progress = Progress(prepared.plan.in_bytes, options.progress)
        resources = Resources(options.max_ram, options.threads, progress)
        report = run(prepared, resources, overwrite=options.overwrite, resume=options.resume)
    return replace(report, seconds=time.perf_counter() - started)


def _prepared(data: PlanData, out: Location | None) -> Prepared:
    """Open the source of a plan and restore its steps. Raises the errors of ``execute``."""
    opened = open_plan(data, out)
    try:
        plan = opened.plan(range(len(data.steps)))
        _require_order(plan.format, plan.specs)
        plan = with_config(plan, opened.source, opened.checkpoint, opened.target, untie=data.untie)
    except BaseException:
        opened.checkpoint.close()
        raise
    return Prepared(
        opened.source,
        opened.checkpoint,
        plan,
        opened.target,
        untie=data.untie,
        notes=data.notes,
        bytes_read=opened.view.bytes_read,
        inexact=opened.view.inexact,
        account=Account(data.superseded, data.dropped),
    )


def _require_order(format: Format, specs: Sequence[TensorSpec]) -> None:
    if len({spec.name for spec in specs}) != len(specs) or list(format.order(specs)) != list(range(len(specs))):
        raise FormatError(STEP, "expected each tensor once, in the order of the format")
