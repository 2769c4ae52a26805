"""Rounding of a full matrix to a trellis (``spec/trellis.md``): streams run down the columns of bands of rows.

Columns are searched one after the other, and the errors of each column move the targets of the following columns.
Without G, the rows of a column are independent, and Viterbi's search is exact. Under both factors, each surviving path
has its own targets.
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
from ingot.quantization.factors import Factors, Links, feedback_factor, links_of
from ingot.quantization.grid import Rounded, TrellisGrid
from ingot.quantization.products import multiply
from ingot.quantization.rounding import IMPORTANCE, TWO_SIDED
from ingot.quantization.threads import each_block, in_steps

_STEP = 128  # columns after which errors are added to the targets of all following columns
_SPREAD = 1.07  # a scale over the root of its group's mean square, unless the largest magnitude needs a larger scale


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
        ``importance``: the streams of least error. ``gptq``: column by column, with error feedback. ``two-sided``: with
        feedback along rows, too, if there is G.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale.
    """
    height, cols = weights.shape
    bands = list(bands_of(height, height, band_for(height)))
    shapes = [(cols, last - first) for first, last in bands]
    streams = Streams(
        grid,
        [np.zeros(shape, np.uint16) for shape in shapes],
        [np.zeros((cols // grid.group, shape[1]), np.float32) for shape in shapes],
    )
    outputs = factors.outputs if quantizer == TWO_SIDED else None
    feedback = None if quantizer == IMPORTANCE else feedback_factor(factors.new_inputs)
    factor = None if feedback is None else (feedback.upper, np.ascontiguousarray(feedback.upper.T))
    work = [
        _Band(
            grid, np.ascontiguousarray(weights[slice(*rows)].T), _row_weights(factors, *rows), windows, scales, factor
        )
        for rows, windows, scales in zip(bands, streams.windows, streams.scales, strict=True)
    ]
    if feedback is None:
        each_block(work, _Band.nearest)
        return streams
    streams.more_damping = feedback.more
    groups = range(cols // grid.group)
    if outputs is None:
        each_block(work, lambda band: band.feed_back(groups))
        return streams
    links = _BandLinks(links_of(outputs), shapes, bands)

    def round_group(group: int, index: int) -> None:
        band = work[index]
        band.feed_back([group], links.links(index))
        links.add_errors(index, *band.changes(group))

    in_steps(len(groups), len(bands), round_group)
    return streams


def _row_weights(factors: Factors, first: int, last: int) -> Array:
    if factors.outputs is None:
        return np.ones(last - first, np.float32)
    return np.ascontiguousarray(factors.outputs.diagonal()[first:last])


class _BandLinks:
    """The effect of errors on the targets of earlier rows under G, between bands and within a band."""

    def __init__(self, links: Links, shapes: Sequence[tuple[int, int]], bands: Sequence[tuple[int, int]]) -> None:
        self._all = links
        self._bands = bands
        self._shifts = [np.zeros(shape, np.float32) for shape in shapes]

    def links(self, index: int) -> _Linked:
        """Return L within band ``index``, D of its rows, and the changes of its targets by later bands."""
        rows = slice(*self._bands[index])
        below = np.ascontiguousarray(self._all.below[rows, rows])
        return below, np.ascontiguousarray(self._all.diagonal[rows]), self._shifts[index]

    def add_errors(self, index: int, columns: slice, errors: Array) -> None:
        """Add the effect of a band's ``errors``, f32 [columns, rows of the band], to the targets of earlier bands."""
        first, last = self._bands[index]
        for earlier, (start, stop) in enumerate(self._bands[:index]):
            link = np.ascontiguousarray(self._all.below[first:last, start:stop])
            self._shifts[earlier][columns] -= multiply(errors, link)


class _Band:
    """A band of rows during rounding.

    ``weights`` is f32 [cols, rows]. ``weigh`` are the weights of the rows' errors. ``factor`` is the triangular factor
    of A and its transpose; it is None if there is no feedback.
    """

    def __init__(
        self,
        grid: TrellisGrid,
        weights: Array,
        weigh: Array,
        windows: Array,
        scales: Array,
        factor: tuple[Array, Array] | None,
    ) -> None:
        self._grid = grid
        self._weights = weights
        self._weigh = weigh
        self._windows = windows
        self._scales = scales
        self._factor = factor
        self._targets = weights.copy()
        self._errors = np.zeros_like(weights)

    def nearest(self) -> None:
        """Choose every group's scales, and then the streams."""
        for group in range(len(self._scales)):
            self._choose(self._targets, group)
        native.kernels.trellis_search(*self._to(), self._targets, False)

    def feed_back(self, groups: Sequence[int], links: _Linked | None = None) -> None:
        """Round ``groups``, one after the other.

        The weighted error of each column changes the targets of later columns. With ``links``, the scales and codes of
        a column are chosen under the full matrix G of the rows, otherwise under its diagonal.
        """
        assert self._factor is not None
        upper, turned = self._factor
        cols, rows = self._weights.shape
        for group in groups:
            columns = self._columns(group)
            self._choose(self._targets, group, None if links is None else links[2])
            for first in range(columns.start, columns.stop, _STEP):
                check_cancelled()
                last = min(first + _STEP, columns.stop)
                native.kernels.trellis_feedback(
                    *self._to(), first, last, self._weights, self._targets, upper, self._errors, *(links or ())
                )
                if last < cols:
                    native.kernels.matrix_multiply_add(
                        turned[last:], self._errors, self._targets[last:], first, last, 0, rows
                    )

    def changes(self, group: int) -> tuple[slice, Array]:
        """Return the columns of a group, and their decoded values minus their targets: f32 [columns, rows]."""
        columns = self._columns(group)
        values = values_of(self._grid.bits)[self._windows[columns]]
        return columns, values * self._scales[group] - self._targets[columns]

    def _columns(self, group: int) -> slice:
        return slice(group * self._grid.group, (group + 1) * self._grid.group)

    def _choose(self, targets: Array, group: int, shift: Array | None = None) -> None:
        """Set the scales of a group so that no target exceeds the largest value of the trellis."""
        columns = self._columns(group)
        group_targets = targets[columns] if shift is None else targets[columns] + shift[columns]
        size = np.sqrt(np.square(group_targets, dtype=np.float64).mean(0))
        needed = np.abs(group_targets).max(0) / values_of(self._grid.bits).max()
        self._scales[group] = _round_to(np.maximum(size * _SPREAD, needed), self._grid.scales)

    def _to(self) -> tuple[int, int, Array, Array, Array, Array]:
        grid = self._grid
        return grid.bits, grid.group, values_of(grid.bits), self._weigh, self._scales, self._windows


def _round_to(scales: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        stored = cast(cast(scales.astype(np.float32), dtype), "f32")
    if not np.isfinite(stored).all():
        raise CodecError(
            "quantizer.scale-overflow",
            f"{dtype} cannot hold the scale of a group; use scales=bf16 or scales=f32",
        )
    return stored
