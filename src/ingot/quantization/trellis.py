"""Rounding of a whole matrix to a trellis (``spec/trellis.md``): streams run down the columns of bands of rows.

Columns are searched one after the other, the errors of each moving the targets of the next. Where G is not asked for, a
column's rows do not touch each other and Viterbi's search is exact; under both factors each path that it keeps has
targets of its own. Then some rows of a column at a time are searched as if G were diagonal, what is found is kept where
the error falls under all of G, and symbols are moved one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.codecs.trellis.streams import band_for, bands_of, pack_band
from ingot.codecs.trellis.values import values_of
from ingot.core.numeric.floats import cast
from ingot.core.runtime import native
from ingot.core.runtime.parallel import go_on
from ingot.errors import CodecError
from ingot.model.layouts.trellis import SCALES, STREAMS, WORD, TrellisLayout
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors, Feedback, Links, feedback_factor, links_of
from ingot.quantization.grid import Rounded, TrellisGrid
from ingot.quantization.rounding import GPTQ, TWO_SIDED, multiplied

PASSES = 6
_STEP = 128  # columns between which errors are carried over at once
_FACTORS = (0.8, 0.9, 1.0, 1.12, 1.26, 1.42)  # of the root of a group's mean square, tried as its scale
_SAMPLE = 24  # columns of a group that they are tried on, at least


@dataclass(slots=True)
class Streams:
    """A matrix as windows of streams, columns and rows changed over.

    Parameters
    ----------
    grid : TrellisGrid
    windows : list of u16 [cols, rows of a band]
    scales : list of f32 [groups, rows of a band]
        Values that the scales' type holds.
    more_damping : float
        As of ``Rounded``.
    levels : None
        There is no table to learn.
    """

    grid: TrellisGrid
    windows: list[Array]
    scales: list[Array]
    more_damping: float = 0.0
    levels: Array | None = None

    def values(self) -> Array:
        """Return what the windows stand for: f32 [rows, cols]."""
        turned = [self.of_band(band) for band in range(len(self.windows))]
        return np.ascontiguousarray(np.concatenate(turned, 1).T)

    def of_band(self, band: int) -> Array:
        """Return what a band's windows stand for: f32 [cols, rows]."""
        found: Array = values_of(self.grid.bits)[self.windows[band]]
        found *= np.repeat(self.scales[band], self.grid.group, 0)
        return found

    def parts(self) -> dict[str, Array]:
        """Return the parts of codec ``trellis``."""
        layout = TrellisLayout(self.grid.bits, self.grid.group, WORD, "f32", self.grid.scales)
        streams = [pack_band(windows, layout) for windows in self.windows]
        scales = [np.ascontiguousarray(scales.T).reshape(-1) for scales in self.scales]
        return {STREAMS: np.concatenate(streams), SCALES: cast(np.concatenate(scales), self.grid.scales)}


Made = Rounded | Streams
"""A matrix as some grid has it."""
_Linked = tuple[Array, Array, Array]  # L and D of a band's rows, and the shifts of its targets


def round_streams(weights: Array, grid: TrellisGrid, factors: Factors, quantizer: str = TWO_SIDED) -> Streams:
    """Return the matrix rounded to a trellis.

    Parameters
    ----------
    weights : f32 [rows, cols]
        Finite; the group divides the columns.
    grid : TrellisGrid
    factors : Factors
    quantizer : str
        ``importance``: scales of least error weighted by A's diagonal, then the streams of least error. ``gptq``:
        column by column, errors fed back. ``two-sided``: after that ``PASSES`` passes down the error under A and G.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale.
    """
    rows, cols = weights.shape
    bands = list(bands_of(rows, rows, band_for(rows)))
    wanted = [np.ascontiguousarray(weights[first:last].T) for first, last in bands]
    weigh = [_row_weights(factors, first, last) for first, last in bands]
    outputs = factors.outputs if quantizer == TWO_SIDED else None
    found = Streams(
        grid,
        [np.zeros(band.shape, np.uint16) for band in wanted],
        [np.zeros((cols // grid.group, band.shape[1]), np.float32) for band in wanted],
    )
    feedback = feedback_factor(factors.made) if quantizer in (GPTQ, TWO_SIDED) else None
    rest = None if outputs is None else _Rest(links_of(outputs), wanted, bands)
    for number in reversed(range(len(bands))):
        work = _Band(grid, wanted[number], weigh[number], found.windows[number], found.scales[number])
        if feedback is None:
            work.nearest(factors.weights)
            continue
        found.more_damping = feedback.more
        targets = work.feed_back(feedback, None if rest is None else rest.links(number))
        if rest is not None:
            rest.done(number, found.of_band(number) - targets)
    del feedback, rest  # as large as A and G, and done with
    if quantizer == TWO_SIDED:
        _descend(found, wanted, weigh, bands, factors)
    return found


def _row_weights(factors: Factors, first: int, last: int) -> Array:
    if factors.outputs is None:
        return np.ones(last - first, np.float32)
    return np.ascontiguousarray(factors.outputs.diagonal()[first:last])


class _Rest:
    """Which errors of bands that are done move the targets of those before them, and how rows of a band touch."""

    def __init__(self, links: Links, wanted: Sequence[Array], bands: Sequence[tuple[int, int]]) -> None:
        self._all, self._bands = links, bands
        self._shifts = [np.zeros_like(band) for band in wanted]

    def links(self, number: int) -> _Linked:
        """Return what a search of a band takes."""
        rows = slice(*self._bands[number])
        below = np.ascontiguousarray(self._all.below[rows, rows])
        return below, np.ascontiguousarray(self._all.left[rows]), self._shifts[number]

    def done(self, number: int, errors: Array) -> None:
        """Let errors (f32 [cols, rows of the band]) move what comes before."""
        first, last = self._bands[number]
        for other, (start, stop) in enumerate(self._bands[:number]):
            link = np.ascontiguousarray(self._all.below[first:last, start:stop])
            self._shifts[other] -= multiplied(errors, link)


@dataclass(slots=True)
class _Band:
    """A band on its way: what is wanted, f32 [cols, rows], what rows weigh, and what is found."""

    grid: TrellisGrid
    wanted: Array
    weigh: Array
    windows: Array
    scales: Array

    def nearest(self, columns: Array) -> None:
        """Choose every group's scales, its columns weighed, and then the streams."""
        for group in range(len(self.scales)):
            self.choose(self.wanted, columns, group)
        self.search(self.wanted, self.windows, self.scales)

    def feed_back(self, feedback: Feedback, links: _Linked | None) -> Array:
        """Round group by group; what is left of each column's error moves the targets of those after it.

        With links of the rows a column is searched under all of G. Returns the targets, f32 [cols, rows].
        """
        grid, cols, factor, left = self.grid, len(self.wanted), feedback.upper, feedback.left
        targets, errors = self.wanted.copy(), np.zeros_like(self.wanted)
        turned = np.ascontiguousarray(factor.T)
        for first in range(0, cols, grid.group):
            last = first + grid.group
            self.choose(targets if links is None else targets + links[2], left, first // grid.group)
            for start in range(first, last, _STEP):
                go_on()
                stop = min(start + _STEP, last)
                native.kernels.trellis_feedback(
                    *self._to(self.windows, self.scales),
                    start,
                    stop,
                    self.wanted,
                    targets,
                    factor,
                    errors,
                    *(links or ()),
                )
                if stop < cols:
                    rows = targets.shape[1]
                    native.kernels.matrix_multiply_add(turned[stop:], errors, targets[stop:], start, stop, 0, rows)
        return targets

    def choose(self, targets: Array, columns: Array, group: int) -> None:
        """Set the scales of a group to those of least squares, columns weighed, for an open search.

        It divides by the rows' size times a factor, of which some columns say which leaves the least error.
        """
        grid, first = self.grid, group * self.grid.group
        span = slice(first, first + grid.group)
        some, heavy = targets[span], columns[span, None].astype(np.float64)
        size, step = np.sqrt(np.square(some, dtype=np.float64).mean(0)), max(1, grid.group // _SAMPLE)
        best, least = np.ones(len(size)), np.full(len(size), np.inf)
        for factor in _FACTORS:
            scales = _stored(size * factor, grid.scales)
            product, square = self._fit(np.ascontiguousarray(some[::step]), heavy[::step], scales)
            gain = -np.square(product) / np.where(square > 0, square, 1)
            best, least = np.where(gain < least, factor, best), np.minimum(gain, least)
        scales = _stored(size * best, grid.scales)
        product, square = self._fit(some, heavy, scales)
        self.scales[group] = np.where(scales == 0, 0, _stored(product / np.where(square > 0, square, 1), grid.scales))

    def _fit(self, wanted: Array, heavy: Array, scales: Array) -> tuple[Array, Array]:
        """Return by rows the sums of ``wanted * found`` and ``found ** 2``, weighed, of an open search."""
        windows = np.zeros(wanted.shape, np.uint16)
        self.search(wanted, windows, scales[None], open_ends=True)
        found = values_of(self.grid.bits)[windows].astype(np.float64)
        return (heavy * wanted * found).sum(0), (heavy * np.square(found)).sum(0)

    def search(self, wanted: Array, windows: Array, scales: Array, *, open_ends: bool = False) -> None:
        native.kernels.trellis_search(*self._to(windows, scales), wanted, open_ends)

    def descend(self, factors: tuple[Array, Array], gradient: Array, turn: int, *, refit: bool) -> Array:
        """Move the band down the error; returns what its values changed by."""
        change = np.zeros_like(self.wanted)
        native.kernels.trellis_descend(
            *self._to(self.windows, self.scales), *factors, gradient, change, turn, refit, self.grid.scales
        )
        return change

    def _to(self, windows: Array, scales: Array) -> tuple[int, int, Array, Array, Array, Array]:
        return self.grid.bits, self.grid.group, values_of(self.grid.bits), self.weigh, scales, windows


def _descend(
    found: Streams, wanted: Sequence[Array], weigh: Sequence[Array], bands: Sequence[tuple[int, int]], factors: Factors
) -> None:
    """Move band after band down the error, some passes; it never grows."""
    work = [_Band(found.grid, *each) for each in zip(wanted, weigh, found.windows, found.scales, strict=True)]
    product = [multiplied(factors.inputs, found.of_band(number) - band) for number, band in enumerate(wanted)]
    for passed in range(PASSES):
        for number, (first, last) in enumerate(bands):
            go_on()
            outputs, gradient = _pulled(factors, product, bands, number)
            turn = passed * (last - first) // PASSES
            change = work[number].descend((factors.inputs, outputs), gradient, turn, refit=passed > 0)
            cols, rows = change.shape
            native.kernels.matrix_multiply_add(factors.inputs, change, product[number], 0, cols, 0, rows)


def _pulled(
    factors: Factors, product: Sequence[Array], bands: Sequence[tuple[int, int]], number: int
) -> tuple[Array, Array]:
    """Return G of a band with itself, and the gradient (G D A)' of the band."""
    first, last = bands[number]
    if factors.outputs is None:
        return np.eye(last - first, dtype=np.float32), product[number].copy()
    gradient = np.zeros_like(product[number])
    for other, (start, stop) in enumerate(bands):
        link = np.ascontiguousarray(factors.outputs[start:stop, first:last])
        native.kernels.matrix_multiply_add(product[other], link, gradient, 0, stop - start, 0, last - first)
    return np.ascontiguousarray(factors.outputs[first:last, first:last]), gradient


def _stored(scales: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        stored = cast(cast(scales.astype(np.float32), dtype), "f32")
    if not np.isfinite(stored).all():
        raise CodecError(
            "quantizer.scale-overflow",
            f"expected a scale that {dtype} can hold, found a larger one; use scales=bf16 or scales=f32",
        )
    return stored
