"""Search for a recipe of a packed tier that passes a quality gate, with more bits for the most sensitive tensors."""

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
"""Number of bisection steps after the first two attempts, over the number of tensors with more bits."""


class Gate(Protocol):
    """A measurement of a model's quality; ``ingot.ext.squish.gate.PerplexityGate`` implements it.

    ``text`` identifies the measurement, so that results of earlier builds can be compared. ``max_rise`` is the limit on
    the relative rise of the perplexity over that of the source tensors.
    """

    @property
    def text(self) -> str: ...

    @property
    def max_rise(self) -> float: ...

    def reference(self) -> float:
        """Return the perplexity of the source tensors."""
        ...

    def perplexity(self, tier: Location) -> float:
        """Return the perplexity of the weights at the location ``tier``."""
        ...


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of a gate for a tier: the perplexities of the source and of the tier.

    ``text`` identifies the measurement, ``max_rise`` is the limit, and ``rounds`` the number of times the tier was
    built.
    """

    text: str
    max_rise: float
    reference: float
    perplexity: float
    rounds: int

    @property
    def rise(self) -> float:
        """Relative rise of the perplexity over that of the source tensors."""
        return self.perplexity / self.reference - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def gate_result_from_json(value: Any) -> GateResult | None:
    """Return the result from data of ``GateResult.to_json``; None for any other data."""
    if not isinstance(value, dict) or set(value) != set(GateResult.__dataclass_fields__):
        return None
    numbers = [value[name] for name in ("max_rise", "reference", "perplexity")]
    if not all(isinstance(number, float) and isfinite(number) and number >= 0 for number in numbers):
        return None
    if not isinstance(value["text"], str) or type(value["rounds"]) is not int or not value["reference"]:
        return None
    return GateResult(**value)


class Search:
    """Builds a tier several times, to find one that passes its gate with few additional bits.

    The first attempt uses ``recipe``, which gives more bits to tensors with large errors. If it fails, the second
    attempt gives more bits to every tensor for which the recipe has candidates. If it fails too, the search fails.
    Otherwise a bisection of ``ROUNDS`` steps looks for a smaller number of tensors with more bits. Tensors with the
    lowest signal-to-noise ratio get them first.

    Parameters
    ----------
    source : Location
        The source tensors.
    recipe : Recipe
        Recipe of the tier.
    make : callable
        Function that converts the source to ``tier`` by a recipe.
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
        self._build_count = 0

    def run(self) -> GateResult:
        """Run the search; return the gate's result for the tier that remains on the disk.

        Raises
        ------
        CodecError
            ``tier.gate``: no attempt passes. The tier of the last attempt remains on the disk.
        """
        perplexity = self._attempt(self._recipe)
        if self._passes(perplexity):
            return self._passed(perplexity)
        ratios = self._ratios()
        if not ratios:
            raise self._failed(perplexity)
        perplexity = self._attempt(with_threshold(self._recipe, ratios[-1] + 1))
        if not self._passes(perplexity):
            raise self._failed(perplexity)
        return self._passed(self._halve(ratios, perplexity))

    def _halve(self, ratios: list[float], best_perplexity: float) -> float:
        """Find a smaller number of tensors with more bits for which the tier passes.

        Returns the perplexity of the tier that remains on the disk.
        """
        too_few = 0
        enough = len(ratios)
        count = len(ratios)
        for _ in range(ROUNDS):
            count = (too_few + enough) // 2
            if count == too_few:
                break
            perplexity = self._attempt(with_threshold(self._recipe, ratios[count]))
            if self._passes(perplexity):
                enough = count
                best_perplexity = perplexity
            else:
                too_few = count
        if count != enough:
            threshold = ratios[enough] if enough < len(ratios) else ratios[-1] + 1
            best_perplexity = self._attempt(with_threshold(self._recipe, threshold))
        return best_perplexity

    def _attempt(self, recipe: Recipe) -> float:
        self._make(recipe)
        self._build_count += 1
        return self._gate.perplexity(self._tier)

    def _passes(self, perplexity: float) -> bool:
        return isfinite(perplexity) and perplexity <= self._reference * (1 + self._gate.max_rise)

    def _passed(self, perplexity: float) -> GateResult:
        return GateResult(self._gate.text, self._gate.max_rise, self._reference, perplexity, self._build_count)

    def _failed(self, perplexity: float) -> CodecError:
        return CodecError(
            "tier.gate",
            f"expected a perplexity at most {100 * self._gate.max_rise:g} % above {self._reference:.4g}, found "
            f"{perplexity:.4g} with the most bits that the tier may have; it was removed: use a tier with more bits, "
            "or allow a larger rise",
            where=self._tier.display,
        )

    def _ratios(self) -> list[float]:
        """Return the signal-to-noise ratios of the tensors that could get more bits, in ascending order."""
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
    """Return a recipe whose rules accept a candidate only if its signal-to-noise ratio is at least ``ratio`` dB."""

    def with_min_snr(choice: Any) -> Any:
        if not isinstance(choice, Measured) or choice.min_snr_db is None:
            return choice
        return replace(choice, min_snr_db=max(ratio, choice.min_snr_db))

    return replace(recipe, rules=tuple(replace(rule, choice=with_min_snr(rule.choice)) for rule in recipe.rules))
