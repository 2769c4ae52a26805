"""The gate of tiers with few bits: marked only if the model is still good, tensors that lose most in more bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Protocol

from ingot.artifacts.open import open as open_checkpoint
from ingot.conversion.candidates import trial_snr_db
from ingot.errors import CodecError
from ingot.naming.names import count_layers
from ingot.recipes.choice import ACCURATE, Measured
from ingot.recipes.recipe import Recipe, resolve
from ingot.stores.location import Location

ROUNDS = 3
"""Halvings of the number of tensors that get more bits, after none and all of them were tried."""


class Gate(Protocol):
    """Measures a model; ``ingot.ext.squish.gate`` has the one that reads a text.

    ``text`` identifies what is read, so that a record of an earlier build can be told from another's; ``max_rise`` is
    the share by which the perplexity may be above the reference's.
    """

    @property
    def text(self) -> str: ...

    @property
    def max_rise(self) -> float: ...

    def reference(self) -> float:
        """Return the perplexity of the tensors that tiers are made from."""
        ...

    def perplexity(self, tier: Location) -> float:
        """Return the perplexity of the weights at this location."""
        ...


@dataclass(frozen=True, slots=True)
class Passed:
    """What a gate found of a tier: two perplexities, and how many times the tier was made (``rounds``)."""

    text: str
    max_rise: float
    reference: float
    perplexity: float
    rounds: int

    @property
    def rise(self) -> float:
        """By which share the perplexity is above the reference's."""
        return self.perplexity / self.reference - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def passed_from_json(value: Any) -> Passed | None:
    """Return what ``Passed.to_json`` wrote; None for anything else."""
    if not isinstance(value, dict) or set(value) != set(Passed.__dataclass_fields__):
        return None
    numbers = [value[name] for name in ("max_rise", "reference", "perplexity")]
    if not all(isinstance(number, float) and isfinite(number) and number >= 0 for number in numbers):
        return None
    if not isinstance(value["text"], str) or type(value["rounds"]) is not int or not value["reference"]:
        return None
    return Passed(**value)


class Search:
    """Makes a tier until its gate lets it pass.

    The recipe alone comes first: in it, tensors whose own error is large have more bits already. Then every tensor
    that may have more bits gets them; if that is not enough, nothing is. Else the number of tensors that get them is
    halved ``ROUNDS`` times, those with the lowest signal-to-noise ratio first.

    Parameters
    ----------
    source : Location
        What the tier is made from.
    recipe : Recipe
    make : callable
        Converts by a recipe, to ``tier``.
    tier : Location
    gate : Gate
    """

    def __init__(
        self, source: Location, recipe: Recipe, make: Callable[[Recipe], object], tier: Location, gate: Gate
    ) -> None:
        self._source = source
        self._recipe = recipe
        self._make = make
        self._tier = tier
        self._gate = gate
        self._reference = gate.reference()
        self._made = 0

    def run(self) -> Passed:
        """Leave the best tier that passes in place.

        Raises
        ------
        CodecError
            ``tier.gate``: none does; what was made last lies there.
        """
        passed = self._attempt(self._recipe)
        if self._passes(passed):
            return self._passed(passed)
        ratios = self._ratios()
        if not ratios:
            raise self._failed(passed)
        passed = self._attempt(with_threshold(self._recipe, ratios[-1] + 1))
        if not self._passes(passed):
            raise self._failed(passed)
        return self._passed(self._halve(ratios, passed))

    def _halve(self, ratios: list[float], ratio: float) -> float:
        """Find fewer tensors that are enough; return the perplexity of the tier that is left in place."""
        fail = 0
        enough = len(ratios)
        made = len(ratios)
        for _ in range(ROUNDS):
            made = (fail + enough) // 2
            if made == fail:
                break
            tried = self._attempt(with_threshold(self._recipe, ratios[made]))
            if self._passes(tried):
                enough = made
                ratio = tried
            else:
                fail = made
        if made != enough:
            threshold = ratios[enough] if enough < len(ratios) else ratios[-1] + 1
            ratio = self._attempt(with_threshold(self._recipe, threshold))
        return ratio

    def _attempt(self, recipe: Recipe) -> float:
        self._make(recipe)
        self._made += 1
        return self._gate.perplexity(self._tier)

    def _passes(self, ratio: float) -> bool:
        return isfinite(ratio) and ratio <= self._reference * (1 + self._gate.max_rise)

    def _passed(self, ratio: float) -> Passed:
        return Passed(self._gate.text, self._gate.max_rise, self._reference, ratio, self._made)

    def _failed(self, ratio: float) -> CodecError:
        return CodecError(
            "tier.gate",
            f"expected a perplexity at most {100 * self._gate.max_rise:g} % above {self._reference:.4g}, found "
            f"{ratio:.4g} with the most bits that the tier may take; it was dropped: take a tier with more bits, or "
            "allow more",
            where=self._tier.display,
        )

    def _ratios(self) -> list[float]:
        """Return, rising, the signal-to-noise ratios of the tensors that could get more bits."""
        ratios_so_far: list[float] = []
        with open_checkpoint(self._source) as checkpoint:
            layers = count_layers(checkpoint)
            for name, tensor in checkpoint.items():
                measured = resolve(self._recipe, name, tensor.shape, tensor.dtype, layers).choice
                if not isinstance(measured, Measured) or measured.pick != ACCURATE:
                    continue
                ratio = trial_snr_db(tensor, measured.candidates[0])
                if ratio is not None and isfinite(ratio) and ratio >= (measured.min_snr_db or 0):
                    ratios_so_far.append(ratio)
        return sorted(ratios_so_far)


def with_threshold(recipe: Recipe, ratio: float) -> Recipe:
    """Return a recipe in which the first way of a measured rule has to keep ``ratio`` dB at least."""

    def raised(choice: Any) -> Any:
        if not isinstance(choice, Measured) or choice.min_snr_db is None:
            return choice
        return replace(choice, min_snr_db=max(ratio, choice.min_snr_db))

    return replace(recipe, rules=tuple(replace(rule, choice=raised(rule.choice)) for rule in recipe.rules))
