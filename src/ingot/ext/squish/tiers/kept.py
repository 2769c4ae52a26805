"""Which tensors of a Squish directory a packed tier takes as they are, so that it has their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.artifacts.open import open as open_checkpoint
from ingot.codecs.table import CODECS
from ingot.conversion.placement import plan_exact
from ingot.errors import UsageError
from ingot.ext.squish.tiers.table import Tier
from ingot.formats.detect import FORMATS
from ingot.model.layouts.affine import AffineLayout
from ingot.model.tensor import Tensor
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.location import Location

LABEL = "as the arrays have it"
_FEW = 8  # bits: arrays of fewer are what the tier would be quantized to


@dataclass(frozen=True, slots=True)
class Kept:
    """How a tier comes from arrays that have few bits already.

    ``names`` of tensors keep their values: their integers move or are packed otherwise, dense ones stay. ``again`` are
    those of few bits that the tier's format cannot take as they are. Nothing of either where no array has few bits.
    """

    names: Sequence[str] = ()
    again: Sequence[str] = ()

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the tier's recipe with a rule before all others that keeps ``names``."""
        if not self.names:
            return recipe
        pattern = "re:(?:" + "|".join(map(re.escape, self.names)) + r")\Z"
        return replace(recipe, rules=(Rule(None, LABEL, (pattern,)), *recipe.rules))

    def require_allowed(self, tier: Tier, where: str) -> None:
        """Refuse what would be quantized again; ``UsageError`` ``tier.requantize``."""
        if self.again:
            raise UsageError(
                f"{len(self.again)} tensors have few bits already, in a layout that tier {tier.name} cannot take as it "
                f"is, such as {self.again[0]}: quantizing them again loses more. Load another tier, or pass "
                "--allow-requantize (allow_requantize=True)",
                rule="tier.requantize",
                where=where,
            )


def kept(location: Location, tier: Tier) -> Kept:
    """Return the tensors of a directory that a tier stores unchanged; reads headers and zero points."""
    if tier.bits is None:
        return Kept()
    with open_checkpoint(location, verify=False) as checkpoint:
        few = {name: bits for name, tensor in checkpoint.items() if (bits := _bits(tensor)) < _FEW}
        if not few:
            return Kept()
        # Arrays of more bits than the tier's name says stay where others have as few as it says: a mixture.
        most = _FEW if min(few.values()) <= tier.bits else tier.bits
        names = []
        again = []
        for name, tensor in checkpoint.items():
            if name not in few or (few[name] <= most and plan_exact(tensor, FORMATS[tier.format], LABEL) is not None):
                names.append(name)
            else:
                again.append(name)
    return Kept(names, again)


def _bits(tensor: Tensor) -> int:
    """Return the bits of a code; of other codecs that round as few as 4, which no tier takes as they are."""
    if tensor.codec == AffineLayout.codec:
        return int(tensor.params["bits"])
    return _FEW if tensor.codec not in CODECS or CODECS[tensor.codec].lossless else int(tensor.params.get("bits", 4))
