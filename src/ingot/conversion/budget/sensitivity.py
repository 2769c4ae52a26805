"""What it costs a model to store a matrix in some way: the error of its values, weighed by what is known of it.

With both factors of a matrix (``model.statistics``) half of ``tr(G D A D^T)`` is the divergence of the model's outputs
in nats a token, to second order ("YAQA", arXiv 2505.22988): an absolute figure, which adds up over matrices. Of a head,
whose outputs are the vocabulary, half of ``tr(D A D^T)`` over its rows would be if all next tokens were equally likely;
a quarter of it is taken. Otherwise a relative squared error stands for it: of the outputs, ``tr(D A D^T)`` over
``tr(W A W^T)``, where what the matrix multiplies is known; of the weights, ``|D|^2`` over ``|W|^2``, times their
number, where nothing is. Then a coefficient makes it comparable: what noise that is as large does to the matrices of
which both are known, in the geometric mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, prod
from typing import NamedTuple

import numpy as np

from ingot.codecs.table import CODECS
from ingot.conversion.candidates import SAMPLE, sample_of, sampled_rows, stored_rows
from ingot.core.numeric.dtypes import cast
from ingot.errors import CodecError, UnsupportedError
from ingot.model.statistics import MatrixStatistics, Statistics
from ingot.model.tensor import Array, Tensor
from ingot.naming.names import role_of
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.factors import Factors, factors_of, no_factors
from ingot.quantization.rounding import multiply, values_of
from ingot.recipes.choice import Choice

# Experts of a stack that are measured.
_EXPERTS = 4
# Weights of a sample that quantizers round, which takes them thousands of steps a weight.
_ROUNDED = 1 << 18
# Of a head's errors: next tokens are few, and errors of the rows of others weigh little. Measured on one model.
_HEAD = 0.25


class Loss(NamedTuple):
    """One matrix stored one way, by what is known of it; None where it is not.

    ``weights`` and ``outputs``: relative squared errors, the first times the number of weights. ``divergence``: nats a
    token.
    """

    weights: float
    outputs: float | None = None
    divergence: float | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """What ways to store a matrix lose, None for those that refuse its values, and noise as large as the matrix."""

    ways: Sequence[Loss | None]
    noise: Loss


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one matrix that are measured: f32 and as they are stored, with which ones they are, and of how many.

    ``head``: its outputs are the vocabulary.
    """

    rows: Array
    values: Array
    chosen: Array | None
    count: int
    known: MatrixStatistics | None
    head: bool


def losses(tensors: Sequence[Tensor], size: int, statistics: Statistics | None, choices: Sequence[Choice]) -> Losses:
    """Measure the ways to store a matrix on a sample of its rows.

    Parameters
    ----------
    tensors : sequence of Tensor
        The matrix under the name that the statistics have it under; several where experts become one tensor.
    size : int
        Weights in all.
    statistics : Statistics, optional
    choices : sequence of Choice
    """
    most = _ROUNDED if any(choice.quantizer for choice in choices) else SAMPLE
    pieces = [(tensor, piece) for tensor in _some(tensors) for piece in _pieces(tensor, statistics, most)]
    found = [_losses(tensor, piece, choices) for tensor, piece in pieces]
    scale = size / max(sum(piece.count * piece.rows.shape[1] for _, piece in pieces), 1)
    *ways, noise = (_together(column, scale, size) for column in zip(*found, strict=True))
    assert noise is not None
    return Losses(ways, noise)


def _some(items: Sequence[Tensor]) -> list[Tensor]:
    return [items[number] for number in _spread(len(items), _EXPERTS)]


def _spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` numbers below ``count``, evenly spaced, the first and last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).astype(int).tolist()))


def _together(found: Sequence[Loss | None], scale: float, size: int) -> Loss | None:
    """Return the loss of all pieces: errors on average, divergences added up, those that were left out too."""
    known = [loss for loss in found if loss is not None]
    if len(known) < len(found):
        return None
    outputs = [loss.outputs for loss in known if loss.outputs is not None]
    divergences = [loss.divergence for loss in known if loss.divergence is not None]
    return Loss(
        size * sum(loss.weights for loss in known) / len(known),
        sum(outputs) / len(outputs) if len(outputs) == len(known) else None,
        scale * sum(divergences) if len(divergences) == len(known) else None,
    )


def _pieces(tensor: Tensor, statistics: Statistics | None, most: int) -> Iterator[_Piece]:
    lead = tensor.shape[:-2]
    if statistics is not None and lead and statistics.for_matrix(f"{tensor.name}:expert.0") is not None:
        for number in _spread(prod(lead), _EXPERTS):
            values = tensor[tuple(map(int, np.unravel_index(number, lead)))]
            chosen = np.array(_spread(len(values), max(1, most // _EXPERTS // values.shape[1])))
            known = statistics.for_matrix(f"{tensor.name}:expert.{number}")
            yield _piece(tensor, values[chosen], chosen, len(values), known)
        return
    values = sample_of(tensor, most)
    rows = sampled_rows(tensor, most)
    known = None if statistics is None or rows is None else statistics.for_matrix(tensor.name)
    count, cols = tensor.matrix_shape
    if known is not None:
        known.require_shape(count, cols)
    yield _piece(tensor, values, rows, tensor.size // max(values.shape[1], 1), known)


def _piece(tensor: Tensor, values: Array, chosen: Array | None, count: int, known: MatrixStatistics | None) -> _Piece:
    seen = known if known is not None and known.count else None
    head = role_of(tensor.name) == "head" and seen is not None and seen.has_inputs
    return _Piece(np.ascontiguousarray(cast(values, "f32")), values, chosen, count, seen, head)


def _losses(tensor: Tensor, piece: _Piece, choices: Sequence[Choice]) -> list[Loss | None]:
    """Return the losses of a piece, that of noise last."""
    rows = piece.rows
    known = piece.known
    if not np.isfinite(rows).all():
        return [*(Loss(0.0, 0.0, 0.0) if _exact(choice) else None for choice in choices), Loss(0.0)]
    factors = None
    if known is not None:
        factors = factors_of(known)
        if factors.outputs is not None and piece.chosen is not None:
            factors = replace(
                factors, outputs=np.ascontiguousarray(factors.outputs[np.ix_(piece.chosen, piece.chosen)])
            )
    whole = max(_squares(rows), 1e-300), 1.0 if factors is None else max(_under(rows, factors.inputs), 1e-300)
    found: list[Loss | None] = []
    for choice in choices:
        try:
            error = None if _exact(choice) else _stored(tensor, piece, choice, factors) - rows
        except (CodecError, UnsupportedError):
            found.append(None)
            continue
        found.append(_loss(error, piece, factors, whole))
    return [*found, _noise(piece, factors, whole)]


def _noise(piece: _Piece, factors: Factors | None, whole: tuple[float, float]) -> Loss:
    """Return what white noise does that is as large as the matrix: factors are of mean 1."""
    if factors is None:
        return Loss(1.0)
    if factors.outputs is None and not piece.head:
        return Loss(1.0, whole[0] / whole[1])
    return Loss(1.0, whole[0] / whole[1], _nats(whole[0], piece, factors))


def _nats(weighed: float, piece: _Piece, factors: Factors) -> float:
    """Return the divergence for an error under the factors."""
    each = factors.scale / 2 * max(weighed, 0.0) / len(piece.rows)
    return each * (_HEAD if factors.outputs is None else piece.count)


def _loss(error: Array | None, piece: _Piece, factors: Factors | None, whole: tuple[float, float]) -> Loss:
    if error is None:
        return Loss(0.0, 0.0, 0.0)
    weights = _squares(error) / whole[0]
    if factors is None:
        return Loss(weights)
    product = multiply(error, factors.inputs)
    outputs = float(np.vdot(error.astype(np.float64), product)) / whole[1]
    if factors.outputs is not None:
        product = multiply(factors.outputs, product)
    elif not piece.head:
        return Loss(weights, outputs)
    weighed = float(np.vdot(error.astype(np.float64), product))
    return Loss(weights, outputs, _nats(weighed, piece, factors))


def _exact(choice: Choice) -> bool:
    return choice.quantizer is None and CODECS[choice.codec].lossless and not choice.changes_values


def _stored(tensor: Tensor, piece: _Piece, choice: Choice, factors: Factors | None) -> Array:
    """Return what the rows become: f32."""
    if choice.quantizer is None:
        return stored_rows(tensor, choice, piece.values)
    wanted = parse_quantizer(choice.quantizer, choice.codec, choice.options)
    known = factors or no_factors(piece.rows.shape[1])
    return values_of(round_with(wanted, piece.rows, known))


def _squares(values: Array) -> float:
    return float(np.vdot(values.astype(np.float64), values))


def _under(values: Array, inputs: Array) -> float:
    return float(np.vdot(values.astype(np.float64), multiply(values, inputs)))


@dataclass(frozen=True, slots=True)
class Measure:
    """What losses are worth: coefficients of relative errors of weights and of outputs; ``absolute`` in nats a token.

    ``by`` counts matrices by what they were measured by.
    """

    weights: float
    outputs: float
    absolute: bool
    by: Mapping[str, int]

    def cost(self, loss: Loss) -> float:
        """Return what a loss costs."""
        if loss.divergence is not None:
            return loss.divergence
        return self.weights * loss.weights if loss.outputs is None else self.outputs * loss.outputs


BOTH = "both factors"
INPUTS = "inputs"
NOTHING = "weights alone"


def measure_of(found: Mapping[str, Losses], sizes: Mapping[str, int]) -> Measure:
    """Return how losses of matrices, by name, compare with each other; ``sizes`` are their numbers of weights.

    Where no divergence is known, what all of them cost together is a mean of relative squared errors.
    """
    noises = [each.noise for each in found.values()]
    by = {BOTH: 0, INPUTS: 0, NOTHING: 0}
    for noise in noises:
        by[BOTH if noise.divergence is not None else NOTHING if noise.outputs is None else INPUTS] += 1
    known = {key: count for key, count in by.items() if count}
    if by[BOTH]:
        outputs = _mean([(noise.divergence, noise.outputs) for noise in noises])
        return Measure(_mean([(noise.divergence, noise.weights) for noise in noises]), outputs, True, known)
    if by[INPUTS]:
        each = 1 / len(found)
        return Measure(each * _mean([(noise.outputs, noise.weights) for noise in noises]), each, False, known)
    return Measure(1 / max(float(sum(sizes[name] for name in found)), 1.0), 1.0, False, known)


def _mean(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the geometric mean of the ratios of those that are known; 1 where none is."""
    ratios = [log(one / two) for one, two in pairs if one and two]
    return exp(sum(ratios) / len(ratios)) if ratios else 1.0
