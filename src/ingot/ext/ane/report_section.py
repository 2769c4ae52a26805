"""The section "Neural Engine" of the page of ``ingot report``: a line per chip, for the option ``--chip``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.ext.ane.assume import parse_assumptions
from ingot.ext.ane.plan import CHIP_SUM_HEADS, ChipSum, load_chips, plan_checkpoint
from ingot.inspect.page.options import ReportOptions
from ingot.model.checkpoint import Checkpoint


class ChipSection:
    """The section "Neural Engine" of the page: a row per chip of ``--chip`` with the totals of the checkpoint's
    plan.
    """

    title = "Neural Engine"
    row = ChipSum
    heads: Mapping[str, str] = CHIP_SUM_HEADS

    def rows(self, checkpoint: Checkpoint, options: ReportOptions) -> Sequence[ChipSum]:
        """Return a row per chip; empty if ``--chip`` was not given. Raises the errors of ``ingot.plan``."""
        if options.chip is None:
            return ()
        chips = load_chips(options.chip)
        return plan_checkpoint(checkpoint, chips, parse_assumptions((), [item.name for item in chips])).sums
