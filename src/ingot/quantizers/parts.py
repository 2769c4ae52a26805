"""The parts that hold rounded matrices, by the layout that a rule asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.codecs.affine.word_codes import stream
from ingot.codecs.blocks.compose import Numbers, compose_blocks
from ingot.codecs.palette.rows import pack
from ingot.codecs.scaled_codebook.tables import codes_of, numbers
from ingot.core.floats import cast
from ingot.model.layouts.affine import CODES, SCALES, ZEROS
from ingot.model.layouts.ggml import BLOCKS
from ingot.model.layouts.palette import CODEBOOK as PALETTE_TABLES
from ingot.model.layouts.palette import INDICES as PALETTE_INDICES
from ingot.model.layouts.scaled_codebook import CODEBOOK, INDICES, SECOND
from ingot.model.tensor import Array
from ingot.quantizers.choice import Asked
from ingot.quantizers.grid import FOUR_BITS, Grid, Rounded
from ingot.quantizers.trellis import Made, Streams

MIDDLE = 0.5
"""The zero point of signs: codes 0 and 1 decode to minus and plus half their scale (``spec/affine.md``, "Signs")."""


def parts_of(made: Sequence[Made], asked: Asked) -> Mapping[str, Array]:
    """Return the parts of the matrices that a tensor stacks, or of the bands of one, rounded as ``asked``."""
    if asked.streams:
        parts = [each.parts() for each in made if isinstance(each, Streams)]
        return {role: np.concatenate([each[role] for each in parts]) for role in parts[0]}
    found = [each for each in made if isinstance(each, Rounded)]
    if asked.block is not None:
        return {BLOCKS: np.concatenate([_blocks(each, asked.block) for each in found])}
    grid, codes = asked.grid, np.concatenate([each.codes for each in found])
    if not grid.scaled:
        tables = found if asked.channels is not None else found[:1]
        levels = np.concatenate([each.levels for each in tables]).astype(np.float16)
        return {PALETTE_INDICES: pack(codes, grid.bits), PALETTE_TABLES: levels}
    if grid.table == FOUR_BITS:
        return _four_bits(found, codes)
    scales = {SCALES: cast(np.concatenate([each.scales for each in found]), grid.scales)}
    if grid.learnt:
        return {INDICES: pack(codes, grid.bits), CODEBOOK: found[0].levels.astype(np.float16), **scales}
    return {CODES: _codes(grid, codes), **scales, **_zeros(found, grid, scales[SCALES])}


def _codes(grid: Grid, codes: Array) -> Array:
    return _rows(codes if grid.unsigned else codes ^ np.uint8(1 << grid.bits - 1), grid.bits)  # two's complement


def _zeros(found: Sequence[Rounded], grid: Grid, scales: Array) -> dict[str, Array]:
    if grid.signs:
        return {ZEROS: np.full_like(scales, MIDDLE)}
    zeros = [each.zeros for each in found if each.zeros is not None]
    return {ZEROS: cast(np.concatenate(zeros), grid.scales)} if zeros else {}


def _four_bits(found: Sequence[Rounded], codes: Array) -> Mapping[str, Array]:
    """Return the parts of MXFP4 and NVFP4: levels rise, codes are a sign and a magnitude."""
    grid, rising = found[0].grid, numbers(FOUR_BITS)
    index = codes_of(np.sort(rising) + np.float32(0), FOUR_BITS)
    second = np.float32(found[0].second)
    scales = codes_of(np.concatenate([each.scales for each in found]) / second, grid.scales)
    parts = {INDICES: pack(index[codes], grid.bits), SCALES: scales}
    return {**parts, SECOND: second.reshape(1)} if grid.second else parts


def _rows(codes: Array, bits: int) -> Array:
    """Return codes packed row by row. Rows begin at bytes; those of whole bytes are one stream."""
    return stream(codes, bits) if codes.shape[1] * bits % 8 else pack(codes, bits)


def _blocks(found: Rounded, kind: str) -> Array:
    own = found.scales if found.units is None else found.units
    least = found.zeros if found.zero_units is None else found.zero_units
    return compose_blocks(kind, found.codes, Numbers(found.scales, found.zeros, own, least))
