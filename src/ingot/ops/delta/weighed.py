"""Strategy ``auto`` where it is known what matrices multiply: what ways to store differences cost in nats a token.

As ``ops.delta.auto``, with errors under the factors of a matrix's statistics: half of ``tr(G D A D^T)`` is the
divergence that ``D`` makes, to second order. Matrices of which not both factors are known count as much by their
relative squared error as those of which they are, in the geometric mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ingot.codecs.delta.base import difference
from ingot.codecs.table import LOW_RANK
from ingot.codecs.wrap.low_rank_fit import spectrum
from ingot.core.names import role_of
from ingot.core.parallel import go_on
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.tensor import Array, Tensor
from ingot.ops.convert.measure import sample_of, sampled_rows
from ingot.ops.convert.sensitivity import nats
from ingot.ops.delta.auto import (
    CANDIDATES,
    LOW_RANK_ERROR,
    RANKS,
    Measured,
    Trial,
    decoded,
    differences,
    exact_trial,
    harm,
    measure,
    packed,
)
from ingot.ops.delta.strategy import SIGNS, Storage, calibrated, is_matrix, rounded, streams
from ingot.quantizers.choice import asked, rounded_as
from ingot.quantizers.encode import along, encoder_under, stretch
from ingot.quantizers.factors import Factors, factors_of
from ingot.quantizers.low_rank import whitened
from ingot.quantizers.parts import parts_of
from ingot.quantizers.rounding import TWO_SIDED, error_under, multiplied, values_of
from ingot.quantizers.tensor import Knowing, damping_for

ROWS = 96
"""Rows of a difference that are rounded, one way after the other."""
WHOLE = 1 << 21
"""Elements of a matrix whose ranks are looked at, all of them in double precision."""


def ways(cols: int) -> list[Storage]:
    """Return how a difference whose rows have so many columns may be rounded, beside exactly and to eight bits."""
    few = [calibrated(streams(bits), cols) for bits in (2, 3, 4)]
    return [SIGNS, *few, *(rounded(AffineLayout.codec, bits, 64) for bits in (5, 6))]


def measure_known(base: Tensor, tuned: Tensor, known: Knowing) -> Measured:
    """As ``measure``, by the statistics of the matrix where there are some."""
    found = known.for_matrix(tuned.name) if is_matrix(tuned.shape, tuned.dtype) else None
    if found is None or not found.count or len(tuned.shape) != 2:
        return measure(base, tuned)
    rows, cols = tuned.matrix_shape
    found.require_shape(rows, cols)
    most = ROWS * cols
    old, other, chosen = sample_of(base, most), sample_of(tuned, most), sampled_rows(tuned, most)
    if chosen is None or old.shape != other.shape:
        return measure(base, tuned)
    delta = np.ascontiguousarray(difference(old, other))
    if not np.isfinite(delta).all() or not delta.any():
        return measure(base, tuned)
    whole = factors_of(found)
    some = whole
    if whole.outputs is not None:
        some = replace(whole, outputs=np.ascontiguousarray(whole.outputs[np.ix_(chosen, chosen)]))
    piece = _Piece(delta, some, tuned, known)
    trials = [exact_trial(old, other, tuned), *piece.trials(), *_low_ranks(base, tuned, whole)]
    plain = float(np.square(delta.astype(np.float64)).sum()) * rows / len(delta)
    scale = float(np.square(old.astype(np.float64)).mean()) or 1.0
    absolute = whole.outputs is not None or role_of(tuned.name) == "head"
    if not absolute:
        return Measured(tuned.name, plain / scale, trials)
    noise = nats(plain * len(delta) / rows, some, len(delta), rows)
    return Measured(tuned.name, nats(piece.weighed, some, len(delta), rows), trials, noise * scale / plain)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a difference, with the factors of these rows."""

    delta: Array
    factors: Factors
    tuned: Tensor
    known: Knowing

    @property
    def weighed(self) -> float:
        """The squared norm of these rows under the factors."""
        product = multiplied(self.delta, self.factors.inputs)
        if self.factors.outputs is not None:
            product = multiplied(self.factors.outputs, product)
        return max(float(np.vdot(self.delta.astype(np.float64), product)), 0.0)

    def trials(self) -> Iterator[Trial]:
        """Yield what ways to store the whole cost."""
        yield Trial(Storage(LOW_RANK, {"rank": 0}), 0.0, 1.0, harm(1.0, 0.0))
        for way in ways(self.delta.shape[1]):
            go_on()
            try:
                yield self._rounded(way)
            except (CodecError, UnsupportedError):
                continue
        for way in CANDIDATES:
            if way.options.get("bits") == 8:
                made = decoded(way, self.delta)
                if made is not None:
                    _, parts, values = made
                    size = sum(part.nbytes for part in parts.values()) * self.tuned.size / self.delta.size
                    yield self._trial(way, size, values)

    def _rounded(self, way: Storage) -> Trial:
        assert way.quantizer is not None
        wanted = asked(way.quantizer, way.codec, {**way.options, "scales": "f32"})  # no sample's scale is too small
        more = self.factors.damped(damping_for(wanted))
        made = rounded_as(wanted, self.delta, more)
        stretch(made, self.delta, more)
        how = way.quantizer, way.codec, way.options
        encoder = encoder_under(self.tuned.name, self.tuned.shape, how, self.known, lambda _: None)
        size = float(sum(part.length or 0 for part in encoder.parts))
        if way.encoding != "raw":
            parts, share = parts_of(made, wanted), self.tuned.size / self.delta.size
            size = share * sum(packed(part) for part in parts.values())
        return self._trial(way, size, values_of(made))

    def _trial(self, way: Storage, size: float, values: Array) -> Trial:
        error = error_under(self.delta, values, self.factors)
        return Trial(way, size, error, harm(error, along(self.delta, values, self.factors)))


def _low_ranks(base: Tensor, tuned: Tensor, factors: Factors) -> Iterator[Trial]:
    """Yield the best products of thin matrices under the factors."""
    rows, cols = tuned.matrix_shape
    most = min(RANKS[-1], min(rows, cols) // 2)
    if tuned.size > WHOLE or most < 1:
        return
    white = whitened(np.concatenate(list(differences(base, tuned))), factors)
    left = spectrum(lambda: [white], cols, most)
    for rank in RANKS:
        if rank <= most and left[rank] <= LOW_RANK_ERROR:
            error = float(left[rank])
            way = Storage(LOW_RANK, {"rank": rank}, quantizer=TWO_SIDED)
            yield Trial(way, 2.0 * rank * (rows + cols), error, harm(error, 1 - error))
