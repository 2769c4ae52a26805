"""The statistics of a quantization: the best that fit the time, with the estimate that the caller sees."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from ingot.artifacts.open import open_source
from ingot.conversion.choose_preset import Chosen
from ingot.errors import MissingExtraError, UsageError
from ingot.model.statistics import Statistics
from ingot.runtime.calibration.calibration import BUILT_IN, CalibrateOptions, CalibratePlan
from ingot.runtime.quantize.estimate import Estimate
from ingot.runtime.quantize.options import AUTO, FULL, IMPORTANCE, MODES, NONE, QuantizeOptions, parse_time
from ingot.stores.location import Location

LONG = 600.0
"""Seconds of work from which on ``confirm`` decides."""
_NEAREST = "nearest values, without statistics"

Rounding = Mapping[str, tuple[float, int]]
"""For each mode of calibration, the seconds and bytes of memory that rounding takes."""


class _TooLongError(Exception):
    """Raised to end a calibration that would exceed the time limit."""


def modes(mode: str, chosen: Chosen) -> tuple[str, ...]:
    """Return the modes of calibration to try, the best first."""
    if mode != AUTO:
        return (mode,)
    return (FULL, IMPORTANCE, NONE) if chosen.plain else (FULL, IMPORTANCE)


def get_statistics(
    options: QuantizeOptions, chosen: Chosen, mode: str, rounding: Rounding
) -> tuple[str, Statistics | None, str]:
    """Announce the estimate of the mode that is used, and collect or open its statistics.

    Returns the mode, its statistics (None for mode ``none``), and a text for the report.
    """
    if mode == NONE:
        return _without(options, rounding, _NEAREST)
    if str(options.calibration) not in MODES:
        _announce(options, Estimate(FULL, 0.0, *rounding[FULL]))
        location = Location.parse(options.calibration)
        with open_source(Location.parse(options.model)).view() as model:
            return FULL, Statistics.open(options.calibration, model), f"by the statistics of {location.display}"
    for candidate in (FULL, IMPORTANCE) if mode == AUTO else (mode,):
        try:
            statistics = _collect(options, candidate, rounding[candidate], limited=mode == AUTO)
        except _TooLongError:
            continue
        except MissingExtraError:
            if mode == AUTO and chosen.plain:
                return _without(options, rounding, f"{_NEAREST}: the extra transformers is not installed")
            raise
        source = statistics.metadata.get("source", "the model")
        measured = "statistics of inputs and gradients" if candidate == FULL else "importance of columns"
        return candidate, statistics, f"by {measured}, from {source}"
    if not chosen.plain:
        raise UsageError(
            f"no calibration fits the time, and {chosen.calibrated} has no form without; give more --time",
            rule="quantize.time",
        )
    return _without(options, rounding, f"{_NEAREST}: no calibration fits the time")


def _without(options: QuantizeOptions, rounding: Rounding, text: str) -> tuple[str, None, str]:
    _announce(options, Estimate(NONE, 0.0, *rounding[NONE]))
    return NONE, None, text


def _collect(options: QuantizeOptions, mode: str, rounding: tuple[float, int], *, limited: bool) -> Statistics:
    from ingot.runtime.calibration.calibrate import collect_statistics

    def check(plan: CalibratePlan) -> None:
        estimate = _estimate(mode, plan, rounding)
        if limited and options.time is not None and estimate.seconds > parse_time(options.time):
            raise _TooLongError
        is_long = limited and options.time is None and estimate.seconds > LONG
        if is_long and options.confirm is not None and not options.confirm(estimate):
            raise _TooLongError
        _announce(options, estimate)

    return collect_statistics(replace(_calibrate_options(options, mode), plan=check, progress=options.progress))


def _estimate(mode: str, plan: CalibratePlan, rounding: tuple[float, int]) -> Estimate:
    return Estimate(mode, plan.seconds, rounding[0], max(plan.memory, rounding[1]))


def _calibrate_options(options: QuantizeOptions, mode: str) -> CalibrateOptions:
    if mode == FULL:
        return CalibrateOptions(options.model, "", max_ram=options.max_ram)
    return CalibrateOptions(options.model, "", text=BUILT_IN, fisher=False, largest=1, max_ram=options.max_ram)


def estimate_statistics(options: QuantizeOptions, chosen: Chosen, mode: str, rounding: Rounding) -> Estimate:
    """Return the estimate that ``get_statistics`` would announce, without a calibration."""
    if mode == NONE or str(options.calibration) not in MODES:
        return Estimate(mode, 0.0, *rounding[mode])
    limit = parse_time(options.time) if options.time is not None else None
    estimate = None
    for candidate in modes(mode, chosen):
        if candidate == NONE:
            return Estimate(NONE, 0.0, *rounding[NONE])
        try:
            estimate = _estimate(candidate, _plan(options, candidate), rounding[candidate])
        except MissingExtraError:
            if mode != AUTO or not chosen.plain:
                raise
            return Estimate(NONE, 0.0, *rounding[NONE])
        if limit is None or estimate.seconds <= limit:
            return estimate
    assert estimate is not None
    return estimate


def _plan(options: QuantizeOptions, mode: str) -> CalibratePlan:
    """Return the plan of a calibration that is not run."""
    from ingot.runtime.calibration.calibrate import collect_statistics

    plans: list[CalibratePlan] = []

    def stop(plan: CalibratePlan) -> None:
        plans.append(plan)
        raise _TooLongError

    with suppress(_TooLongError):
        collect_statistics(replace(_calibrate_options(options, mode), plan=stop))
    return plans[0]


def _announce(options: QuantizeOptions, estimate: Estimate) -> None:
    if options.announce is not None:
        options.announce(estimate)
