"""A conversion that is planned and has not started, and the parts of it that depend on source and destination."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ingot.artifacts.companions import ConfigChange, changed_config
from ingot.artifacts.destination import Destination
from ingot.artifacts.open import Source
from ingot.conversion.budget.report import BudgetReport
from ingot.conversion.dry_run import dry_run
from ingot.conversion.plan import ConvertPlan
from ingot.conversion.report import retyped
from ingot.errors import UsageError
from ingot.formats.packed_folders.base import PACKING_KEYS
from ingot.model.account import Account
from ingot.model.checkpoint import Checkpoint
from ingot.naming.config import parse_config
from ingot.recipes.recipe import Recipe
from ingot.reporting.report import Report
from ingot.reporting.shown import Shown
from ingot.views.encoded import Encoding
from ingot.views.rounded_view import Rounding


@dataclass(frozen=True, slots=True)
class Prepared(Shown):
    """A conversion that is planned and not begun: the opened source, the views over it, the plan, the destination.

    ``untie``: the result's config.json is to say that the head is not the embedding. ``notes`` are for the report,
    ``read`` bytes were read to make the views, tensors ``without`` are left out of them. ``budget`` is
    what made the recipe; values of the tensors ``inexact`` are not all equal in f32. ``account``: source tensors that
    the result does not hold.
    """

    source: Source
    checkpoint: Checkpoint
    plan: ConvertPlan
    place: Destination
    recipe: Recipe | None = None
    untie: bool = False
    notes: Sequence[str] = ()
    read: int = 0
    without: frozenset[str] = frozenset()
    rounding: Rounding | None = None
    original: Checkpoint | None = None
    budget: BudgetReport | None = None
    inexact: frozenset[str] = frozenset()
    account: Account = field(default_factory=Account)
    runtime: str | None = None
    encoding: Encoding = field(default_factory=Encoding)

    @property
    def weights(self) -> Checkpoint:
        """The source as quantizers see it."""
        return self.original or self.checkpoint

    def report(self) -> Report:
        """Return which rule hits which tensor, and the resulting size."""
        return dry_run(self.plan, self.notes, self.budget, self.inexact, self.account)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoint.close()


def refuse_same(source: Source, target: Destination) -> None:
    """Refuse a destination that is a file of the source, or a folder around one: publishing would remove it."""
    if source.is_lost(target.url, folder=target.directory):
        raise UsageError(
            "the destination is the source, or holds it and would replace it; choose another destination",
            rule="convert.same-path",
            where=target.display,
        )


def for_source(target: Destination, source: Source) -> Destination:
    """Return the destination with the format for weights of this source."""
    if not target.format.traits.config_keys:
        return target
    return replace(target, format=target.format.for_source(source.config()))


def with_config(
    plan: ConvertPlan, source: Source, checkpoint: Checkpoint, place: Destination, *, untie: bool
) -> ConvertPlan:
    """Return the plan with the ``config.json`` that is true of the result, for formats that write into it."""
    if not (place.format.traits.config_keys and place.directory):
        return plan
    config = changed_config(checkpoint.companions, config_change(source, plan, untie=untie))
    return replace(plan, config=_completed(config, source))


def _completed(config: bytes | None, source: Source) -> bytes | None:
    """Return a ``config.json`` with what another file of the source says of packing."""
    if config is None or not source.format.traits.config_keys:
        return config
    own = parse_config(config, "companions.config", source.location)
    more = {key: value for key, value in source.config().items() if key in PACKING_KEYS and key not in own}
    return json.dumps({**own, **more}, indent=2).encode() if more else config


def config_change(source: Source, plan: ConvertPlan, *, untie: bool) -> ConfigChange:
    """Return what the plan makes untrue in ``config.json``; keys of its own are the format's to replace."""
    drop = () if plan.format.traits.config_keys else source.format.traits.config_keys
    return ConfigChange(drop, *retyped(plan.steps), untie)
