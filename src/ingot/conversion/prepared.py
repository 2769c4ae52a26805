"""A planned conversion that has not been executed, and functions that depend on its source and destination."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ingot.artifacts.companions import ConfigChange, updated_config
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
from ingot.reporting.reportable import Reportable
from ingot.views.rounded_view import Rounding


@dataclass(frozen=True, slots=True)
class Prepared(Reportable):
    """A planned conversion that has not been executed: the opened source, its view, the plan and the destination.

    Attributes
    ----------
    checkpoint : Checkpoint
        The view that the plan writes.
    untie : bool
        Whether the result's config.json must declare that the head is not tied to the embeddings.
    notes : sequence of str
        Notes for the report.
    bytes_read : int
        Bytes that were read to build the views.
    without : set of str
        Tensors that the views omit.
    rounded : Checkpoint or None
        The view of the source that rounds matrices; None without quantizers.
    original : Checkpoint or None
        The view of the source before rounding; None if there is no rounding.
    budget : BudgetReport or None
        The search that chose the recipe.
    inexact : set of str
        Tensors whose values a view has changed in f32.
    account : Account
        The source tensors that the result does not contain, with the reasons.
    """

    source: Source
    checkpoint: Checkpoint
    plan: ConvertPlan
    target: Destination
    recipe: Recipe | None = None
    untie: bool = False
    notes: Sequence[str] = ()
    bytes_read: int = 0
    without: frozenset[str] = frozenset()
    rounding: Rounding | None = None
    original: Checkpoint | None = None
    rounded: Checkpoint | None = None
    budget: BudgetReport | None = None
    inexact: frozenset[str] = frozenset()
    account: Account = field(default_factory=Account)
    runtime: str | None = None

    @property
    def weights(self) -> Checkpoint:
        """The view of the source that quantizers read."""
        return self.original or self.checkpoint

    def report(self) -> Report:
        """Return a report of the rule that applies to each tensor, and of the size of the result."""
        return dry_run(self.plan, self.notes, self.budget, self.inexact, self.account)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoint.close()


def refuse_same(source: Source, target: Destination) -> None:
    """Raise ``convert.same-path`` if the destination is a file of the source, or a folder that contains one.

    Otherwise the source would be deleted when the result gets its final name.
    """
    if source.would_overwrite(target.url, folder=target.directory):
        raise UsageError(
            "the destination is the source, or contains it and would replace it; choose another destination",
            rule="convert.same-path",
            where=target.display,
        )


def for_source(target: Destination, source: Source) -> Destination:
    """Return the destination with the variant of its format that suits the weights of this source."""
    if not target.format.traits.config_keys:
        return target
    return replace(target, format=target.format.for_source(source.config()))


def with_activations(target: Destination, scheme: str | None) -> Destination:
    """Return the destination with a format that declares the scheme by which layers quantize their inputs.

    Raises ``UnsupportedError`` ``recipe.activations``.
    """
    return target if scheme is None else replace(target, format=target.format.for_activations(scheme))


def with_config(
    plan: ConvertPlan, source: Source, checkpoint: Checkpoint, target: Destination, *, untie: bool
) -> ConvertPlan:
    """Return the plan with the result's ``config.json``, for formats that write keys into this file."""
    if not (target.format.traits.config_keys and target.directory):
        return plan
    config = updated_config(checkpoint.companions, config_change(source, plan, untie=untie))
    return replace(plan, config=_completed(config, source))


def _completed(config: bytes | None, source: Source) -> bytes | None:
    """Return ``config.json`` completed with the keys on packing that the source stores in another file."""
    if config is None or not source.format.traits.config_keys:
        return config
    values = parse_config(config, "companions.config", source.location)
    missing = {key: value for key, value in source.config().items() if key in PACKING_KEYS and key not in values}
    return json.dumps({**values, **missing}, indent=2).encode() if missing else config


def config_change(source: Source, plan: ConvertPlan, *, untie: bool) -> ConfigChange:
    """Return the changes that ``config.json`` needs, except for the keys that the target's format writes."""
    drop = () if plan.format.traits.config_keys else source.format.traits.config_keys
    return ConfigChange(drop, *retyped(plan.steps), untie)
