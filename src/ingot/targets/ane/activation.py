"""Activation tables: the record of 43 half-precision numbers, built for a function and evaluated as the engine does.

The record (B25): two input clamps, a mode flag, a scale, 33 knots uniform over the domain, four tail coefficients, a
packed mode word. That is 42; the mode word is taken as 32 bits, two entries, which makes 43 and the 86 bytes of the
budget (``spec/ane-kernels.md``). Evaluation: the input is clamped and mapped affinely onto 32 segments, the integer
part selects one, the fraction interpolates in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import FormatError, UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[Array], Array]

ENTRIES, KNOTS, SEGMENTS = 43, 33, 32
_FINALISTS = 12  # domains that are evaluated in half precision over the whole interval
_LARGEST = float(np.finfo(np.float16).max)
CLAMP, TAILS = 0, 1
"""Mode flags of this record: outside the domain the end knot (B25), or the tail's line (inferred: see the spec)."""

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
"""Functions by name, in float64, and the interval over which a table is fitted by default; ``gelu`` is exact."""


@dataclass(frozen=True, eq=False)
class ActivationLut:
    """One record of float16 numbers: ``knots`` has shape [33], ``tails`` [4], slope and offset left, then right."""

    lo: np.float16
    hi: np.float16
    mode: int
    scale: np.float16
    knots: Array
    tails: Array

    def entries(self) -> Array:
        """Return the 43 entries, float16: lo, hi, mode, scale, knots, tails, mode word (low, high)."""
        head = np.array([self.lo, self.hi, self.mode, self.scale], np.float16)
        return np.concatenate([head, self.knots, self.tails, np.zeros(2, np.float16)]).astype(np.float16)

    def __call__(self, x: Any) -> Array:
        """Evaluate in float16, every operation rounded; NaN gives +inf, as measured on the engine (B3)."""
        x = np.asarray(x, np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            inside = np.where(np.isnan(x), self.lo, np.clip(x, self.lo, self.hi))
            place = np.minimum((inside - self.lo) * self.scale, np.float16(SEGMENTS))
            segment = np.minimum(place.astype(np.int64), SEGMENTS - 1)
            fraction = place - segment.astype(np.float16)
            step = self.knots[segment + 1] - self.knots[segment]
            y = self.knots[segment] + fraction * step
            if self.mode == TAILS:
                y = np.where(x < self.lo, self.tails[0] * x + self.tails[1], y)
                y = np.where(x > self.hi, self.tails[2] * x + self.tails[3], y)
        return np.where(np.isnan(x), np.float16(np.inf), y).astype(np.float16)


def read_lut(entries: Array) -> ActivationLut:
    """Return the record of 43 float16 entries.

    Raises
    ------
    FormatError
        ``ane.lut``: another number of entries, a value that is not finite, an unknown mode, an empty domain, or a scale
        that does not spread the domain over the 32 segments.
    """
    if entries.shape != (ENTRIES,) or entries.dtype != np.float16:
        raise _wrong(f"{ENTRIES} entries of float16", f"{entries.shape} of {entries.dtype}")
    if not np.isfinite(entries).all():
        raise _wrong("finite entries", "one that is not")
    lo, hi, mode, scale = entries[:4]
    if mode not in (CLAMP, TAILS) or entries[-2:].any():
        raise _wrong("mode 0 or 1 and a mode word of 0", f"{mode} and {entries[-2:]}")
    if not (hi > lo and scale > 0 and abs(float(scale) * (float(hi) - float(lo)) / SEGMENTS - 1) < 0.01):
        raise _wrong("a domain that the scale spreads over 32 segments", f"{lo} to {hi}, scale {scale}")
    return ActivationLut(lo, hi, int(mode), scale, entries[4:37].copy(), entries[37:41].copy())


def _wrong(expected: str, found: str) -> FormatError:
    return FormatError("ane.lut", f"expected {expected}, found {found}")


@dataclass(frozen=True, eq=False)
class Fitted:
    """A record with its error over every float16 of the interval: largest, where, and RMS."""

    lut: ActivationLut
    interval: tuple[float, float]
    max_error: float
    worst_x: float
    rms_error: float


def fit_lut(
    function: str | Function, interval: tuple[float, float] | None = None, domain: tuple[float, float] | None = None
) -> Fitted:
    """Build the record of a function with the least largest error over ``interval``.

    Parameters
    ----------
    function : str or callable
        A name in ``FUNCTIONS``, or a function from and to arrays of float64.
    interval : (float, float), optional
        Inputs that matter; that of ``FUNCTIONS`` by default.
    domain : (float, float), optional
        Where the knots lie; fitted by default, by trying domains within the interval on finer and finer grids.

    Raises
    ------
    UsageError
        ``ane.function``: an unknown name, an interval that is empty or no float16, or a function that is not finite
        on it.
    """
    call, interval = _resolve(function, interval)
    inputs = _halves(*interval)
    wanted = np.asarray(call(inputs.astype(np.float64)), np.float64)
    if wanted.shape != inputs.shape or not (np.abs(wanted) <= _LARGEST).all():
        raise UsageError("expected a function with float16 values on the interval, found others", rule="ane.function")
    domains = [domain] if domain is not None else _search(call, interval, inputs, wanted)
    made = [lut for pair in domains for lut in _records(call, interval, *pair)]
    if not made:
        raise UsageError("expected a domain of float16 numbers with room for 32 segments", rule="ane.function")
    errors = [np.abs(lut(inputs).astype(np.float64) - wanted) for lut in made]
    best = min(range(len(made)), key=lambda index: (float(errors[index].max()), made[index].mode, index))
    error = errors[best]
    worst = int(error.argmax())
    return Fitted(
        made[best], interval, float(error[worst]), float(inputs[worst]), float(np.sqrt(np.mean(np.square(error))))
    )


def _resolve(function: str | Function, interval: tuple[float, float] | None) -> tuple[Function, tuple[float, float]]:
    if isinstance(function, str):
        if function not in FUNCTIONS:
            raise UsageError(f"expected a function ({', '.join(FUNCTIONS)}), found {function!r}", rule="ane.function")
        call, usual = FUNCTIONS[function]
    else:
        call, usual = function, None
    pair = interval or usual
    if pair is None or not (-_LARGEST <= pair[0] < pair[1] <= _LARGEST):
        raise UsageError(f"expected an interval of float16 numbers, found {pair}", rule="ane.function")
    return call, (float(pair[0]), float(pair[1]))


def _halves(low: float, high: float) -> Array:
    """Return every finite float16 from low to high, ascending."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    inside = every[np.isfinite(every) & (every >= low) & (every <= high)]
    return np.unique(inside.astype(np.float32)).astype(np.float16)


def _search(call: Function, interval: tuple[float, float], inputs: Array, wanted: Array) -> list[tuple[float, float]]:
    """Return the most promising domains of nested grids: 20 x 20, then three times 7 x 7 around the best so far.

    They are scored without the roundings of the evaluation, which is left to the caller.
    """
    few = inputs[:: max(1, len(inputs) // 1024)].astype(np.float64)
    sample = wanted[:: max(1, len(wanted) // 1024)]
    (low, high), scored = interval, dict[tuple[float, float], float]()
    step = (high - low) / 40
    lows, highs = low + step * np.arange(20), high - step * np.arange(20)
    for _ in range(4):
        for pair in ((float(lo), float(hi)) for lo in lows for hi in highs if low <= lo < hi <= high):
            errors = [float(np.abs(_unrounded(lut, few) - sample).max()) for lut in _records(call, interval, *pair)]
            scored[pair] = min(errors, default=math.inf)
        best = min(scored, key=lambda pair: (scored[pair], pair), default=interval)
        step /= 3
        lows, highs = best[0] + step * np.arange(-3, 4), best[1] + step * np.arange(-3, 4)
    return [*sorted(scored, key=lambda pair: (scored[pair], pair))[:_FINALISTS], interval]


def _unrounded(lut: ActivationLut, x: Array) -> Array:
    places = float(lut.lo) + np.arange(KNOTS) / float(lut.scale)
    y: Array = np.interp(x, places, lut.knots.astype(np.float64))
    if lut.mode == TAILS:
        tails = lut.tails.astype(np.float64)
        y = np.where(x < places[0], tails[0] * x + tails[1], y)
        y = np.where(x > places[-1], tails[2] * x + tails[3], y)
    return y


def _records(call: Function, interval: tuple[float, float], low: float, high: float) -> list[ActivationLut]:
    """Return records over one domain: knots on the curve or balanced around it, ends clamped or with lines."""
    lo, scale = np.float16(low), np.float16(SEGMENTS / max(high - low, 1e-9))
    if not (np.isfinite(scale) and scale > 0):
        return []
    places = np.float64(lo) + np.arange(2 * KNOTS - 1) / 2 / np.float64(scale)
    hi = np.float16(places[-1])
    with np.errstate(all="ignore"):
        curve = np.asarray(call(places), np.float64)
    if not (hi > lo and np.isfinite(hi) and (np.abs(curve) <= _LARGEST).all()):
        return []
    on_curve = curve[::2]
    bulge = curve[1::2] - (on_curve[:-1] + on_curve[1:]) / 2  # how far a segment's middle is off its chord
    balanced = on_curve + np.concatenate([bulge[:1], (bulge[:-1] + bulge[1:]) / 2, bulge[-1:]]) / 2
    found = []
    for knots in (on_curve, balanced):
        halves = knots.astype(np.float16)
        tails = _tails(call, interval, (float(lo), float(hi)), halves)
        found += [ActivationLut(lo, hi, mode, scale, halves, tails) for mode in (CLAMP, TAILS)]
    return found


def _tails(call: Function, interval: tuple[float, float], domain: tuple[float, float], knots: Array) -> Array:
    """Return slope and offset of the chords from the domain's ends to the interval's, through the end knots."""
    found = []
    for far, end, knot in ((interval[0], domain[0], knots[0]), (interval[1], domain[1], knots[-1])):
        run = far - end
        value = float(np.asarray(call(np.array([far])), np.float64)[0])
        steep = (value - float(knot)) / run if run else 0.0
        # A run of a few roundings says nothing of the curve beyond it.
        slope = np.float16(steep if abs(steep) * max(abs(end), 1.0) < _LARGEST / 2 else 0.0)
        found += [slope, np.float16(float(knot) - float(slope) * end)]
    return np.array(found, np.float16)
