"""Encoders of whole matrices by what they multiply: for those who have rows in hand and no view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.range_probe import AUTO, RangeProbe
from ingot.codecs.table import CODECS, LOW_RANK
from ingot.codecs.trellis.values import values_of as trellis_values
from ingot.codecs.wrap.low_rank import LowRankEncoder
from ingot.core.numeric.floats import cast
from ingot.errors import UsageError
from ingot.model.layouts.base import matrix_shape
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import Asked, asked
from ingot.quantization.factors import Factors
from ingot.quantization.grid import OFFSETS, Rounded
from ingot.quantization.low_rank import factors_under
from ingot.quantization.rounding import TWO_SIDED, multiplied, values_of
from ingot.quantization.tensor import (
    Knowing,
    Outcome,
    known_factors,
    matrices,
    require_finite,
    round_tensor,
    rounding_memory,
)
from ingot.quantization.trellis import Made

Told = Callable[[Sequence[Outcome]], object]
_SCALES = "scales"
_MOST_STRETCH = 2.0


class RoundingEncoder(Encoder):
    """Encodes a tensor at once: its matrices rounded under their statistics, and brought to their own length.

    Rounding of least error falls short of a matrix, and what falls short of a difference is missing at every token:
    scales are stretched until the product under the factors with the matrix is the matrix's own.

    Parameters
    ----------
    name : str
        Under which the statistics know the tensor.
    shape : tuple of int
    wanted : Asked
    known : Knowing
    told : callable
        Gets what became of the matrices.
    """

    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def __init__(self, name: str, shape: tuple[int, ...], wanted: Asked, known: Knowing, told: Told) -> None:
        self._name, self._shape, self._asked, self._known, self._told = name, shape, wanted, known, told
        self._reach: RangeProbe | None = None
        layout = wanted.layout(shape, "f32")
        self.codec: str = layout.codec
        self.params: Mapping[str, Any] = layout.attributes()
        self.parts = tuple(layout.part_specs(shape))
        first = next(matrix for matrix, _ in matrices(name, shape))
        self._scratch = rounding_memory(wanted, shape, known.for_matrix(first))

    def scratch_bytes(self) -> int:
        return self._scratch

    def set_range_probe(self, probe: RangeProbe | None) -> None:
        """Have small values looked for, which the scales' type would not reach."""
        self._reach = probe

    def range_probe(self) -> RangeProbe | None:
        return self._reach

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the parts; raises ``quantizer.non-finite``, ``quantizer.scale-overflow``, ``statistics.*``."""
        require_finite(rows, self._name)
        values = np.ascontiguousarray(cast(rows, "f32")).reshape(self._shape)
        some = ((name, values[place]) for name, place in matrices(self._name, self._shape))
        parts, outcomes = round_tensor(self._asked, some, self._known, stretch)
        self._told(outcomes)
        return {role: np.ascontiguousarray(part) for role, part in parts.items()}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        held = {spec.role: memory_part(parts[spec.role], spec.dtype) for spec in self.parts}
        codec = CODECS[self.codec]
        tensor = Tensor(self._name, self._shape, "f32", self.codec, held, self.params, codec)
        codec.decode(tensor, "f32", out.reshape(self._shape))


def stretch(made: Sequence[Made], weights: Array, factors: Factors) -> None:
    """Lengthen what a matrix became until ``<W, Q> = <W, W>`` under the factors, twice at most, if it has scales."""
    length = along(weights, values_of(made), factors)
    if not 1 / _MOST_STRETCH <= length < 1:
        return
    for each in made:
        if not isinstance(each, Rounded):
            each.scales = [_stretched(scales, length, each.grid.scales) for scales in each.scales]
        elif each.grid.scaled and each.grid.nested is None:
            each.scales = _stretched(each.scales, length, each.grid.scales)
            if each.zeros is not None and each.grid.zeros == OFFSETS:
                each.zeros = _stretched(each.zeros, length, each.grid.scales)


def along(weights: Array, values: Array, factors: Factors) -> float:
    """Return ``tr(G Q A W^T)`` over ``tr(G W A W^T)``: how much of a matrix ``values`` bring; 1 of nothing."""
    product = multiplied(weights, factors.inputs)
    if factors.outputs is not None:
        product = multiplied(factors.outputs, product)
    own = float(np.vdot(weights.astype(np.float64), product))
    return float(np.vdot(values.astype(np.float64), product)) / own if own > 0 else 1.0


def _stretched(scales: Array, length: float, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        longer = cast(cast((scales / length).astype(np.float32), dtype), "f32")
    return longer if np.isfinite(longer).all() else scales


def encoder_under(
    name: str, shape: tuple[int, ...], how: tuple[str, str, Mapping[str, Any]], known: Knowing, told: Told
) -> Encoder:
    """Return what encodes a tensor of f32 by its statistics.

    Parameters
    ----------
    name : str
        Under which the statistics know it.
    how : quantizer, codec id and options
        As of ``choice.asked``, where scales may be ``auto``: f16, or what small values need. ``low_rank`` with
        ``two-sided``: the product of thin matrices of least error under both factors.

    Raises
    ------
    UsageError
        ``quantizer.option``.
    UnsupportedError
        A shape that the grid cannot hold, by the codec's own rule.
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
        encoder.fit_by(lambda values, most, error: factors_under(values, most, error, _of(known, name, rows, cols)))
        return encoder
    auto = options.get(_SCALES, AUTO) == AUTO
    wanted = asked(quantizer, codec, {**options, _SCALES: "f16"} if auto else options)
    wanted.require(shape, name)
    rounding = RoundingEncoder(name, shape, wanted, known, told)
    rounding.set_range_probe(_reach(wanted, auto=auto))
    return rounding


def _of(known: Knowing, name: str, rows: int, cols: int) -> Factors:
    return known_factors(known, name, rows, cols)[0]


def _reach(wanted: Asked, *, auto: bool) -> RangeProbe | None:
    if not wanted.streams and not wanted.grid.scaled:
        return None
    if wanted.streams:
        most = float(np.abs(trellis_values(wanted.grid.bits)).max())
    else:
        most = 1.0 if wanted.grid.learnt else float(np.abs(wanted.grid.levels).max())
    return RangeProbe(_SCALES, wanted.grid.scales, ("bf16", "f32") if auto else (), most, "f32")
