"""Find the tensors of a Squish directory that a packed tier can store unchanged, with exactly their values."""

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
_EIGHT_BITS = 8  # arrays with fewer bits are reused


@dataclass(frozen=True, slots=True)
class ReusableTensors:
    """The tensors of a directory that has arrays below 8 bits, by their treatment when a tier is built.

    ``names`` are tensors that keep their values: their integers are copied or packed differently, and dense tensors
    stay dense. ``again`` are tensors that must be quantized again. Both are empty if no array has fewer than 8 bits.
    """

    names: Sequence[str] = ()
    again: Sequence[str] = ()

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the tier's recipe with a first rule that leaves ``names`` unchanged."""
        if not self.names:
            return recipe
        pattern = "re:(?:" + "|".join(map(re.escape, self.names)) + r")\Z"
        return replace(recipe, rules=(Rule(None, LABEL, (pattern,)), *recipe.rules))

    def require_allowed(self, tier: Tier, location: str) -> None:
        """Raise ``UsageError`` ``tier.requantize`` if tensors would be quantized again."""
        if self.again:
            raise UsageError(
                f"{len(self.again)} tensors have fewer than 8 bits in a layout that tier {tier.name} cannot store, "
                f"such as {self.again[0]}: quantizing them again loses more. Load another tier, or pass "
                "--allow-requantize (allow_requantize=True)",
                rule="tier.requantize",
                where=location,
            )


def reusable_tensors(location: Location, tier: Tier) -> ReusableTensors:
    """Return the tensors of a directory that a tier can store unchanged; this reads headers and zero points."""
    if tier.bits is None:
        return ReusableTensors()
    with open_checkpoint(location, verify=False) as checkpoint:
        packed_bits = {name: bits for name, tensor in checkpoint.items() if (bits := _bits(tensor)) < _EIGHT_BITS}
        if not packed_bits:
            return ReusableTensors()
        # In a mixture whose smallest arrays have the tier's bits, the larger arrays are reused too.
        max_bits = _EIGHT_BITS if min(packed_bits.values()) <= tier.bits else tier.bits
        names = []
        again = []
        for name, tensor in checkpoint.items():
            if name not in packed_bits or (
                packed_bits[name] <= max_bits and plan_exact(tensor, FORMATS[tier.format], LABEL) is not None
            ):
                names.append(name)
            else:
                again.append(name)
    return ReusableTensors(names, again)


def _bits(tensor: Tensor) -> int:
    """Return the bits of a tensor's codes.

    Returns 8 for lossless and unknown codecs, and 4 for lossy codecs without the parameter ``bits``.
    """
    if tensor.codec == AffineLayout.codec:
        return int(tensor.params["bits"])
    return (
        _EIGHT_BITS
        if tensor.codec not in CODECS or CODECS[tensor.codec].lossless
        else int(tensor.params.get("bits", 4))
    )
