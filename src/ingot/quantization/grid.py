"""Grids of the values that codes represent, and matrices rounded to a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ingot.codecs.scaled_codebook.tables import numbers
from ingot.core.runtime import native
from ingot.model.layouts.scaled_codebook import SMALL_SCALES
from ingot.model.tensor import Array

NONE, POINTS, OFFSETS = ZEROS = ("none", "points", "offsets")
A_ROW = (1 << 31) - 1
"""The number of columns of a group that spans a row."""
FOUR_BITS = "f4_e2m1fn"


@dataclass(frozen=True, slots=True)
class Nested:
    """The storage of scales in a ggml block: each scale is an integer times a number of the block.

    Minima are stored in the same way, with a second number per block.

    Parameters
    ----------
    type : str
        The ggml block type; its search chooses the numbers of a block.
    low, high : int
        The smallest and the largest integer of a scale.
    minimum : int
        The largest integer of a minimum; 0 if the type has no minima.
    columns : int
        The number of columns of a block.
    """

    type: str
    low: int
    high: int
    minimum: int = 0
    columns: int = 256


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid ``w = scale * level``, ``scale * (level - zero)`` or ``scale * level + zero``: levels, groups and types.

    Parameters
    ----------
    bits : int
        The bits of a code, 1 to 8; there are ``2 ** bits`` levels.
    group : int
        Columns that share a scale; the last group of a row may be shorter.
    scales : str
        ``f16``, ``bf16`` or ``f32``: scales (and zeros) are rounded to it before codes are chosen. Or a type of 8 bits:
        these scales are positive, and do not change after the search has chosen them.
    learnt : bool
        The levels are a table that is learnt for the tensor.
    zeros : str
        ``points``: an integer among the levels for each scale; ``offsets``: a number of the scales' type. Levels are
        then the integers from 0 on, and scales are positive.
    table : str or None
        The name of a table in ``model.layouts.scaled_codebook.TABLES``, or ``f4_e2m1fn``.
    nested : Nested or None
        The storage of scales and offsets if they are multiples of a number per block.
    scaled : bool
        True if the grid has scales. If false, levels are learnt values, and ``group`` is the number of columns whose
        codes coordinate descent changes together.
    second : str or None
        ``multiply`` if all scales of a matrix are multiplied by one number; ``divide`` if they are divided by it.
    amax : float or None
        With ``second``: the magnitude that the largest scale reaches; None for the largest magnitude of the matrix.
    coded : float or None
        For integers that an entropy coder stores: the mean bits of a code. Scales are then steps of equal weight
        (``quantization.coded``), and only codes are searched.
    step : float or None
        With ``coded``: the step of the model; None if the codes of each matrix have ``coded`` bits on average.

    If a grid has neither a table nor zeros and is not learnt, its levels are the integers from ``-2 ** (bits - 1)`` on.
    With one bit, the levels are then -1/2 and 1/2: signs. Without zeros, scales may be negative, so that the integer
    without an opposite can represent either end of the range (as in Q4_0).
    """

    bits: int
    group: int
    scales: str = "f16"
    learnt: bool = False
    zeros: str = NONE
    table: str | None = None
    nested: Nested | None = None
    scaled: bool = True
    second: str | None = None
    amax: float | None = None
    coded: float | None = None
    step: float | None = None

    @property
    def small(self) -> bool:
        """Whether scales have an 8-bit type."""
        return self.scales in SMALL_SCALES

    @property
    def levels(self) -> Array:
        """The levels of the grid, f32 [2 ** bits]; only for grids that are not learnt."""
        if self.table is not None:
            values = numbers(self.table)
            return np.sort(values) + np.float32(0) if self.table == FOUR_BITS else np.array(values)  # 0 for -0
        if self.signs:
            return np.array([-0.5, 0.5], np.float32)
        first = 0 if self.zeros != NONE else -(1 << self.bits - 1)
        return np.arange(first, first + (1 << self.bits), dtype=np.float32)

    @property
    def signs(self) -> bool:
        """Whether levels are -1/2 and 1/2."""
        return self.bits == 1 and self.zeros == NONE and self.table is None and not self.learnt

    @property
    def unsigned(self) -> bool:
        """Whether integer codes count from 0: true if the grid has zeros or signs."""
        return self.zeros != NONE or self.signs

    @property
    def span(self) -> int:
        """The number of columns whose scales are chosen together."""
        return self.group if self.nested is None else self.nested.columns

    def groups(self, cols: int) -> Array:
        """Return the group index of each column: i32 [cols]."""
        return np.arange(cols, dtype=np.int32) // np.int32(self.group)


@dataclass(frozen=True, slots=True)
class TrellisGrid:
    """A grid of trellis streams with 2, 3 or 4 bits per weight.

    Each ``group`` columns of a row share a scale of type ``scales``.
    """

    bits: int
    group: int
    scales: str = "f16"


@dataclass(slots=True)
class Rounded:
    """A matrix rounded to a grid: codes, scales and levels.

    Parameters
    ----------
    grid : Grid
    codes : u8 [rows, cols]
        Indices of ``levels``.
    scales : f32 [rows, groups]
        Values of the scales' type.
    levels : f32 [2 ** bits]
    groups : i32 [cols]
    zeros : f32 [rows, groups] or None
        Points or offsets.
    units, zero_units : f32 [rows, groups] or None
        For nested scales: the block's numbers of which scales, and offsets, are integer multiples.
    more_damping : float
        The number that feedback had to add to A's diagonal besides its damping, as a fraction of its mean.
    second : float
        The number by which all scales of the matrix are multiplied or divided; 1 if ``grid.second`` is None.
    error_sums : pair of float or None
        ``tr(D A D^T)`` and ``tr(W A W^T)``, if feedback computed them.
    """

    grid: Grid
    codes: Array
    scales: Array
    levels: Array
    groups: Array
    zeros: Array | None = None
    units: Array | None = None
    zero_units: Array | None = None
    more_damping: float = 0.0
    second: float = 1.0
    error_sums: tuple[float, float] | None = None

    @classmethod
    def start(cls, grid: Grid, shape: tuple[int, int], levels: Array) -> Rounded:
        """Return an unrounded matrix with these levels: codes are 0, scales are 0, or 1 if the grid has no scales."""
        groups = grid.groups(shape[1])
        rounded = cls(grid, np.zeros(shape, np.uint8), _numbers(shape[0], groups), levels, groups)
        if not grid.scaled:
            rounded.scales.fill(1)
        if grid.zeros != NONE:
            rounded.zeros = _numbers(shape[0], groups)
        if grid.nested is not None:
            rounded.units = _numbers(shape[0], groups)
            rounded.zero_units = None if rounded.zeros is None else _numbers(shape[0], groups)
        return rounded

    @property
    def kernel_grid(self) -> native.kernels.RoundingGrid:
        """The grid as the native kernels' argument."""
        grid = self.grid
        nested = self.grid.nested
        steps = (0.0, 0.0, 0.0) if nested is None else (nested.low, nested.high, nested.minimum)
        even = not (grid.learnt or grid.signs) and grid.table is None
        two_sided = grid.zeros == NONE
        scales = "f32" if grid.small else grid.scales
        return native.kernels.RoundingGrid(self.levels, even, grid.zeros, two_sided, scales, steps)

    def values(self) -> Array:
        """Return the decoded matrix: f32 [rows, cols]."""
        values: Array = self.levels[self.codes]
        if self.zeros is not None and self.grid.zeros == POINTS:
            values -= self.zeros[:, self.groups]
        values *= self.scales[:, self.groups]
        if self.zeros is not None and self.grid.zeros == OFFSETS:
            values += self.zeros[:, self.groups]
        return values


def _numbers(rows: int, groups: Array) -> Array:
    return np.zeros((rows, int(groups[-1]) + 1), np.float32)


_IQ4 = "iq4_nl"

GRIDS: Mapping[str, Grid] = {
    "q4_0": Grid(4, 32),
    "q4_1": Grid(4, 32, zeros=OFFSETS),
    "q5_0": Grid(5, 32),
    "q5_1": Grid(5, 32, zeros=OFFSETS),
    "q8_0": Grid(8, 32),
    "q2_k": Grid(2, 16, zeros=OFFSETS, nested=Nested("q2_k", 0, 15, 15)),
    "q3_k": Grid(3, 16, nested=Nested("q3_k", -32, 31)),
    "q4_k": Grid(4, 32, zeros=OFFSETS, nested=Nested("q4_k", 0, 63, 63)),
    "q5_k": Grid(5, 32, zeros=OFFSETS, nested=Nested("q5_k", 0, 63, 63)),
    "q6_k": Grid(6, 16, nested=Nested("q6_k", -128, 127)),
    "iq4_nl": Grid(4, 32, table=_IQ4),
    "iq4_xs": Grid(4, 32, table=_IQ4, nested=Nested("iq4_xs", -32, 31)),
}
"""The grid of each ggml block type (``spec/gguf.md``); the row length must be a multiple of the block size."""

AS_INTEGERS = ("q4_0", "q5_0", "q8_0")
"""Block types that are computed as signed integers, which can be packed as blocks or in another integer layout."""
