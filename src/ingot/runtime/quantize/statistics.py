"""Choose the statistics of a quantization: the most exact mode that fits the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ingot.artifacts.open import open_source
from ingot.conversion.choose_preset import Chosen
from ingot.conversion.estimate import Estimate
from ingot.errors import MissingExtraError, UsageError
from ingot.model.calibration import Calibration
from ingot.model.statistics import Statistics
from ingot.runtime.calibration.calibration import BUILT_IN, CalibrateOptions, CalibratePlan
from ingot.runtime.quantize.options import (
    AUTO,
    FULL,
    GPTQ,
    GRADES,
    IMPORTANCE,
    MODES,
    NONE,
    QuantizeOptions,
    parse_time,
)
from ingot.stores.location import Location

if TYPE_CHECKING:
    from ingot.runtime.calibration.calibrate import ModelCalibration

LONG = 600.0
"""Seconds of work above which ``confirm`` decides."""
_NEAREST = "nearest values, without statistics"
NO_EXTRA = "the extra transformers, which calibrates, is not installed"
_STATISTICS = {
    FULL: "statistics of inputs and gradients",
    GPTQ: "second moments of inputs",
    IMPORTANCE: "importance of columns",
}

Rounding = Mapping[str, tuple[float, int]]
"""Seconds and bytes of memory that rounding needs, by mode of calibration."""


def modes(mode: str, chosen: Chosen) -> tuple[str, ...]:
    """Return the modes of calibration to try, the most exact first."""
    if mode != AUTO:
        return (mode,)
    return (*GRADES, NONE) if chosen.plain else GRADES


def get_statistics(
    options: QuantizeOptions, chosen: Chosen, mode: str, rounding: Rounding
) -> tuple[str, Statistics | Calibration | None, str]:
    """Choose a mode, announce its estimate, and open its statistics or return a calibration to run.

    Returns the mode, its statistics or calibration (None for mode ``none``), and a text for the report.
    """
    if mode == NONE:
        return _without(options, rounding, _NEAREST)
    if str(options.calibration) not in MODES:
        _announce(options, Estimate(FULL, 0.0, *rounding[FULL]))
        location = Location.parse(options.calibration)
        with open_source(Location.parse(options.model)).view() as model:
            return FULL, Statistics.open(options.calibration, model), f"by the statistics of {location.display}"
    for candidate in GRADES if mode == AUTO else (mode,):
        calibration = _calibration(options, candidate)
        try:
            plan = calibration.plan()
        except MissingExtraError:
            if mode == AUTO and chosen.plain:
                return _without(options, rounding, f"{_NEAREST}: {NO_EXTRA}")
            raise
        estimate = _estimate(candidate, plan, rounding[candidate])
        if mode == AUTO and not _fits(options, estimate):
            continue
        _announce(options, estimate)
        return candidate, calibration, f"by {_STATISTICS[candidate]}, from {plan.source}"
    if not chosen.plain:
        raise UsageError(
            f"no calibration fits the time, and {chosen.calibrated} has no form without; give more --time",
            rule="quantize.time",
        )
    return _without(options, rounding, f"{_NEAREST}: no calibration fits the time")


def _without(options: QuantizeOptions, rounding: Rounding, text: str) -> tuple[str, None, str]:
    _announce(options, Estimate(NONE, 0.0, *rounding[NONE]))
    return NONE, None, text


def _fits(options: QuantizeOptions, estimate: Estimate) -> bool:
    """Return whether the estimate fits ``time``; without ``time``, whether it is short or the caller confirms it."""
    if options.time is not None:
        return estimate.seconds <= parse_time(options.time)
    return estimate.seconds <= LONG or options.confirm is None or options.confirm(estimate)


def _estimate(mode: str, plan: CalibratePlan, rounding: tuple[float, int]) -> Estimate:
    return Estimate(mode, plan.seconds, rounding[0], max(plan.memory, rounding[1]), plan.disk)


def _calibration(options: QuantizeOptions, mode: str) -> ModelCalibration:
    """Return the calibration of the model for a mode, without running it."""
    from ingot.runtime.calibration.calibrate import ModelCalibration

    settings = CalibrateOptions(
        options.model,
        "",
        max_ram=options.max_ram,
        progress=options.progress,
        device=options.device,
        fisher=mode == FULL,
        text_if_large=True,
    )
    if mode == IMPORTANCE:
        settings = replace(settings, text=BUILT_IN, largest=1)
    return ModelCalibration(settings)


def estimate_statistics(options: QuantizeOptions, chosen: Chosen, mode: str, rounding: Rounding) -> Estimate:
    """Return the estimate that ``get_statistics`` announces, without calibrating."""
    if mode == NONE or str(options.calibration) not in MODES:
        return Estimate(mode, 0.0, *rounding[mode])
    limit = parse_time(options.time) if options.time is not None else None
    estimate = None
    for candidate in modes(mode, chosen):
        if candidate == NONE:
            return Estimate(NONE, 0.0, *rounding[NONE])
        try:
            estimate = _estimate(candidate, _calibration(options, candidate).plan(), rounding[candidate])
        except MissingExtraError:
            if mode != AUTO or not chosen.plain:
                raise
            return Estimate(NONE, 0.0, *rounding[NONE])
        if limit is None or estimate.seconds <= limit:
            return estimate
    assert estimate is not None
    return estimate


def _announce(options: QuantizeOptions, estimate: Estimate) -> None:
    if options.announce is not None:
        options.announce(estimate)
