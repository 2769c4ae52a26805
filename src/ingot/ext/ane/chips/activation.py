"""Activation tables: fit the 43 half-precision numbers for a function, and evaluate them as the engine does.

The record in a compiled program (TG; B25 names the fields) has two input clamps, a shift (0 in that program), a scale,
and 33 knots. Then follow slope and offset of a line on the left, slope and offset of a line on the right, and two mode
words of 1. ``u = scale * x + shift`` maps the domain of the knots onto -8 to 8, with a knot at every multiple of 0.5.
For inputs outside the domain the values are on the two lines. The clamps limit the input before
(``spec/ane-kernels.md``). With this evaluation, the compiled table of a sigmoid has an error of 0.0034, equal to the
measured error (B3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import FormatError, UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[Array], Array]

ENTRIES = 43
KNOTS = 33
SEGMENTS = 32
# Numbers of inputs of the coarse and of the fine evaluation of a domain.
_SAMPLES = (512, 8192)
_BATCH = 32
# Number of times that the step of the grid is halved, and number of best domains that are refined.
_REFINEMENTS = 6
_BEST = 6
_LARGEST = float(np.finfo(np.float16).max)
_REACH = 8  # the knots are at u from -8 to 8
_MODE_WORD = 1
CLAMP = "clamp"
LINE = "line"
OUTSIDE: Mapping[str, tuple[str, ...]] = {CLAMP: (CLAMP,), LINE: (LINE,), "best": (CLAMP, LINE)}
"""The modes that each value of ``outside`` in ``fit_lut`` tries.

A mode is the rule for inputs outside the knots: the values of the end knots, or the two lines.
"""

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


FUNCTIONS: Mapping[str, tuple[Function, tuple[float, float]]] = {
    "sigmoid": (_sigmoid, (-10.0, 10.0)),
    "tanh": (np.tanh, (-6.0, 6.0)),
    "gelu": (lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))), (-10.0, 10.0)),
    "silu": (lambda x: x * _sigmoid(x), (-16.0, 16.0)),
    "exp": (np.exp, (-10.0, 0.0)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (0.25, 4.0)),
}
"""Functions in float64 and their default fitting intervals, by name; ``gelu`` is the exact form, with erf."""


@dataclass(frozen=True, eq=False)
class ActivationLut:
    """An activation table in float16. ``knots`` has shape [33]; ``tails`` has shape [4]: slope and offset of the left
    line, then of the right line.

    ``lo`` and ``hi`` clamp the input; ``shift`` and ``scale`` map it onto the knots.
    """

    lo: np.float16
    hi: np.float16
    shift: np.float16
    scale: np.float16
    knots: Array
    tails: Array

    @property
    def knot_inputs(self) -> Array:
        """The inputs x at which the 33 knots are, float64."""
        return _knot_inputs(self.shift, self.scale, KNOTS)

    @property
    def outside(self) -> str:
        """The values for inputs outside the knots: ``clamp`` if the input clamps are at the end knots, else
        ``line``.
        """
        ends = self.knot_inputs[[0, -1]].astype(np.float16)
        return CLAMP if (self.lo, self.hi) == tuple(ends) else LINE

    def entries(self) -> Array:
        """Return the table as 43 float16 entries: lo, hi, shift, scale, knots, tails, two mode words."""
        head = np.array([self.lo, self.hi, self.shift, self.scale], np.float16)
        words = np.full(2, _MODE_WORD, np.uint16).view(np.float16)
        return np.concatenate([head, self.knots, self.tails, words]).astype(np.float16)

    def __call__(self, x: Any) -> Array:
        """Return the values of the table for ``x``, in float16 with rounding after each operation.

        The value for NaN is +inf, as measured on the engine (B3).
        """
        x = np.asarray(x, np.float16)
        y: Array = _evaluate([self], x.reshape(-1))[0].astype(np.float16)
        return y.reshape(x.shape)


def _knot_inputs(shift: np.float16, scale: np.float16, count: int) -> Array:
    u = np.linspace(-_REACH, _REACH, count)
    return (u - np.float64(shift)) / np.float64(scale)


def _evaluate(records: Sequence[ActivationLut], x: Array) -> Array:
    """Return the values of several tables for float16 ``x``, as float32 [records, len(x)].

    All tables must have the same shift and scale.

    Every result is a float16 number. Sums, differences and products of two float16 numbers are computed in float32 and
    rounded to float16. The results are the same as in float16 arithmetic, because float32 has more than twice the
    digits.
    """
    wide = x.astype(np.float32)
    first = records[0]
    values = np.empty((len(records), len(x)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        unclamped = _half(_half(np.clip(wide, -_LARGEST, _LARGEST) * np.float32(first.scale)) + np.float32(first.shift))
        position_on_knots = np.clip(np.where(np.isnan(wide), 0, unclamped), -_REACH, _REACH)
        segment = np.clip(np.floor(2 * position_on_knots) + SEGMENTS // 2, 0, SEGMENTS - 1).astype(np.int64)
        fraction = 2 * position_on_knots + SEGMENTS // 2 - segment.astype(np.float32)  # exact in float32
        for y, record in zip(values, records, strict=True):
            knots = record.knots.astype(np.float32)
            tails = record.tails.astype(np.float32)
            left_knots = knots[segment]
            y[...] = _half(left_knots + _half(fraction * _half(knots[segment + 1] - left_knots)))
            clamped = np.clip(wide, np.float32(record.lo), np.float32(record.hi))
            position = _half(_half(clamped * np.float32(record.scale)) + np.float32(record.shift))
            for beyond, slope, offset in ((position < -_REACH, *tails[:2]), (position > _REACH, *tails[2:])):
                y[beyond] = _half(_half(slope * clamped[beyond]) + offset)
            y[np.isnan(wide)] = np.inf
    return values


def _half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


def read_lut(entries: Array) -> ActivationLut:
    """Return the record of 43 float16 entries.

    Raises
    ------
    FormatError
        ``ane.lut``: another number of entries, a value that is not finite, mode words other than 1, a lower clamp that
        is not below the upper clamp, or a scale that is not above 0.
    """
    if entries.shape != (ENTRIES,) or entries.dtype != np.float16:
        raise _lut_error(f"{ENTRIES} entries of float16", f"{entries.shape} of {entries.dtype}")
    if not np.isfinite(entries).all():
        raise _lut_error("finite entries", "NaN or infinity")
    lo, hi, shift, scale = entries[:4]
    words = entries[-2:].view(np.uint16)
    if (words != _MODE_WORD).any():
        raise _lut_error(f"mode words of {_MODE_WORD}", f"{words}")
    if not (hi > lo and scale > 0):
        raise _lut_error("an interval and a scale above 0", f"{lo} to {hi}, scale {scale}")
    return ActivationLut(lo, hi, shift, scale, entries[4:37].copy(), entries[37:41].copy())


def _lut_error(expected: str, actual: str) -> FormatError:
    return FormatError("ane.lut", f"expected {expected}, found {actual}")


@dataclass(frozen=True, eq=False)
class Fitted:
    """A table, and its errors over all float16 inputs of the interval: the largest error, the input at which it occurs,
    and the RMS.
    """

    lut: ActivationLut
    interval: tuple[float, float]
    max_error: float
    worst_x: float
    rms_error: float


def fit_lut(
    function: str | Function,
    interval: tuple[float, float] | None = None,
    domain: tuple[float, float] | None = None,
    outside: str = "clamp",
) -> Fitted:
    """Return the table of a function whose largest error over ``interval``, evaluated as on the engine, is minimal.

    Parameters
    ----------
    function : str or callable
        A name in ``FUNCTIONS``, or a function from and to arrays of float64.
    interval : (float, float), optional
        Inputs over which the error is minimized; by default the interval in ``FUNCTIONS``.
    domain : (float, float), optional
        Interval of the knots. By default it is fitted: domains within the interval are tried on increasingly fine
        grids, and the domain with the smallest maximum error in half precision is used.
    outside : str
        Values for inputs outside the domain. ``clamp``: the values of the end knots, as published (B25). ``line``:
        values on the two lines (inferred). ``best``: the better of these two.

    Raises
    ------
    UsageError
        ``ane.function``: an unknown name, an interval that is empty or exceeds float16, a function that is not finite
        on the interval, or an unknown ``outside``.
    """
    call, interval = _resolve(function, interval)
    if outside not in OUTSIDE:
        raise UsageError(f"expected {', '.join(OUTSIDE)} outside the domain, found {outside!r}", rule="ane.function")
    inputs = _halves(*interval)
    exact = np.asarray(call(inputs.astype(np.float64)), np.float64)
    if exact.shape != inputs.shape or not (np.abs(exact) <= _LARGEST).all():
        raise UsageError("expected a function with float16 values on the interval, found others", rule="ane.function")
    domains = _Domains(call, interval, OUTSIDE[outside], inputs, exact)
    if domain is None:
        domains.search()
    else:
        domains.add(*domain)
    best = domains.best()
    if best is None:
        raise UsageError("expected a domain of float16 numbers with room for 32 segments", rule="ane.function")
    error = np.abs(best(inputs).astype(np.float64) - exact)
    worst = int(error.argmax())
    return Fitted(best, interval, float(error[worst]), float(inputs[worst]), float(np.sqrt(np.mean(np.square(error)))))


def _resolve(function: str | Function, interval: tuple[float, float] | None) -> tuple[Function, tuple[float, float]]:
    if isinstance(function, str):
        if function not in FUNCTIONS:
            raise UsageError(f"expected a function ({', '.join(FUNCTIONS)}), found {function!r}", rule="ane.function")
        call, usual = FUNCTIONS[function]
    else:
        call = function
        usual = None
    pair = interval or usual
    if pair is None or not (-_LARGEST <= pair[0] < pair[1] <= _LARGEST):
        raise UsageError(f"expected an interval of float16 numbers, found {pair}", rule="ane.function")
    return call, (float(pair[0]), float(pair[1]))


def _halves(low: float, high: float) -> Array:
    """Return every finite float16 number from ``low`` to ``high``, ascending."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    inside = every[np.isfinite(every) & (every >= low) & (every <= high)]
    return np.unique(inside.astype(np.float32)).astype(np.float16)


class _Domains:
    """The domains of knots that were tried.

    For each domain, the tables over it are evaluated for a sample of the inputs, and the smallest of their largest
    errors is stored.

    This error is a lower bound of the error over all inputs. So the best domain is found without evaluating every
    domain for all inputs.
    """

    def __init__(
        self, call: Function, interval: tuple[float, float], modes: tuple[str, ...], inputs: Array, exact: Array
    ) -> None:
        self._call = call
        self._interval = interval
        self._modes = modes
        self._inputs = inputs
        self._exact = exact
        # Samples are evenly spaced over the interval: most float16 numbers are near 0, the errors are not.
        self._coarse, self._fine = (
            np.unique(
                np.searchsorted(inputs, np.linspace(*interval, count).astype(np.float16)).clip(0, inputs.size - 1)
            )
            for count in _SAMPLES
        )
        self._bounds: dict[tuple[float, float], float] = {}

    def add(self, low: float, high: float) -> float:
        """Try a domain; return the lower bound of its error."""
        pair = (low, high)
        if pair not in self._bounds:
            self._bounds[pair] = self._smallest_error(self._records_over(pair), self._coarse)[0]
        return self._bounds[pair]

    def search(self) -> None:
        """Try domains whose ends are on grids: first a 20 x 20 grid, then multiples of a power of two.

        Then try ever finer 5 x 5 grids around the best domains.
        """
        low, high = self._interval
        step = (high - low) / 40
        self.add(low, high)
        self._grid(low + step * np.arange(20), high - step * np.arange(20))
        # In these domains the knots' inputs are exact in half precision; even grids would miss them.
        unit = 2.0 ** math.floor(math.log2((high - low) / 16))
        ends = unit * np.arange(math.ceil(low / unit), math.floor(high / unit) + 1)
        self._grid(ends, ends)
        for _ in range(_REFINEMENTS):
            step /= 2
            for lo, hi in sorted(self._bounds, key=lambda pair: (self._bounds[pair], pair))[:_BEST]:
                self._grid(lo + step * np.arange(-2, 3), hi + step * np.arange(-2, 3))

    def _grid(self, lows: Array, highs: Array) -> None:
        for lo in lows:
            for hi in highs:
                if self._interval[0] <= lo < hi <= self._interval[1]:
                    self.add(float(lo), float(hi))

    def best(self) -> ActivationLut | None:
        """Return the table with the smallest maximum error over all inputs, among the tables over all tried domains.

        Return None if no domain was tried.
        """
        least_error = math.inf
        chosen = None
        by_bound = sorted((bound, pair) for pair, bound in self._bounds.items() if bound < math.inf)
        for start in range(0, len(by_bound), _BATCH):  # in batches, to evaluate few domains in vain
            batch = [pair for bound, pair in by_bound[start : start + _BATCH] if bound < least_error]
            by_second_bound = sorted(
                (self._smallest_error(self._records_over(pair), self._fine)[0], pair) for pair in batch
            )
            for bound, pair in by_second_bound:
                error, record = (
                    self._smallest_error(self._records_over(pair), None) if bound < least_error else (math.inf, None)
                )
                if error < least_error:
                    least_error = error
                    chosen = record
        return chosen

    def _records_over(self, pair: tuple[float, float]) -> list[ActivationLut]:
        return _records(self._call, self._interval, pair, self._modes)

    def _smallest_error(
        self, records: list[ActivationLut], selected: Array | None
    ) -> tuple[float, ActivationLut | None]:
        """Return the smallest maximum error among ``records``, and the record that has it.

        ``selected`` are the indices of the inputs to evaluate; None for all inputs.
        """
        if not records:
            return math.inf, None
        inputs, exact = (
            (self._inputs, self._exact) if selected is None else (self._inputs[selected], self._exact[selected])
        )
        errors = np.abs(_evaluate(records, inputs) - exact).max(axis=1)
        index = int(errors.argmin())
        return float(errors[index]), records[index]


def _records(
    call: Function, interval: tuple[float, float], domain: tuple[float, float], modes: tuple[str, ...]
) -> list[ActivationLut]:
    """Return the tables to try over one domain.

    For each mode there are two tables: one with knots on the curve, and one with knots that are shifted to balance
    errors.
    """
    scale = np.float16(2 * _REACH / max(domain[1] - domain[0], 1e-9))
    shift = np.float16(-_REACH - domain[0] * float(scale)) if domain[0] != -domain[1] else np.float16(0)
    if not (np.isfinite(scale) and scale > 0 and np.isfinite(shift)):
        return []
    knot_inputs = _knot_inputs(shift, scale, 2 * KNOTS - 1)
    lo, hi = knot_inputs[[0, -1]].astype(np.float16)
    with np.errstate(all="ignore"):
        curve = np.asarray(call(knot_inputs), np.float64)
    if not (hi > lo and np.isfinite(hi) and (np.abs(curve) <= _LARGEST).all()):
        return []
    on_curve = curve[::2]
    bulge = curve[1::2] - (on_curve[:-1] + on_curve[1:]) / 2  # distance of a segment's middle from its chord
    balanced = on_curve + np.concatenate([bulge[:1], (bulge[:-1] + bulge[1:]) / 2, bulge[-1:]]) / 2
    far = tuple(np.float16(end) for end in interval)
    luts = []
    for knots in (on_curve, balanced):
        halves = knots.astype(np.float16)
        for mode in modes:
            ends = (lo, hi) if mode == CLAMP else (min(far[0], lo), max(far[1], hi))
            level = np.array([0, halves[0], 0, halves[-1]], np.float16)
            tails = (
                level
                if mode == CLAMP
                else _tails(call, interval, (float(knot_inputs[0]), float(knot_inputs[-1])), halves)
            )
            luts.append(ActivationLut(*ends, shift, scale, halves, tails))
    return luts


def _tails(call: Function, interval: tuple[float, float], domain: tuple[float, float], knots: Array) -> Array:
    """Return slope and offset of the left line and of the right line, outside the knots.

    Each line goes through the end knot and through the function's value at the end of the interval.
    """
    errors = []
    for far, end, knot in ((interval[0], domain[0], knots[0]), (interval[1], domain[1], knots[-1])):
        run = far - end
        value = float(np.asarray(call(np.array([far])), np.float64)[0])
        steep = (value - float(knot)) / run if run else 0.0
        # Over a distance of a few rounding steps the slope is meaningless.
        slope = np.float16(steep if abs(steep) * max(abs(end), 1.0) < _LARGEST / 2 else 0.0)
        errors += [slope, np.float16(float(knot) - float(slope) * end)]
    return np.array(errors, np.float16)
