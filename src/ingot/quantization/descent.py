"""Coordinate descent on the error of a rounded matrix under two factors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.model.tensor import Array
from ingot.quantization.blocks import blocks_of
from ingot.quantization.factors import Factors
from ingot.quantization.grid import Rounded
from ingot.quantization.products import Pairs, unit_of
from ingot.quantization.threads import pool_threads


class Descent:
    """Coordinate descent: each code in turn becomes the code of least error, and scales and zeros are fitted anew.

    Works in blocks of rows. Products are computed in bf16 with sums in f32. The error never grows, except by the
    rounding of these products.
    """

    def __init__(self, bands: Sequence[Rounded], weights: Array, factors: Factors) -> None:
        self._factors = factors
        self._blocks = blocks_of(bands)
        self._unit = unit_of(weights)
        self._inputs = Pairs.pack(factors.inputs)
        values = np.concatenate([band.values() for band in bands])
        self._product = self._inputs.multiply(values - weights, self._unit)
        self._pairs = None if factors.outputs is None else Pairs.pack(self._product, self._unit)
        shape = (max(len(block.codes) for block, _ in self._blocks), weights.shape[1])
        self._gradient, self._change = (np.empty(shape, np.float32) for _ in range(2))

    def run(self, *, refit: bool = True) -> None:
        """Make one pass over all codes; with ``refit``, scales and zeros change too."""
        outputs = self._factors.outputs
        for block, rows in self._blocks:
            check_cancelled()
            grid = block.grid
            product = self._product[rows]
            gradient, change = (scratch[: len(product)] for scratch in (self._gradient, self._change))
            if outputs is None or self._pairs is None:
                gradient[:] = product
            else:
                gradient.fill(0)
                self._pairs.add(outputs[rows], (0, len(outputs)), (0, product.shape[1]), gradient)
            native.kernels.rounding_descend(
                block.kernel_grid,
                self._factors.inputs,
                self._inputs.words,
                None if outputs is None else np.ascontiguousarray(outputs[rows, rows]),
                gradient,
                product,
                change,
                self._unit,
                refit and grid.scaled and not grid.small,
                block.codes,
                block.groups,
                block.scales,
                block.zeros,
                block.units,
                block.zero_units,
                pool_threads(),
            )
            if self._pairs is not None:
                self._pairs.put(product, rows.start)
