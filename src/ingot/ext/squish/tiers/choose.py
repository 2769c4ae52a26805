"""Choose the tier that a runtime loads from a Squish directory: the decision tree of Squish Architecture, section 7."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import UsageError
from ingot.ext.squish.tiers.preferred_dtype import preferred_dtype
from ingot.ext.squish.tiers.status import COMPLETE, TierStatus, status
from ingot.ext.squish.tiers.table import BF16, FINALIZED, FOUR_BIT, TENSORS, THREE_BIT, TIERS, Tier
from ingot.model.layouts.affine import AffineLayout
from ingot.stores.location import AnyPath, Location

_TREE = {
    # The document's tree, which is for MLX: MLX computes with packed 4-bit weights.
    "mlx": (FOUR_BIT, THREE_BIT, BF16, FINALIZED, TENSORS),
    # Dense weights: first files that can be mapped, last the packed tiers, which are inexact and must be decoded.
    "torch": (BF16, FINALIZED, TENSORS, FOUR_BIT, THREE_BIT),
    # Weights that stay packed in memory: first the original integers, then the tiers made from them.
    "packed": (TENSORS, FOUR_BIT, THREE_BIT),
}
# If another type is preferred, a tier of 16 bits would round, so it comes after the tensors. If bf16 is preferred,
# weights are rounded once in any case: in the tier or while decoding.
_ROUNDING = {
    "f16": (FINALIZED, TENSORS, BF16),
    "f32": (TENSORS, FINALIZED, BF16),
    "f64": (TENSORS, FINALIZED, BF16),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The tier that a runtime loads, and the reasons for the choice.

    ``location`` can be opened with ``ingot.open``. ``skipped`` has the names of preferred tiers that were not chosen,
    with the reasons.
    """

    location: Location
    tier: Tier
    why: str
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def path(self) -> str:
        """The location as text for messages."""
        return self.location.display

    def report(self) -> dict[str, object]:
        """Return the choice as data for a JSON report."""
        return {
            "tier": self.tier.name,
            "number": self.tier.number,
            "path": self.path,
            "why": self.why,
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
        }


def choose(path: AnyPath, runtime: str = "torch", *, keep_packed: bool = False, dtype: Any = None) -> Choice:
    """Return the best complete tier of a Squish directory.

    Parameters
    ----------
    path : path
        The directory.
    runtime : {"torch", "mlx"}
        Runtime that loads the weights.
    keep_packed : bool
        Whether the weights stay packed; ignored for MLX.
    dtype : optional
        Element type of the loaded weights; by default the result of ``preferred_dtype``. A tier of a type that would
        round these values is used only if the source tensors cannot be used.

    Raises
    ------
    UsageError
        ``tier.no-directory``; ``tier.runtime``; ``tier.none``: no tier can be used; the message states why.
    """
    location = Location.parse(path)
    order = _order(runtime, keep_packed, preferred_dtype(location, dtype))
    states = {state.tier: state for state in status(location)}
    store = location.store()
    skipped: list[tuple[str, str]] = []
    for tier in order:
        weights = Location.in_store(store, tier.path)
        reason = _unusable(states[tier.name], tier, weights, packed=keep_packed and runtime == "torch")
        if reason is None:
            return Choice(weights, tier, _why(tier, states[tier.name]), tuple(skipped))
        skipped.append((tier.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    raise UsageError(
        f"{runtime} can load no tier of this directory ({reasons})",
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
