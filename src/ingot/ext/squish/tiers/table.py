"""The tiers by name, where each lies and what marks it as complete (Squish Architecture, sections 4 and 7)."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tier:
    """One prepared form.

    Parameters
    ----------
    name : str
        As commands and reports call it.
    number : int
        In the document's decision tree (section 7).
    path : str
        File or folder that holds the weights, relative to the directory.
    sentinel : str or None
        File whose presence says that ``path`` is complete; None for the tier that everything is built from.
    format : str
        Format of ``path``.
    recipe : str or None
        Preset that makes it from the tensors; None for those themselves.
    exact : bool
        Whether its values are those of the tensors, rounded at most to its element type.
    bits : int or None
        Of a code, where it is packed: those that its name says; a tensor may have more.
    summary : str
        In a few words.
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
        """Where sentinels of the tier are looked for: its own, then others."""
        own = self.sentinel
        other = OTHER_MARKS.get(self.name)
        return (*((own,) if own else ()), *((other,) if other else ()))


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
"""In the order in which the decision tree asks for them."""

BUILT = tuple(name for name, tier in TIERS.items() if tier.sentinel is not None)
"""Names of the tiers that are made from the tensors."""

# squish's own code keeps these inside the tier's folder; section 4 shows the others, beside it. Either marks a tier.
OTHER_MARKS = {"4bit": "squish_4bit/.squish_4bit_ready", "3bit": "squish_3bit/.squish_3bit_ready"}


def tier_of(name: str) -> Tier:
    """Return the tier of this name; raises ``UsageError`` ``tier.unknown``."""
    if name not in TIERS:
        raise UsageError(
            f"expected a tier {', '.join(TIERS)}, found {name!r}{did_you_mean(name, TIERS)}", rule="tier.unknown"
        )
    return TIERS[name]
