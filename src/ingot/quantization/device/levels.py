"""The levels of a grid as tensors: conversion between values and codes, and rounding of scales to their stored type.

Operations and their order are the same as in the native kernels (``native/kernels/rounding_levels.h``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.device import widest_float
from ingot.model.tensor import Array
from ingot.quantization.grid import NONE, OFFSETS, Grid


class DeviceLevels:
    """The levels of a grid on a device.

    Parameters
    ----------
    grid : Grid
        A grid with scales of f16, bf16 or f32, and without nested scales.
    levels : f32 [2 ** bits]
    device : torch.device

    Attributes
    ----------
    torch : module
    device : torch.device
    exact : tuple
        The device and dtype for sums in f64: the CPU if the device has no f64.
    """

    def __init__(self, grid: Grid, levels: Array, device: Any) -> None:
        self.torch = torch = require("torch", "torch")
        self.grid = grid
        self.device = device
        has_f64 = widest_float(torch, device) == torch.float64
        self.exact = (device if has_f64 else torch.device("cpu")), torch.float64
        self.uniform = not (grid.learnt or grid.signs) and grid.table is None
        self.with_zeros = grid.zeros != NONE
        self.offsets = grid.zeros == OFFSETS
        self.first = float(levels[0])
        self.last = float(levels[-1])
        self.middle = float(levels[len(levels) // 2])
        middles = levels[:-1] + (levels[1:] - levels[:-1]) / np.float32(2)
        self.levels = torch.from_numpy(np.ascontiguousarray(levels)).to(device)
        self._middles = torch.from_numpy(np.ascontiguousarray(middles, np.float32)).to(device)

    def codes(self, values: Any) -> Any:
        """Return the code of the nearest level for each of ``values``: i64; values are in units of the levels."""
        if self.uniform:
            return self.torch.nan_to_num(self._rounded(values) - self.first, 0.0).long()
        return self.torch.searchsorted(self._middles, values.contiguous())

    def nearest(self, values: Any) -> Any:
        """Return the nearest level for each of ``values``: f32; values are in units of the levels."""
        if self.uniform:
            return self.torch.nan_to_num(self._rounded(values), self.first)
        return self.levels[self.torch.searchsorted(self._middles, values.contiguous())]

    def _rounded(self, values: Any) -> Any:
        return values.clamp(self.first, self.last).round()

    def of_codes(self, codes: Any) -> Any:
        """Return the level of each code: f32."""
        return codes.float() + self.first if self.uniform else self.levels[codes.long()]

    def values(self, levels: Any, scales: Any, zeros: Any) -> Any:
        """Return decoded values from levels, scales and zeros; ``zeros`` is None for grids without zeros."""
        if zeros is None:
            return scales * levels
        return scales * levels + zeros if self.offsets else scales * (levels - zeros)

    def among(self, values: Any, scales: Any, zeros: Any) -> Any:
        """Return values converted to units of the levels: the inverse of ``values``."""
        if zeros is None:
            return values / scales
        return (values - zeros) / scales if self.offsets else values / scales + zeros

    def target_codes(self, values: Any, scales: Any, zeros: Any) -> Any:
        """Return the nearest code for each value; if a scale is 0, the code of the level nearest to the zero point."""
        divisor = self.torch.where(scales == 0, 1.0, scales)
        without_scale = 0.0 if zeros is None else zeros
        coordinates = self.torch.where(scales == 0, without_scale, self.among(values, divisor, zeros))
        return self.codes(coordinates)

    def stored(self, scales: Any) -> Any:
        """Return scales rounded to their stored type."""
        name = self.grid.scales
        if name == "f32":
            return scales
        return scales.to(self.torch.float16 if name == "f16" else self.torch.bfloat16).float()


def ordered_sums(values: Any) -> Any:
    """Return sums over the last axis, added from the first value to the last.

    The native search for scales adds in the same order.
    """
    total = values[..., 0].clone()
    for index in range(1, values.shape[-1]):
        total += values[..., index]
    return total
