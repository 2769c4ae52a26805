"""The decision tree: which of a directory's tiers a runtime loads (Squish Architecture, section 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import UsageError
from ingot.ext.squish.tiers.status import COMPLETE, TierStatus, status
from ingot.ext.squish.tiers.table import BF16, FINALIZED, FOUR_BIT, TENSORS, THREE_BIT, TIERS, Tier
from ingot.ext.squish.tiers.wanted import wanted_dtype
from ingot.model.layouts.affine import AffineLayout
from ingot.stores.location import AnyPath, Location

_TREE = {
    # The document's tree, for the runtime that it was written for: MLX computes from 4-bit weights as they are.
    "mlx": (FOUR_BIT, THREE_BIT, BF16, FINALIZED, TENSORS),
    # Dense weights: mapped ones first; tiers with fewer bits, which are not exact and have to be decoded, come last.
    "torch": (BF16, FINALIZED, TENSORS, FOUR_BIT, THREE_BIT),
    # Weights that stay packed in memory: the integers as they were made, then those that were made from them.
    "packed": (TENSORS, FOUR_BIT, THREE_BIT),
}
# A tier of 16 bits rounds what is wanted in another type: it comes after the tensors then. Wanted in bf16, weights are
# rounded to it once, in the tier or while decoding.
_ROUNDING = {
    "f16": (FINALIZED, TENSORS, BF16),
    "f32": (TENSORS, FINALIZED, BF16),
    "f64": (TENSORS, FINALIZED, BF16),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What is loaded.

    ``location`` opens with ``ingot.open``. ``why`` explains the choice, ``skipped`` why earlier tiers were not chosen.
    """

    location: Location
    tier: Tier
    why: str
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def path(self) -> str:
        """The location for messages."""
        return self.location.display

    def report(self) -> dict[str, object]:
        """Return the choice for a report, JSON-able."""
        return {
            "tier": self.tier.name,
            "number": self.tier.number,
            "path": self.path,
            "why": self.why,
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
        }


def choose(path: AnyPath, runtime: str = "torch", *, keep_packed: bool = False, dtype: Any = None) -> Choice:
    """Take the best complete tier of a Squish directory.

    Parameters
    ----------
    path : path
        The directory.
    runtime : {"torch", "mlx"}
        Who computes with the weights.
    keep_packed : bool
        For torch: weights are to stay packed.
    dtype : optional
        Element type that weights are wanted in; by default that of ``wanted_dtype``. Tiers that would round to
        another come after the tensors.

    Raises
    ------
    UsageError
        ``tier.no-directory``, ``tier.runtime``; ``tier.none``: no tier can be used, with each one's reason.
    """
    location = Location.parse(path)
    order = _order(runtime, keep_packed, wanted_dtype(location, dtype))
    states = {state.tier: state for state in status(location)}
    store = location.store()
    skipped: list[tuple[str, str]] = []
    for tier in order:
        weights = Location.in_store(store, tier.path)
        reason = _unusable(states[tier.name], tier, weights, packed=keep_packed and runtime == "torch")
        if reason is None:
            return Choice(weights, tier, _why(tier, states[tier.name]), tuple(skipped))
        skipped.append((tier.name, reason))
    told = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    raise UsageError(
        f"expected a tier that {runtime} can load; found none ({told})",
        rule="tier.none",
        where=location.display,
    )


def _order(runtime: str, keep_packed: bool, dtype: str | None) -> tuple[Tier, ...]:
    if runtime not in ("torch", "mlx"):
        raise UsageError(f"expected runtime torch or mlx, found {runtime!r}", rule="tier.runtime")
    if keep_packed and runtime == "torch":
        return _TREE["packed"]
    dense = iter(_ROUNDING.get(dtype or "", (BF16, FINALIZED, TENSORS)))
    return tuple(tier if tier in (FOUR_BIT, THREE_BIT) else next(dense) for tier in _TREE[runtime])


def _unusable(state: TierStatus, tier: Tier, weights: Location, *, packed: bool) -> str | None:
    if state.state != COMPLETE:
        return f"{state.state}: {state.why}"
    if packed and tier is TENSORS and not _has_packed(weights):
        return "no quantized tensor in it"
    return None


def _has_packed(location: Location) -> bool:
    with open_checkpoint(location, verify=False) as checkpoint:
        return any(tensor.codec == AffineLayout.codec for tensor in checkpoint.values())


def _why(tier: Tier, state: TierStatus) -> str:
    return f"tier {TIERS[tier.name].number}, {tier.summary}; {state.why}"
