"""Rounding of a full matrix to a trellis (``spec/trellis.md``): streams run down the columns of bands of rows.

Columns are searched one after the other, and the errors of each column move the targets of the following columns.
Without G, the rows of a column are independent, and Viterbi's search is exact. Under both factors, each surviving path
has its own targets. Descent then searches a few rows of a column at a time, as if G were diagonal. The result is
accepted if the error under the full G is smaller. Finally, symbols are changed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.codecs.trellis.streams import band_for, bands_of, pack_band, values_of
from ingot.core.numeric.dtypes import cast
from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.layouts.trellis import SCALES, STREAMS, WORD, TrellisLayout
from ingot.model.tensor import Array
from ingot.quantization.entries import Entries
from ingot.quantization.factors import Factors, Feedback, Links, feedback_factor, links_of
from ingot.quantization.grid import Rounded, TrellisGrid
from ingot.quantization.products import multiply
from ingot.quantization.rounding import GPTQ, TWO_SIDED

PASSES = 3  # the next three lower the error by 1 % together
_STEP = 128  # columns after which errors are added to the targets of all following columns
_FACTORS = (0.8, 0.9, 1.0, 1.12, 1.26, 1.42)  # times the root of a group's mean square: candidate scales
_SAMPLE = 24  # columns of a group on which the factors are tried, at least


@dataclass(slots=True)
class Streams:
    """A matrix rounded to a trellis: the windows of its streams, transposed.

    Parameters
    ----------
    grid : TrellisGrid
    windows : list of u16 [cols, rows of a band]
    scales : list of f32 [groups, rows of a band]
        Values of the scales' type.
    more_damping : float
        See ``Rounded``.
    levels : None
        There is no learnt table.
    """

    grid: TrellisGrid
    windows: list[Array]
    scales: list[Array]
    more_damping: float = 0.0
    levels: Array | None = None

    def values(self) -> Array:
        """Return the decoded matrix: f32 [rows, cols]."""
        columns = [self.decode_band(band) for band in range(len(self.windows))]
        return np.ascontiguousarray(np.concatenate(columns, 1).T)

    def decode_band(self, band: int) -> Array:
        """Return the decoded values of a band: f32 [cols, rows]."""
        values: Array = values_of(self.grid.bits)[self.windows[band]]
        values *= np.repeat(self.scales[band], self.grid.group, 0)
        return values

    def parts(self) -> dict[str, Array]:
        """Return the streams and scales as the parts of the codec ``trellis``."""
        layout = TrellisLayout(self.grid.bits, self.grid.group, WORD, "f32", self.grid.scales)
        streams = [pack_band(windows, layout) for windows in self.windows]
        scales = [np.ascontiguousarray(scales.T).reshape(-1) for scales in self.scales]
        return {STREAMS: np.concatenate(streams), SCALES: cast(np.concatenate(scales), self.grid.scales)}


RoundedMatrix = Rounded | Streams | Entries
"""A matrix rounded to a grid of levels, to a trellis, or to entries of ggml's grid types."""
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
        column by column, with error feedback. ``two-sided``: the same, then ``PASSES`` passes of descent under A and G.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale.
    """
    rows, cols = weights.shape
    bands = list(bands_of(rows, rows, band_for(rows)))
    targets = [np.ascontiguousarray(weights[first:last].T) for first, last in bands]
    weigh = [_row_weights(factors, first, last) for first, last in bands]
    outputs = factors.outputs if quantizer == TWO_SIDED else None
    streams = Streams(
        grid,
        [np.zeros(band.shape, np.uint16) for band in targets],
        [np.zeros((cols // grid.group, band.shape[1]), np.float32) for band in targets],
    )
    feedback = feedback_factor(factors.new_inputs) if quantizer in (GPTQ, TWO_SIDED) else None
    links = None if outputs is None else _BandLinks(links_of(outputs), targets, bands)
    for index in reversed(range(len(bands))):
        work = _Band(grid, targets[index], weigh[index], streams.windows[index], streams.scales[index])
        if feedback is None:
            work.nearest(factors.weights)
            continue
        streams.more_damping = feedback.more
        shifted = work.feed_back(feedback, None if links is None else links.links(index))
        if links is not None:
            links.add_errors(index, streams.decode_band(index) - shifted)
    del feedback, links  # as large as A and G, and no longer needed
    if quantizer == TWO_SIDED:
        _descend(streams, targets, weigh, bands, factors)
    return streams


def _row_weights(factors: Factors, first: int, last: int) -> Array:
    if factors.outputs is None:
        return np.ones(last - first, np.float32)
    return np.ascontiguousarray(factors.outputs.diagonal()[first:last])


class _BandLinks:
    """The effect of errors on the targets of earlier rows under G, between bands and within a band."""

    def __init__(self, links: Links, targets: Sequence[Array], bands: Sequence[tuple[int, int]]) -> None:
        self._all = links
        self._bands = bands
        self._shifts = [np.zeros_like(band) for band in targets]

    def links(self, index: int) -> _Linked:
        """Return L within band ``index``, D of its rows, and the changes of its targets by later bands."""
        rows = slice(*self._bands[index])
        below = np.ascontiguousarray(self._all.below[rows, rows])
        return below, np.ascontiguousarray(self._all.diagonal[rows]), self._shifts[index]

    def add_errors(self, index: int, errors: Array) -> None:
        """Add the effect of a band's ``errors``, f32 [cols, rows of the band], to the targets of earlier bands."""
        first, last = self._bands[index]
        for earlier, (start, stop) in enumerate(self._bands[:index]):
            link = np.ascontiguousarray(self._all.below[first:last, start:stop])
            self._shifts[earlier] -= multiply(errors, link)


@dataclass(slots=True)
class _Band:
    """A band of rows during rounding: its target, f32 [cols, rows], the weights of its rows, windows and scales."""

    grid: TrellisGrid
    target: Array
    weigh: Array
    windows: Array
    scales: Array

    def nearest(self, columns: Array) -> None:
        """Choose the scales of all groups under the weights of the columns, then the streams."""
        for group in range(len(self.scales)):
            self.choose(self.target, columns, group)
        self.search(self.target, self.windows, self.scales)

    def feed_back(self, feedback: Feedback, links: _Linked | None) -> Array:
        """Round group by group, and return the changed targets, f32 [cols, rows].

        The weighted error of each column changes the targets of later columns. With ``links``, the scales and codes of
        a column are chosen under the full matrix G of the rows, otherwise under its diagonal.
        """
        grid = self.grid
        cols = len(self.target)
        factor = feedback.upper
        diagonal = feedback.diagonal
        targets = self.target.copy()
        errors = np.zeros_like(self.target)
        transposed = np.ascontiguousarray(factor.T)
        for first in range(0, cols, grid.group):
            last = first + grid.group
            self.choose(targets if links is None else targets + links[2], diagonal, first // grid.group)
            for start in range(first, last, _STEP):
                check_cancelled()
                stop = min(start + _STEP, last)
                native.kernels.trellis_feedback(
                    *self._to(self.windows, self.scales),
                    start,
                    stop,
                    self.target,
                    targets,
                    factor,
                    errors,
                    *(links or ()),
                )
                if stop < cols:
                    rows = targets.shape[1]
                    native.kernels.matrix_multiply_add(transposed[stop:], errors, targets[stop:], start, stop, 0, rows)
        return targets

    def choose(self, targets: Array, columns: Array, group: int) -> None:
        """Set the scales of a group to those of least squared error under the weights of the columns.

        A search without feedback gives the streams for this fit. It divides the targets by the RMS of each row times a
        factor. A sample of columns decides which factor gives the smallest error.
        """
        grid = self.grid
        first = group * self.grid.group
        span = slice(first, first + grid.group)
        group_targets = targets[span]
        heavy = columns[span, None].astype(np.float64)
        size = np.sqrt(np.square(group_targets, dtype=np.float64).mean(0))
        step = max(1, grid.group // _SAMPLE)
        best = np.ones(len(size))
        least_error = np.full(len(size), np.inf)
        for factor in _FACTORS:
            scales = _round_to(size * factor, grid.scales)
            product, square = self._fit(np.ascontiguousarray(group_targets[::step]), heavy[::step], scales)
            gain = -np.square(product) / np.where(square > 0, square, 1)
            best = np.where(gain < least_error, factor, best)
            least_error = np.minimum(gain, least_error)
        scales = _round_to(size * best, grid.scales)
        product, square = self._fit(group_targets, heavy, scales)
        self.scales[group] = np.where(scales == 0, 0, _round_to(product / np.where(square > 0, square, 1), grid.scales))

    def _fit(self, targets: Array, heavy: Array, scales: Array) -> tuple[Array, Array]:
        """Search streams for ``targets``; return the sums of ``targets * values`` and of ``values ** 2`` for each row.

        The sums are weighted by ``heavy``. Streams may begin and end in any state.
        """
        windows = np.zeros(targets.shape, np.uint16)
        self.search(targets, windows, scales[None], open_ends=True)
        values = values_of(self.grid.bits)[windows].astype(np.float64)
        return (heavy * targets * values).sum(0), (heavy * np.square(values)).sum(0)

    def search(self, targets: Array, windows: Array, scales: Array, *, open_ends: bool = False) -> None:
        native.kernels.trellis_search(*self._to(windows, scales), targets, open_ends)

    def descend(self, factors: tuple[Array, Array], gradient: Array, turn: int, *, refit: bool) -> Array:
        """Change the band's streams and scales to reduce the error; return the change of the decoded values."""
        change = np.zeros_like(self.target)
        native.kernels.trellis_descend(
            *self._to(self.windows, self.scales), *factors, gradient, change, turn, refit, self.grid.scales
        )
        return change

    def _to(self, windows: Array, scales: Array) -> tuple[int, int, Array, Array, Array, Array]:
        return self.grid.bits, self.grid.group, values_of(self.grid.bits), self.weigh, scales, windows


def _descend(
    streams: Streams,
    targets: Sequence[Array],
    weigh: Sequence[Array],
    bands: Sequence[tuple[int, int]],
    factors: Factors,
) -> None:
    """Reduce the error band by band, in ``PASSES`` passes; the error never grows."""
    work = [
        _Band(streams.grid, *fields) for fields in zip(targets, weigh, streams.windows, streams.scales, strict=True)
    ]
    product = [multiply(factors.inputs, streams.decode_band(index) - band) for index, band in enumerate(targets)]
    for passed in range(PASSES):
        for index, (first, last) in enumerate(bands):
            check_cancelled()
            outputs, gradient = _gradient(factors, product, bands, index)
            turn = passed * (last - first) // PASSES
            change = work[index].descend((factors.inputs, outputs), gradient, turn, refit=passed > 0)
            cols, rows = change.shape
            native.kernels.matrix_multiply_add(factors.inputs, change, product[index], 0, cols, 0, rows)


def _gradient(
    factors: Factors, product: Sequence[Array], bands: Sequence[tuple[int, int]], index: int
) -> tuple[Array, Array]:
    """Return G for the rows of a band, and the band's part of the gradient, transposed: (G D A)^T."""
    first, last = bands[index]
    if factors.outputs is None:
        return np.eye(last - first, dtype=np.float32), product[index].copy()
    gradient = np.zeros_like(product[index])
    for band, (start, stop) in enumerate(bands):
        link = np.ascontiguousarray(factors.outputs[start:stop, first:last])
        native.kernels.matrix_multiply_add(product[band], link, gradient, 0, stop - start, 0, last - first)
    return np.ascontiguousarray(factors.outputs[first:last, first:last]), gradient


def _round_to(scales: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        stored = cast(cast(scales.astype(np.float32), dtype), "f32")
    if not np.isfinite(stored).all():
        raise CodecError(
            "quantizer.scale-overflow",
            f"{dtype} cannot hold the scale of a group; use scales=bf16 or scales=f32",
        )
    return stored
