"""Steps of encoding the grid types IQ1_M, IQ2 and IQ3: find scales, find the nearest entries, build blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ingot.codecs.blocks.grids import GRIDS, OF_TYPE, grid_of
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.ggml import TYPES
from ingot.model.tensor import Array

BLOCK = 256
RUN = 8
"""Columns that are encoded together: one entry of eight values, or two entries of four with one set of signs."""

# Number of values that share a scale, and the factor of a scale besides d and 2 * step + 1.
_SCALES: Mapping[str, tuple[int, float]] = {
    "iq1_m": (16, 1),
    "iq2_xxs": (32, 1 / 8),
    "iq2_xs": (16, 1 / 8),
    "iq2_s": (16, 1 / 8),
    "iq3_xxs": (32, 1 / 4),
    "iq3_s": (32, 1),
}
ENTRY_TYPES = tuple(_SCALES)
_FIRST_NIBBLE = {"iq2_xs": 66, "iq2_s": 74, "iq3_s": 106}


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of one block of each row.

    ``d`` [rows] are the blocks' numbers, as bits of f16. ``steps`` u8 [rows, groups] are the groups' integers.
    ``values`` f32 [rows, groups] are the decoded scales of the groups.
    """

    d: Array
    steps: Array
    values: Array

    def column(self, offset: int, block_type: str) -> Array:
        """Return the scale of each row at a column of the block: f32 [rows]."""
        return np.ascontiguousarray(self.values[:, offset // _SCALES[block_type][0]])


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of rows in a block type with a grid, and the decoded values.

    ``entries`` u16 [rows, entries] are indices into the grid. ``negative`` (a sign bit per value) and ``down`` (the
    sign of IQ1's shift) are u8 [rows, runs of eight columns]. ``values`` f32 [rows, columns] are decoded but not
    scaled.
    """

    entries: Array
    negative: Array
    down: Array
    values: Array

    @classmethod
    def empty(cls, rows: int, cols: int, block_type: str) -> Codes:
        runs = cols // RUN
        return cls(
            np.zeros((rows, runs * entries_per_run(block_type)), np.uint16),
            np.zeros((rows, runs), np.uint8),
            np.zeros((rows, runs), np.uint8),
            np.zeros((rows, cols), np.float32),
        )

    def put(self, rows: Array, column: int, replacement: Codes) -> None:
        """Replace the codes of one run of columns in the rows that ``rows`` (bool) selects."""
        run = column // RUN
        count = replacement.entries.shape[1]
        self.entries[rows, run * count : (run + 1) * count] = replacement.entries[rows]
        self.negative[rows, run] = replacement.negative[rows, 0]
        self.down[rows, run] = replacement.down[rows, 0]
        self.values[rows, column : column + RUN] = replacement.values[rows]


def entries_per_run(block_type: str) -> int:
    """Return the number of grid entries that encode eight columns."""
    return RUN // GRIDS[OF_TYPE[block_type]][1]


def search_scales(block_type: str, weights: Array, importance: Array) -> Scales:
    """Return the scales that the block encoder chooses for ``weights``, f32 [rows, 256]: one block of each row.

    Raises ``CodecError`` ``quantizer.scale-overflow`` if f16 cannot hold a block's scale.
    """
    nbytes = TYPES[block_type].nbytes
    blocks = np.empty(len(weights) * nbytes, np.uint8)
    weights = np.ascontiguousarray(weights)
    status, index = native.kernels.ggml_encode(
        block_type, weights, "f32", importance, True, grid_of(block_type), blocks
    )
    if status:
        raise CodecError(
            "quantizer.scale-overflow",
            f"f16 cannot represent the scale of the block in row {index // BLOCK}; keep this tensor dense",
        )
    return _scales_of(block_type, blocks.reshape(-1, nbytes))


def _scales_of(block_type: str, blocks: Array) -> Scales:
    def words(first: int, last: int, dtype: str) -> Array:
        return np.ascontiguousarray(blocks[:, first:last]).view(dtype)

    bits = words(0, 2, "<u2")[:, 0]
    if block_type == "iq1_m":
        tail = words(48, 56, "<u2")
        parts = [(tail[:, k] >> 12) << np.uint16(4 * k) for k in range(4)]
        bits = parts[0] | parts[1] | parts[2] | parts[3]
        steps = np.stack([tail >> np.uint16(3 * k) & 7 for k in range(4)], axis=-1).reshape(len(blocks), -1)
    elif block_type == "iq2_xxs":
        steps = words(2, 66, "<u4")[:, 1::2] >> 28
    elif block_type == "iq3_xxs":
        steps = words(66, 98, "<u4") >> 28
    else:
        packed = blocks[:, _FIRST_NIBBLE[block_type] :]
        steps = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(blocks), -1)
    d = bits.view(np.float16).astype(np.float32)
    values = d[:, None] * ((2 * steps.astype(np.float32) + 1) * np.float32(_SCALES[block_type][1]))
    return Scales(np.ascontiguousarray(bits), steps.astype(np.uint8), values)


def nearest(block_type: str, targets: Array, scales: Array, weights: Array) -> Codes:
    """Return the codes with the least squared error for eight columns of ``targets``, f32 [rows, 8].

    ``scales`` has one scale per row. ``weights`` are factors of the squared errors.
    """
    grid = grid_of(block_type)
    assert grid is not None
    codes = Codes.empty(len(targets), RUN, block_type)
    native.kernels.ggml_grid_nearest(
        block_type,
        np.ascontiguousarray(targets).reshape(-1),
        scales,
        weights,
        grid,
        codes.entries.reshape(-1),
        codes.negative.reshape(-1),
        codes.down.reshape(-1),
        codes.values.reshape(-1),
    )
    return codes


def compose(block_type: str, codes: Codes, d: Array, steps: Array) -> Array:
    """Build the blocks (u8) of rows from codes, ``d`` u16 [rows, blocks] and ``steps`` u8 [rows, blocks, groups]."""
    blocks = np.empty(d.size * TYPES[block_type].nbytes, np.uint8)
    native.kernels.ggml_grid_compose(
        block_type,
        np.ascontiguousarray(d).reshape(-1),
        np.ascontiguousarray(steps).reshape(-1),
        codes.entries.reshape(-1),
        codes.negative.reshape(-1),
        codes.down.reshape(-1),
        blocks,
    )
    return blocks
