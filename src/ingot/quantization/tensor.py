"""Round all matrices of a tensor, each with its own statistics, and report the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from ingot.codecs.affine.word_codes import stream
from ingot.codecs.blocks.compose import Numbers, compose_blocks
from ingot.codecs.palette.rows import pack
from ingot.codecs.scaled_codebook.tables import codes_of, numbers
from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS
from ingot.model.layouts.ggml import BLOCKS
from ingot.model.layouts.palette import CODEBOOK as PALETTE_TABLES
from ingot.model.layouts.palette import INDICES as PALETTE_INDICES
from ingot.model.layouts.scaled_codebook import CODEBOOK, INDICES, SECOND
from ingot.model.statistics import MatrixStatistics
from ingot.model.tensor import Array
from ingot.quantization.choice import QuantizerSpec, round_with
from ingot.quantization.entries import Entries
from ingot.quantization.factors import DAMPING, Factors, factors_of, no_factors
from ingot.quantization.grid import FOUR_BITS, Grid, Rounded
from ingot.quantization.rounding import IMPORTANCE, TWO_SIDED, error_sums, values_of
from ingot.quantization.scales import apply_second
from ingot.quantization.table import SAMPLE
from ingot.quantization.threads import on_threads
from ingot.quantization.trellis import RoundedMatrix, Streams
from ingot.reporting.report import Count, Ratio

MIDDLE = 0.5
"""The zero point of signs: codes 0 and 1 decode to minus and plus half their scale (``spec/affine.md``, "Signs")."""


def parts_of(bands: Sequence[RoundedMatrix], spec: QuantizerSpec) -> Mapping[str, Array]:
    """Return the stored parts of a tensor from ``bands``: its rounded matrices, or bands of rows of its only matrix."""
    if spec.streams:
        parts = [band.parts() for band in bands if isinstance(band, Streams)]
        return {role: np.concatenate([part[role] for part in parts]) for role in parts[0]}
    if spec.block is not None:
        return {BLOCKS: np.concatenate([_blocks(band, spec.block) for band in bands])}
    rounded = [band for band in bands if isinstance(band, Rounded)]
    grid = spec.grid
    codes = np.concatenate([band.codes for band in rounded])
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
    """Return the parts of MXFP4 or NVFP4.

    ``codes`` are indices of ascending levels; the parts store sign and magnitude.
    """
    grid = rounded[0].grid
    rising = numbers(FOUR_BITS)
    index = codes_of(np.sort(rising) + np.float32(0), FOUR_BITS)
    second = rounded[0].second
    scales = apply_second(np.concatenate([band.scales for band in rounded]), grid, second, inverse=True)
    parts = {INDICES: pack(index[codes], grid.bits), SCALES: codes_of(scales, grid.scales)}
    return {**parts, SECOND: np.full(1, second, np.float32)} if grid.second else parts


def _rows(codes: Array, bits: int) -> Array:
    """Return ``codes`` packed in ``bits`` bits each; every row begins at a byte."""
    return stream(codes, bits) if codes.shape[1] * bits % 8 else pack(codes, bits)


def _blocks(rounded: RoundedMatrix, block_type: str) -> Array:
    if isinstance(rounded, Entries):
        return rounded.blocks()
    assert isinstance(rounded, Rounded)
    d = rounded.scales if rounded.units is None else rounded.units
    dmin = rounded.zeros if rounded.zero_units is None else rounded.zero_units
    return compose_blocks(block_type, rounded.codes, Numbers(rounded.scales, rounded.zeros, d, dmin))


SIGNS_DAMPING = 0.5
_ELEMENT = 32  # bytes per weight: the f32 weight, its target, its result, errors, products
_STORED = 12  # bytes per weight outside the present band: the f32 weight, its code, the packed parts
_BAND = 8192  # rows; each band computes the triangular factor of A again
_BAND_COLUMNS = 4  # at least as many rows for each column: the factor then takes a small part of the time
_LEARNT = 64  # bytes per weight from which a table is learnt


class StatisticsSource(Protocol):
    """A source of calibration statistics by the name of a matrix."""

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return the statistics of a matrix; None if none were collected."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effect of rounding on a matrix.

    ``error`` is ``tr(G D A D^T) / tr(G W A W^T)``, where W is the matrix and D its change. A and G are the second
    moments of inputs and of gradients at outputs; see ``Factors``. ``tokens`` is the number of tokens in the
    statistics: 0 for an expert that received no token, None if the matrix has no statistics. In both cases all errors
    have the same weight. ``damping`` is the number added to A's diagonal, as a fraction of the diagonal's mean.
    ``dead`` is the number of columns whose input was always 0. ``singular`` is true if the factorization of A needed
    additional damping. ``squared_error`` and ``squared_norm`` are sums over all weights, not weighted by A and G.
    """

    matrix: str
    error: float
    tokens: Count | None
    damping: Ratio
    dead: Count
    singular: bool = False
    squared_error: float = 0.0
    squared_norm: float = 0.0


def matrices(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name in the statistics, and the index in the tensor, of each matrix that a tensor stacks."""
    lead = shape[:-2]
    count = prod(lead)
    for expert in range(count):
        index = tuple(map(int, np.unravel_index(expert, lead))) if lead else ()
        yield name if count == 1 else f"{name}:expert.{expert}", index


def has_statistics(statistics: StatisticsSource | None, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor's matrix has statistics of at least one token.

    For stacked matrices, return whether the first matrix has an entry in the statistics, even one without tokens.
    """
    if statistics is None or len(shape) < 2:
        return False
    first = next((first for first, _ in matrices(name, shape)), name)
    entry = statistics.for_matrix(first)
    return entry is not None and (entry.count > 0 or first != name)


def damping_for(spec: QuantizerSpec) -> float:
    """Return the damping of a spec: the number to add to the diagonals of A and G, as a fraction of their means.

    It is larger for signs, because large errors are sensitive to noise in directions with few samples.
    """
    return SIGNS_DAMPING if spec.grid.signs else DAMPING


def load_factors(
    statistics: StatisticsSource, name: str, rows: int, cols: int, damping: float = DAMPING
) -> tuple[Factors, int | None]:
    """Return the second moments that weight a matrix's rounding errors, and the number of tokens in its statistics.

    ``Factors`` defines these moments, A and G; ``damping`` is added to their diagonals. If the matrix has no
    statistics, the number of tokens is None. If it is None or 0, all errors have the same weight. Raises
    ``FormatError`` ``statistics.shape``, ``statistics.value``.
    """
    entry = statistics.for_matrix(name)
    if entry is None or not entry.count:
        return no_factors(cols), None if entry is None else 0
    entry.require_shape(rows, cols)
    return factors_of(entry, damping), entry.count


def rounding_memory(
    spec: QuantizerSpec,
    shape: tuple[int, ...],
    statistics: MatrixStatistics | None,
    *,
    vocabulary: bool = False,
    in_bands: bool = True,
) -> int:
    """Return the peak memory, in bytes, of rounding a tensor, one matrix after the other.

    If ``statistics`` is None, memory for both A and G (see ``Factors``) is counted; for a ``vocabulary`` (embedding or
    head), only for A.
    ``in_bands`` is false if ``round_tensor`` gets a function ``settle``.
    """
    rows, cols = shape[-2:]
    inputs = statistics is None or statistics.has_inputs or spec.quantizer != IMPORTANCE
    outputs = not vocabulary if statistics is None else statistics.rows is not None
    band = _band_rows(spec, rows, cols, outputs=outputs) if in_bands else rows
    # In f32; A: one copy, and a permuted copy or a transposed factor; G: one copy, and its factor. Then their bf16.
    two_sided = spec.quantizer == TWO_SIDED
    sides = (1 + (spec.act_order or spec.streams)) * inputs * cols**2 + (1 + two_sided) * outputs * rows**2
    pairs = two_sided * (inputs * cols**2 + outputs * rows**2)
    table = _LEARNT * min(rows * cols, 2 * SAMPLE) * (spec.grid.learnt if not spec.streams else 0)
    return (_ELEMENT * band + _STORED * (rows - band)) * cols + 4 * sides + 2 * pairs + table


def _band_rows(spec: QuantizerSpec, rows: int, cols: int, *, outputs: bool) -> int:
    """Return the number of rows that are rounded together: all rows if they depend on each other."""
    together = (
        outputs or spec.quantizer == TWO_SIDED or spec.streams or spec.grid.learnt or spec.grid.second is not None
    )
    return rows if together else min(rows, max(_BAND, _BAND_COLUMNS * cols))


def require_finite(values: Array, location: str) -> None:
    """Raise ``CodecError`` ``quantizer.non-finite`` if ``values`` contain NaN or infinity."""
    if not np.isfinite(values).all():
        raise CodecError("quantizer.non-finite", "expected finite weights; keep this tensor dense", where=location)


def round_tensor(
    spec: QuantizerSpec,
    weights: Iterable[tuple[str, Array]],
    statistics: StatisticsSource,
    settle: Callable[[Sequence[RoundedMatrix], Array, Factors], None] | None = None,
    device: Any = None,
    threads: int | None = 1,
) -> tuple[Mapping[str, Array], list[Outcome]]:
    """Return the parts of a tensor, and the outcomes of its matrices; all matrices use the first matrix's table.

    Parameters
    ----------
    weights : iterable of (str, f32 [rows, cols])
        Each matrix with its name in the statistics.
    settle : callable, optional
        Called after each matrix with its bands, which it may change, the original matrix and the factors.
    device : torch.device, optional
        The device that rounds if the spec allows it.
    threads : int or None
        The threads that this tensor shares with others that are rounded at the same time; None for one per processor.
        Results do not depend on them.
    """
    with on_threads(threads):
        return _round_tensor(spec, weights, statistics, settle, device)


def _round_tensor(
    spec: QuantizerSpec,
    weights: Iterable[tuple[str, Array]],
    statistics: StatisticsSource,
    settle: Callable[[Sequence[RoundedMatrix], Array, Factors], None] | None,
    device: Any,
) -> tuple[Mapping[str, Array], list[Outcome]]:
    rounded = list[RoundedMatrix]()
    outcomes = []
    for name, values in weights:
        check_cancelled()
        rows, cols = values.shape
        factors, tokens = load_factors(statistics, name, rows, cols, damping_for(spec))
        step = _band_rows(spec, rows, cols, outputs=factors.outputs is not None) if settle is None else rows
        sums = np.zeros(4)
        more = 0.0
        for first in range(0, rows, step):
            check_cancelled()
            band = values[first : first + step]
            bands = round_with(spec, band, factors, rounded[0].levels if rounded else None, device)
            if settle is not None:
                settle(bands, band, factors)
            rounded += bands
            more = max(more, bands[0].more_damping)
            decoded = values_of(bands)
            weighted = _sums_from_feedback(bands) if settle is None else None
            sums += (*(weighted or error_sums(band, decoded, factors)), _squares(band - decoded), _squares(band))
        error, total, squared_error, squared_norm = map(float, sums)
        relative = error / total if total > 0 else 0.0
        outcomes.append(
            Outcome(name, relative, tokens, factors.damping + more, factors.dead, more > 0, squared_error, squared_norm)
        )
    return parts_of(rounded, spec), outcomes


def _squares(values: Array) -> float:
    return float(np.vdot(values, values))


def _sums_from_feedback(bands: Sequence[RoundedMatrix]) -> tuple[float, float] | None:
    """Return ``tr(D A D^T)`` and ``tr(W A W^T)`` (see ``Outcome``), summed over the bands.

    Return None unless error feedback computed them for all bands.
    """
    sums = [band.error_sums for band in bands if isinstance(band, Rounded) and band.error_sums is not None]
    if not sums or len(sums) < len(bands):
        return None
    return sum(error for error, _ in sums), sum(matrix for _, matrix in sums)
