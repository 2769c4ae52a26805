"""Activation tables: the record of 43 half-precision numbers, built for a function and evaluated as the engine does.

The record, as a compiled program has it (TG; B25 names the fields): two input clamps, a word that is 0 there, a
scale, 33 knots, slope and offset of a line to the left of them and to the right, two mode words of 1. ``u = scale * x
+ shift`` maps the knots' domain onto -8 to 8, where a knot stands at every half; beyond it the lines hold, up to the
clamps (``spec/ane-kernels.md``). Evaluated so, the compiled table of a sigmoid errs by 0.0034, which is what was
measured (B3).
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
# inputs of the first and the second look at a domain
_SAMPLES = (512, 8192)
_BATCH = 32
# how often grids are halved, and around how many of the best domains
_REFINEMENTS = 6
_BEST = 6
_LARGEST = float(np.finfo(np.float16).max)
_REACH = 8  # of u: the knots stand from -8 to 8
_MODE_WORD = 1
CLAMP = "clamp"
LINE = "line"
OUTSIDE: Mapping[str, tuple[str, ...]] = {CLAMP: (CLAMP,), LINE: (LINE,), "best": (CLAMP, LINE)}
"""What may hold beyond the knots, by the name that ``fit_lut`` takes: the end knots, lines, or whichever errs less."""

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
    """One record of float16 numbers: ``knots`` has shape [33], ``tails`` [4], slope and offset left, then right.

    ``lo`` and ``hi`` clamp the input; ``shift`` and ``scale`` map it onto the knots.
    """

    lo: np.float16
    hi: np.float16
    shift: np.float16
    scale: np.float16
    knots: Array
    tails: Array

    @property
    def places(self) -> Array:
        """Inputs at which the 33 knots stand, float64."""
        return _places(self.shift, self.scale, KNOTS)

    @property
    def outside(self) -> str:
        """``clamp`` where the clamps are at the end knots, else ``line``."""
        ends = self.places[[0, -1]].astype(np.float16)
        return CLAMP if (self.lo, self.hi) == tuple(ends) else LINE

    def entries(self) -> Array:
        """Return the 43 entries, float16: lo, hi, shift, scale, knots, tails, two mode words."""
        head = np.array([self.lo, self.hi, self.shift, self.scale], np.float16)
        words = np.full(2, _MODE_WORD, np.uint16).view(np.float16)
        return np.concatenate([head, self.knots, self.tails, words]).astype(np.float16)

    def __call__(self, x: Any) -> Array:
        """Evaluate in float16, every operation rounded; NaN gives +inf, as measured on the engine (B3)."""
        x = np.asarray(x, np.float16)
        y: Array = _evaluate([self], x.reshape(-1))[0].astype(np.float16)
        return y.reshape(x.shape)


def _places(shift: np.float16, scale: np.float16, count: int) -> Array:
    u = np.linspace(-_REACH, _REACH, count)
    return (u - np.float64(shift)) / np.float64(scale)


def _evaluate(records: Sequence[ActivationLut], x: Array) -> Array:
    """Return what records over one domain give for float16 ``x``, [records, len(x)], float32 that are float16.

    They share shift and scale. Sum, difference and product of two float16 in float32, rounded to float16, are those
    that float16 arithmetic gives: float32 has more than twice the digits.
    """
    wide = x.astype(np.float32)
    first = records[0]
    values = np.empty((len(records), len(x)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        mapped = _half(_half(np.clip(wide, -_LARGEST, _LARGEST) * np.float32(first.scale)) + np.float32(first.shift))
        u = np.clip(np.where(np.isnan(wide), 0, mapped), -_REACH, _REACH)
        segment = np.clip(np.floor(2 * u) + SEGMENTS // 2, 0, SEGMENTS - 1).astype(np.int64)
        fraction = 2 * u + SEGMENTS // 2 - segment.astype(np.float32)  # exact: of the places' own last bits
        for y, record in zip(values, records, strict=True):
            knots, tails = record.knots.astype(np.float32), record.tails.astype(np.float32)
            left = knots[segment]
            y[...] = _half(left + _half(fraction * _half(knots[segment + 1] - left)))
            held = np.clip(wide, np.float32(record.lo), np.float32(record.hi))
            position = _half(_half(held * np.float32(record.scale)) + np.float32(record.shift))
            for beyond, slope, offset in ((position < -_REACH, *tails[:2]), (position > _REACH, *tails[2:])):
                y[beyond] = _half(_half(slope * held[beyond]) + offset)
            y[np.isnan(wide)] = np.inf
    return values


def _half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


def read_lut(entries: Array) -> ActivationLut:
    """Return the record of 43 float16 entries.

    Raises
    ------
    FormatError
        ``ane.lut``: another number of entries, a value that is not finite, mode words other than 1, clamps the wrong
        way round, or a scale that is not above 0.
    """
    if entries.shape != (ENTRIES,) or entries.dtype != np.float16:
        raise _wrong(f"{ENTRIES} entries of float16", f"{entries.shape} of {entries.dtype}")
    if not np.isfinite(entries).all():
        raise _wrong("finite entries", "one that is not")
    lo, hi, shift, scale = entries[:4]
    words = entries[-2:].view(np.uint16)
    if (words != _MODE_WORD).any():
        raise _wrong(f"mode words of {_MODE_WORD}", f"{words}")
    if not (hi > lo and scale > 0):
        raise _wrong("an interval and a scale above 0", f"{lo} to {hi}, scale {scale}")
    return ActivationLut(lo, hi, shift, scale, entries[4:37].copy(), entries[37:41].copy())


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
    function: str | Function,
    interval: tuple[float, float] | None = None,
    domain: tuple[float, float] | None = None,
    outside: str = "clamp",
) -> Fitted:
    """Build the record of a function with the least largest error over ``interval``, as the engine evaluates it.

    Parameters
    ----------
    function : str or callable
        A name in ``FUNCTIONS``, or a function from and to arrays of float64.
    interval : (float, float), optional
        Inputs that matter; that of ``FUNCTIONS`` by default.
    domain : (float, float), optional
        Where the knots lie; fitted by default, by trying domains within the interval on finer and finer grids. Of all
        that are tried the one with the least largest error in half precision is taken.
    outside : str
        What holds beyond the domain: ``clamp``, the end knots, as published (B25); ``line``, the tails' lines
        (inferred); ``best``, whichever errs less.

    Raises
    ------
    UsageError
        ``ane.function``: an unknown name, an interval that is empty or no float16, a function that is not finite
        on it, or another word for ``outside``.
    """
    call, interval = _resolve(function, interval)
    if outside not in OUTSIDE:
        raise UsageError(f"expected {', '.join(OUTSIDE)} outside the domain, found {outside!r}", rule="ane.function")
    inputs = _halves(*interval)
    wanted = np.asarray(call(inputs.astype(np.float64)), np.float64)
    if wanted.shape != inputs.shape or not (np.abs(wanted) <= _LARGEST).all():
        raise UsageError("expected a function with float16 values on the interval, found others", rule="ane.function")
    domains = _Domains(call, interval, OUTSIDE[outside], inputs, wanted)
    if domain is None:
        domains.search()
    else:
        domains.add(*domain)
    best = domains.best()
    if best is None:
        raise UsageError("expected a domain of float16 numbers with room for 32 segments", rule="ane.function")
    error = np.abs(best(inputs).astype(np.float64) - wanted)
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
    """Return every finite float16 from low to high, ascending."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    inside = every[np.isfinite(every) & (every >= low) & (every <= high)]
    return np.unique(inside.astype(np.float32)).astype(np.float16)


class _Domains:
    """Domains that were tried, each with the largest error of its records over some of the inputs.

    That is a lower bound of the error over all of them, because a record is evaluated as it is at the end: in half
    precision. So the best of all is found without evaluating every one everywhere.
    """

    def __init__(
        self, call: Function, interval: tuple[float, float], modes: tuple[str, ...], inputs: Array, wanted: Array
    ) -> None:
        self._call = call
        self._interval = interval
        self._modes = modes
        self._inputs = inputs
        self._wanted = wanted
        # Even over the interval: most float16 lie around 0, and errors do not.
        self._few, self._more = (
            np.unique(
                np.searchsorted(inputs, np.linspace(*interval, count).astype(np.float16)).clip(0, inputs.size - 1)
            )
            for count in _SAMPLES
        )
        self._bounds: dict[tuple[float, float], float] = {}

    def add(self, low: float, high: float) -> float:
        """Try a domain; return the bound."""
        pair = (low, high)
        if pair not in self._bounds:
            self._bounds[pair] = self._least(self._made(pair), self._few)[0]
        return self._bounds[pair]

    def search(self) -> None:
        """Try grids: 20 x 20, what is round in binary, then three times 7 x 7 around the best so far."""
        low, high = self._interval
        step = (high - low) / 40
        self.add(low, high)
        self._grid(low + step * np.arange(20), high - step * np.arange(20))
        # Places in such domains are exact in half precision, which a search by distances alone would miss.
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
        """Return the record with the least largest error over all inputs, of every domain that was tried."""
        least = math.inf
        chosen = None
        first = sorted((bound, pair) for pair, bound in self._bounds.items() if bound < math.inf)
        for start in range(0, len(first), _BATCH):  # so that few get a second look for nothing
            batch = [pair for bound, pair in first[start : start + _BATCH] if bound < least]
            second = sorted((self._least(self._made(pair), self._more)[0], pair) for pair in batch)
            for bound, pair in second:
                error, record = self._least(self._made(pair), None) if bound < least else (math.inf, None)
                if error < least:
                    least = error
                    chosen = record
        return chosen

    def _made(self, pair: tuple[float, float]) -> list[ActivationLut]:
        return _records(self._call, self._interval, pair, self._modes)

    def _least(self, records: list[ActivationLut], some: Array | None) -> tuple[float, ActivationLut | None]:
        """Return the least of the records' largest errors over some inputs (None: all), and whose it is."""
        if not records:
            return math.inf, None
        inputs, wanted = (self._inputs, self._wanted) if some is None else (self._inputs[some], self._wanted[some])
        errors = np.abs(_evaluate(records, inputs) - wanted).max(axis=1)
        index = int(errors.argmin())
        return float(errors[index]), records[index]


def _records(
    call: Function, interval: tuple[float, float], domain: tuple[float, float], modes: tuple[str, ...]
) -> list[ActivationLut]:
    """Return records over one domain: knots on the curve or balanced around it, in each of the modes."""
    scale = np.float16(2 * _REACH / max(domain[1] - domain[0], 1e-9))
    shift = np.float16(-_REACH - domain[0] * float(scale)) if domain[0] != -domain[1] else np.float16(0)
    if not (np.isfinite(scale) and scale > 0 and np.isfinite(shift)):
        return []
    places = _places(shift, scale, 2 * KNOTS - 1)
    lo, hi = places[[0, -1]].astype(np.float16)
    with np.errstate(all="ignore"):
        curve = np.asarray(call(places), np.float64)
    if not (hi > lo and np.isfinite(hi) and (np.abs(curve) <= _LARGEST).all()):
        return []
    on_curve = curve[::2]
    bulge = curve[1::2] - (on_curve[:-1] + on_curve[1:]) / 2  # how far a segment's middle is off its chord
    balanced = on_curve + np.concatenate([bulge[:1], (bulge[:-1] + bulge[1:]) / 2, bulge[-1:]]) / 2
    far = tuple(np.float16(end) for end in interval)
    luts = []
    for knots in (on_curve, balanced):
        halves = knots.astype(np.float16)
        for mode in modes:
            ends = (lo, hi) if mode == CLAMP else (min(far[0], lo), max(far[1], hi))
            level = np.array([0, halves[0], 0, halves[-1]], np.float16)
            tails = level if mode == CLAMP else _tails(call, interval, (float(places[0]), float(places[-1])), halves)
            luts.append(ActivationLut(*ends, shift, scale, halves, tails))
    return luts


def _tails(call: Function, interval: tuple[float, float], domain: tuple[float, float], knots: Array) -> Array:
    """Return slope and offset of the chords from the domain's ends to the interval's, through the end knots."""
    errors = []
    for far, end, knot in ((interval[0], domain[0], knots[0]), (interval[1], domain[1], knots[-1])):
        run = far - end
        value = float(np.asarray(call(np.array([far])), np.float64)[0])
        steep = (value - float(knot)) / run if run else 0.0
        # A run of a few roundings says nothing of the curve beyond it.
        slope = np.float16(steep if abs(steep) * max(abs(end), 1.0) < _LARGEST / 2 else 0.0)
        errors += [slope, np.float16(float(knot) - float(slope) * end)]
    return np.array(errors, np.float16)
