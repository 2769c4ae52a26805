"""What a matrix is rounded to: levels times a scale for each group of columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.core import native
from ingot.model.tensor import Array


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that codes can stand for, ``scale * (level - zero)``, or ``scale * level + zero``.

    Parameters
    ----------
    levels : f32, 2**bits ascending values
        Integers one apart, or a table.
    group : int or None
        Columns that share a scale; None for a whole row. It divides the columns.
    scales : {"f32", "f16", "bf16"}
        Type that scales and offsets are rounded to.
    zeros : {"none", "points", "offsets"}
        Zero points are among the levels.
    turned : bool
        Whether scales may be negative.
    """

    levels: Array
    group: int | None = None
    scales: str = "f16"
    zeros: str = "none"
    turned: bool = False

    @property
    def uniform(self) -> bool:
        """Whether levels are integers one apart."""
        return bool((np.diff(self.levels) == 1).all()) and float(self.levels[0]).is_integer()

    def groups(self, cols: int) -> int:
        """Return the groups of a row; ``ValueError`` where the group does not divide it."""
        group = self.group or cols
        if not cols or cols % group:
            raise ValueError(f"expected columns that the group {group} divides, found {cols}")
        return cols // group

    def native(self) -> native.kernels.RoundingGrid:
        """Return the grid as kernels take it."""
        return native.kernels.RoundingGrid(
            np.ascontiguousarray(self.levels, np.float32), self.uniform, self.zeros, self.turned, self.scales
        )


def integers(bits: int, group: int | None = None, *, signed: bool = True, scales: str = "f16", **more: object) -> Grid:
    """Return a grid of all codes of some bits: from ``-2**(bits - 1)`` on where ``signed``, else from 0."""
    low = -(1 << (bits - 1)) if signed else 0
    levels = np.arange(low, low + (1 << bits), dtype=np.float32)
    return Grid(levels, group, scales, str(more.get("zeros", "none")), bool(more.get("turned", False)))


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix on a grid: codes (u8, [rows, cols]), the index of a level each; scales and zeros (f32, [rows, groups])
    that the grid's type holds exactly; zeros is None where the grid has none."""

    grid: Grid
    codes: Array
    scales: Array
    zeros: Array | None

    def values(self) -> Array:
        """Return what is stood for, f32 [rows, cols]."""
        width = self.codes.shape[1] // self.scales.shape[1]
        levels, scales = self.grid.levels[self.codes], np.repeat(self.scales, width, axis=1)
        if self.zeros is None:
            found: Array = scales * levels
            return found
        zeros = np.repeat(self.zeros, width, axis=1)
        shifted: Array = scales * levels + zeros if self.grid.zeros == "offsets" else scales * (levels - zeros)
        return shifted
