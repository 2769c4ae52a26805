"""The tiers of a Squish directory: names, paths and sentinels (Squish Architecture, sections 4 and 7)."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier: a prepared copy of the weights.

    Parameters
    ----------
    name : str
        Name in commands and reports.
    number : int
        Number in the document's decision tree (section 7).
    path : str
        File or folder of the weights, relative to the directory.
    sentinel : str or None
        File that exists if ``path`` is complete; None for the tier ``tensors``, the source of all others.
    format : str
        Format of ``path``.
    recipe : str or None
        Preset that builds the tier from the tensors; None for the tensors.
    exact : bool
        Whether its values are those of the source tensors, rounded to its element type.
    bits : int or None
        Bits of a code that the name of a packed tier states; some tensors may have more. None for other tiers.
    summary : str
        Description of a few words.
    """

    name: str
    number: int
    path: str
    sentinel: str | None
    format: str
    recipe: str | None
    exact: bool
    summary: str
    bits: int | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Paths of the tier's possible sentinels: first the sentinel that Ingot writes, then sentinels of other
        programs.
        """
        sentinel = self.sentinel
        other_mark = OTHER_MARKS.get(self.name)
        return (*((sentinel,) if sentinel else ()), *((other_mark,) if other_mark else ()))


TENSORS = Tier("tensors", 0, "", None, "npydir", None, True, "arrays in tensors/")
FINALIZED = Tier("finalized", 1, "finalized", "finalized/.ready", "npy", "f16", True, "one float16 .npy per tensor")
BF16 = Tier(
    "bf16",
    2,
    "squish_weights.safetensors",
    ".squish_ready",
    "safetensors",
    "bf16",
    True,
    "bf16 in one safetensors file",
)
FOUR_BIT = Tier(
    "4bit", 3, "squish_4bit", ".squish_4bit_ready", "mlx", "mlx-4bit", False, "4 bits, as mlx_lm loads it", 4
)
THREE_BIT = Tier(
    "3bit", 3, "squish_3bit", ".squish_3bit_ready", "mlx", "mlx-3bit", False, "3 bits, as mlx_lm loads it", 3
)

TIERS = {tier.name: tier for tier in (FOUR_BIT, THREE_BIT, BF16, FINALIZED, TENSORS)}
"""Tiers by name, in the order of the decision tree."""

BUILT = tuple(name for name, tier in TIERS.items() if tier.sentinel is not None)
"""Names of the tiers that are built from the tensors."""

# squish's code writes these sentinels into the tier's folder; section 4 shows the others, next to it. Both count.
OTHER_MARKS = {"4bit": "squish_4bit/.squish_4bit_ready", "3bit": "squish_3bit/.squish_3bit_ready"}


def tier_of(name: str) -> Tier:
    """Return the tier called ``name``. Raises ``UsageError`` ``tier.unknown``."""
    if name not in TIERS:
        raise UsageError(
            f"expected a tier {', '.join(TIERS)}, found {name!r}{did_you_mean(name, TIERS)}", rule="tier.unknown"
        )
    return TIERS[name]
