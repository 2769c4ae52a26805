"""The parts of rounded matrices, in the layout of a quantizer spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.codecs.affine.word_codes import stream
from ingot.codecs.blocks.compose import Numbers, compose_blocks
from ingot.codecs.palette.rows import pack
from ingot.codecs.scaled_codebook.tables import codes_of, numbers
from ingot.core.numeric.floats import cast
from ingot.model.layouts.affine import CODES, SCALES, ZEROS
from ingot.model.layouts.ggml import BLOCKS
from ingot.model.layouts.palette import CODEBOOK as PALETTE_TABLES
from ingot.model.layouts.palette import INDICES as PALETTE_INDICES
from ingot.model.layouts.scaled_codebook import CODEBOOK, INDICES, SECOND
from ingot.model.tensor import Array
from ingot.quantization.choice import QuantizerSpec
from ingot.quantization.grid import FOUR_BITS, Grid, Rounded
from ingot.quantization.trellis import RoundedMatrix, Streams

MIDDLE = 0.5
"""The zero point of signs: codes 0 and 1 decode to minus and plus half their scale (``spec/affine.md``, "Signs")."""


def parts_of(bands: Sequence[RoundedMatrix], spec: QuantizerSpec) -> Mapping[str, Array]:
    """Return the parts of the stacked matrices of a tensor, or of the bands of one matrix, rounded by ``spec``."""
    if spec.streams:
        parts = [band.parts() for band in bands if isinstance(band, Streams)]
        return {role: np.concatenate([part[role] for part in parts]) for role in parts[0]}
    rounded = [band for band in bands if isinstance(band, Rounded)]
    if spec.block is not None:
        return {BLOCKS: np.concatenate([_blocks(band, spec.block) for band in rounded])}
    grid, codes = spec.grid, np.concatenate([band.codes for band in rounded])
    if not grid.scaled:
        tables = rounded if spec.channels is not None else rounded[:1]
        levels = np.concatenate([band.levels for band in tables]).astype(np.float16)
        return {PALETTE_INDICES: pack(codes, grid.bits), PALETTE_TABLES: levels}
    if grid.table == FOUR_BITS:
        return _four_bits(rounded, codes)
    scales = {SCALES: cast(np.concatenate([band.scales for band in rounded]), grid.scales)}
    if grid.learnt:
        return {INDICES: pack(codes, grid.bits), CODEBOOK: rounded[0].levels.astype(np.float16), **scales}
    return {CODES: _codes(grid, codes), **scales, **_zeros(rounded, grid, scales[SCALES])}


def _codes(grid: Grid, codes: Array) -> Array:
    return _rows(codes if grid.unsigned else codes ^ np.uint8(1 << grid.bits - 1), grid.bits)  # two's complement


def _zeros(rounded: Sequence[Rounded], grid: Grid, scales: Array) -> dict[str, Array]:
    if grid.signs:
        return {ZEROS: np.full_like(scales, MIDDLE)}
    zeros = [band.zeros for band in rounded if band.zeros is not None]
    return {ZEROS: cast(np.concatenate(zeros), grid.scales)} if zeros else {}


def _four_bits(rounded: Sequence[Rounded], codes: Array) -> Mapping[str, Array]:
    """Return the parts of MXFP4 and NVFP4: levels ascend, but codes are a sign and a magnitude."""
    grid, rising = rounded[0].grid, numbers(FOUR_BITS)
    index = codes_of(np.sort(rising) + np.float32(0), FOUR_BITS)
    second = np.float32(rounded[0].second)
    scales = codes_of(np.concatenate([band.scales for band in rounded]) / second, grid.scales)
    parts = {INDICES: pack(index[codes], grid.bits), SCALES: scales}
    return {**parts, SECOND: second.reshape(1)} if grid.second else parts


def _rows(codes: Array, bits: int) -> Array:
    """Return codes packed row by row; rows begin at bytes."""
    return stream(codes, bits) if codes.shape[1] * bits % 8 else pack(codes, bits)


def _blocks(rounded: Rounded, block_type: str) -> Array:
    d = rounded.scales if rounded.units is None else rounded.units
    dmin = rounded.zeros if rounded.zero_units is None else rounded.zero_units
    return compose_blocks(block_type, rounded.codes, Numbers(rounded.scales, rounded.zeros, d, dmin))
