"""Encoders that round full matrices under their statistics, for callers whose rows are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.range_probe import AUTO, RangeProbe
from ingot.codecs.table import CODECS, LOW_RANK
from ingot.codecs.trellis.streams import values_of as trellis_values
from ingot.codecs.wrap.low_rank import LowRankEncoder
from ingot.codecs.wrap.low_rank_fit import factors as plain_factors
from ingot.core.numeric.dtypes import cast
from ingot.errors import UsageError
from ingot.model.layouts.base import matrix_shape
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import QuantizerSpec, parse_quantizer
from ingot.quantization.entries import Entries
from ingot.quantization.factors import Factors
from ingot.quantization.grid import OFFSETS
from ingot.quantization.products import multiply
from ingot.quantization.rounding import TWO_SIDED, values_of
from ingot.quantization.tensor import (
    Outcome,
    StatisticsSource,
    load_factors,
    matrices,
    require_finite,
    round_tensor,
    rounding_memory,
)
from ingot.quantization.trellis import RoundedMatrix, Streams

_TINY = np.finfo(np.float64).tiny


def factors_under(rows: Array, max_rank: int, error: float | None, factors: Factors) -> tuple[Array, Array]:
    """Return left [rows, r] and right [r, cols], f64, whose product has the least error under ``factors``.

    ``max_rank`` and ``error`` have the meaning of ``low_rank_fit.factors``; ``error`` is a fraction of the norm under
    the factors. Column k of left and row k of right have the same norm.
    """
    inner, outer = _roots(factors)
    left_factor, right = _from_white(*plain_factors(_white(rows, inner, outer), max_rank, error), inner, outer)
    norms = np.maximum(np.linalg.norm(left_factor, axis=0), _TINY)
    even = np.sqrt(np.maximum(np.linalg.norm(right, axis=1), _TINY) / norms)
    return left_factor * even, right / even[:, None]


def whiten(rows: Array, factors: Factors) -> Array:
    """Return ``M^T W L``, f64 [rows, cols]: the matrix whose squared norm is the norm of W under the factors.

    L and M are the triangular roots: ``A = L L^T``, ``G = M M^T``.
    """
    return _white(rows, *_roots(factors))


class Whitening:
    """The linear map of ``whiten`` for one matrix, and its inverse; triangular roots are computed once.

    If ``factors.outputs`` is None, all rows have the same weight.
    """

    def __init__(self, factors: Factors) -> None:
        self._roots = _roots(factors)

    def apply(self, rows: Array) -> Array:
        """Return ``M^T W L``, f64."""
        return _white(rows, *self._roots)

    def restore(self, left_factor: Array, right: Array) -> tuple[Array, Array]:
        """Return factors of W from factors of ``M^T W L``."""
        return _from_white(left_factor, right, *self._roots)


def _roots(factors: Factors) -> tuple[Array, Array | None]:
    inner = np.linalg.cholesky(factors.inputs.astype(np.float64))
    return inner, None if factors.outputs is None else np.linalg.cholesky(factors.outputs.astype(np.float64))


def _white(rows: Array, inner: Array, outer: Array | None) -> Array:
    white: Array = rows.astype(np.float64) @ inner
    return white if outer is None else outer.T @ white


def _from_white(left_factor: Array, right: Array, inner: Array, outer: Array | None) -> tuple[Array, Array]:
    if outer is not None:
        left_factor = np.linalg.solve(outer.T, left_factor)
    return left_factor, np.linalg.solve(inner.T, right.T).T


OutcomeCallback = Callable[[Sequence[Outcome]], object]
_SCALES = "scales"
_MAX_STRETCH = 2.0


class RoundingEncoder(Encoder):
    """An encoder of a tensor in one chunk: its matrices are rounded under their statistics, then stretched.

    Rounding with the least error gives a matrix Q whose projection on the original W is shorter than W. In a delta,
    this loss recurs at every token. Therefore scales are multiplied until ``<W, Q> = <W, W>`` under the factors.

    Parameters
    ----------
    name : str
        The tensor's name in the statistics.
    shape : tuple of int
    spec : QuantizerSpec
    statistics : StatisticsSource
    on_outcomes : callable
        Called with the outcomes of the matrices.
    """

    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        spec: QuantizerSpec,
        statistics: StatisticsSource,
        on_outcomes: OutcomeCallback,
    ) -> None:
        self._name = name
        self._shape = shape
        self._spec = spec
        self._statistics = statistics
        self._on_outcomes = on_outcomes
        self._reach: RangeProbe | None = None
        layout = spec.layout(shape, "f32")
        self.codec: str = layout.codec
        self.params: Mapping[str, Any] = layout.attributes()
        self.parts = tuple(layout.part_specs(shape))
        first = next(matrix for matrix, _ in matrices(name, shape))
        self._scratch = rounding_memory(spec, shape, statistics.for_matrix(first), in_bands=False)

    def scratch_bytes(self) -> int:
        return self._scratch

    def set_range_probe(self, probe: RangeProbe | None) -> None:
        """Set the probe that refuses values too small for the scales' type; None for no check."""
        self._reach = probe

    def range_probe(self) -> RangeProbe | None:
        return self._reach

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the parts; raises ``quantizer.non-finite``, ``quantizer.scale-overflow``, ``statistics.*``."""
        require_finite(rows, self._name)
        values = np.ascontiguousarray(cast(rows, "f32")).reshape(self._shape)
        weights = ((name, values[index]) for name, index in matrices(self._name, self._shape))
        parts, outcomes = round_tensor(self._spec, weights, self._statistics, stretch)
        self._on_outcomes(outcomes)
        return {role: np.ascontiguousarray(part) for role, part in parts.items()}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        stored = {spec.role: memory_part(parts[spec.role], spec.dtype) for spec in self.parts}
        codec = CODECS[self.codec]
        tensor = Tensor(self._name, self._shape, "f32", self.codec, stored, self.params, codec)
        codec.decode(tensor, "f32", out.reshape(self._shape))


def stretch(bands: Sequence[RoundedMatrix], weights: Array, factors: Factors) -> None:
    """Multiply scales by at most 2, so that ``<W, Q> = <W, W>`` under the factors.

    Q is the rounded matrix, in ``bands``. Matrices without scales, or with nested scales, do not change.
    """
    length = along(weights, values_of(bands), factors)
    if not 1 / _MAX_STRETCH <= length < 1:
        return
    for band in bands:
        if isinstance(band, Entries):  # blocks are never the encoding of a difference
            continue
        if isinstance(band, Streams):
            band.scales = [_stretch(scales, length, band.grid.scales) for scales in band.scales]
        elif band.grid.scaled and band.grid.nested is None:
            band.scales = _stretch(band.scales, length, band.grid.scales)
            if band.zeros is not None and band.grid.zeros == OFFSETS:
                band.zeros = _stretch(band.zeros, length, band.grid.scales)


def along(weights: Array, values: Array, factors: Factors) -> float:
    """Return the length of the projection of Q on W as a fraction of W: ``tr(G Q A W^T) / tr(G W A W^T)``.

    W is ``weights``, Q is ``values``, and A and G are the factors. The result is 1 for a zero matrix.
    """
    product = multiply(weights, factors.inputs)
    if factors.outputs is not None:
        product = multiply(factors.outputs, product)
    total = float(np.vdot(weights.astype(np.float64), product))
    return float(np.vdot(values.astype(np.float64), product)) / total if total > 0 else 1.0


def _stretch(scales: Array, length: float, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        longer = cast(cast((scales / length).astype(np.float32), dtype), "f32")
    return longer if np.isfinite(longer).all() else scales


def encoder_under(
    name: str,
    shape: tuple[int, ...],
    how: tuple[str, str, Mapping[str, Any]],
    statistics: StatisticsSource,
    on_outcomes: OutcomeCallback,
) -> Encoder:
    """Return the encoder of an f32 tensor under its statistics.

    Parameters
    ----------
    name : str
        The tensor's name in the statistics.
    how : quantizer, codec id and options
        The arguments of ``choice.parse_quantizer``, where scales may be ``auto``: f16, or a type for small values.
        ``low_rank`` with ``two-sided``: the product of thin matrices of least error under both factors.

    Raises
    ------
    UsageError
        ``quantizer.option``.
    UnsupportedError
        A shape that the grid cannot hold, with the codec's own rule.
    """
    quantizer, codec, options = how
    if codec == LOW_RANK:
        if quantizer != TWO_SIDED:
            raise UsageError(
                f"expected quantizer {TWO_SIDED} for {LOW_RANK}, found {quantizer!r:.80}", rule="quantizer.option"
            )
        encoder = CODECS[codec].encoder(shape, "f32", options)
        assert isinstance(encoder, LowRankEncoder)
        rows, cols = matrix_shape(shape)
        encoder.fit_by(
            lambda values, max_rank, error: factors_under(
                values, max_rank, error, load_factors(statistics, name, rows, cols)[0]
            )
        )
        return encoder
    auto = options.get(_SCALES, AUTO) == AUTO
    spec = parse_quantizer(quantizer, codec, {**options, _SCALES: "f16"} if auto else options)
    spec.require(shape, name)
    rounding = RoundingEncoder(name, shape, spec, statistics, on_outcomes)
    rounding.set_range_probe(_reach(spec, auto=auto))
    return rounding


def _reach(spec: QuantizerSpec, *, auto: bool) -> RangeProbe | None:
    if not spec.streams and not spec.grid.scaled:
        return None
    if spec.streams:
        amax = float(np.abs(trellis_values(spec.grid.bits)).max())
    else:
        amax = 1.0 if spec.grid.learnt else float(np.abs(spec.grid.levels).max())
    return RangeProbe(_SCALES, spec.grid.scales, ("bf16", "f32") if auto else (), amax, "f32")
