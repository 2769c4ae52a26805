"""The loss of a model if a matrix is stored by a choice: the matrix's error, weighted with its statistics.

W is the matrix, D its error, A the second moment of its inputs and G that of its output gradients
(``model.statistics``). The loss depends on the available statistics:

- Both factors: half of ``tr(G D A D^T)`` is the divergence of the model's outputs in nats per token, to second order
  ("YAQA", arXiv 2505.22988). It is absolute, and losses of several matrices can be added.
- A head: its outputs are the vocabulary. Half of ``tr(D A D^T)`` per row would be the divergence if all next tokens
  were equally likely; a quarter of that is used.
- An embedding: A is the moment of the gradients of its rows, so half of ``tr(D A D^T)`` per row is the divergence if
  all tokens occur equally often.
- Inputs alone: the relative squared error of the outputs, ``tr(D A D^T) / tr(W A W^T)``.
- No statistics: the relative squared error of the weights, ``|D|^2 / |W|^2``, times their number.

A coefficient converts relative errors to divergences. It is the ratio of divergence to relative error for white noise
with the norm of the matrix, as a geometric mean over the matrices that have both.
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
from ingot.quantization.products import multiply
from ingot.quantization.rounding import values_of
from ingot.recipes.choice import Choice

# The number of experts of a stack that are measured.
_EXPERTS = 4
# The number of weights in a sample for quantizers, which need thousands of operations per weight.
_QUANTIZER_SAMPLE = 1 << 18
# The divergence as a share of the error per row. It is small for a head, because only a few next tokens are likely.
# Each share was measured on one model.
_SHARES: Mapping[str, float] = {"head": 0.25, "embedding": 1.0}


class Loss(NamedTuple):
    """The loss of a matrix for one choice, in several measures; None for measures that need missing statistics.

    ``weights`` and ``outputs`` are relative squared errors. The error of the weights is multiplied by their number.
    ``divergence`` is in nats per token.
    """

    weights: float
    outputs: float | None = None
    divergence: float | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a matrix: for each choice (None if the codec refuses the values), and for white noise.

    The noise has the norm of the matrix.
    """

    by_choice: Sequence[Loss | None]
    noise: Loss


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows of a matrix that are measured.

    ``rows`` has their values in f32, ``values`` in the dtype of the tensor. ``indices`` are the rows' indices in the
    matrix; None if the sample has parts of rows. ``count`` is the number of rows of the matrix. For an embedding or a
    head with input statistics, ``share`` is the divergence divided by the error per row.
    """

    rows: Array
    values: Array
    indices: Array | None
    count: int
    statistics: MatrixStatistics | None
    share: float | None


def losses(tensors: Sequence[Tensor], size: int, statistics: Statistics | None, choices: Sequence[Choice]) -> Losses:
    """Measure the loss of a matrix for each choice on a sample of its rows.

    Parameters
    ----------
    tensors : sequence of Tensor
        The matrix, with its name in the statistics; several tensors if experts are stored as one tensor.
    size : int
        The number of weights of all tensors.
    statistics : Statistics, optional
    choices : sequence of Choice
    """
    max_elements = _QUANTIZER_SAMPLE if any(choice.quantizer for choice in choices) else SAMPLE
    measured = [tensors[index] for index in _spread(len(tensors), _EXPERTS)]
    samples = [(tensor, sample) for tensor in measured for sample in _samples(tensor, statistics, max_elements)]
    losses_by_sample = [_losses(tensor, sample, choices) for tensor, sample in samples]
    scale = size / max(sum(sample.count * sample.rows.shape[1] for _, sample in samples), 1)
    *by_choice, noise = (_combine(column, scale, size) for column in zip(*losses_by_sample, strict=True))
    assert noise is not None
    return Losses(by_choice, noise)


def _spread(count: int, max_count: int) -> list[int]:
    """Return at most ``max_count`` indices below ``count``, evenly spaced, including the first and the last."""
    return sorted(set(np.linspace(0, count - 1, min(count, max_count)).astype(int).tolist()))


def _combine(sample_losses: Sequence[Loss | None], scale: float, size: int) -> Loss | None:
    """Return the loss of a unit, given the losses of its samples.

    Errors are averaged. Divergences are added, and multiplied by ``scale``.

    Returns None if the codec refuses a sample. ``scale`` is the number of weights of all matrices, divided by the
    number of weights of the sampled matrices.
    """
    measured = [loss for loss in sample_losses if loss is not None]
    if len(measured) < len(sample_losses):
        return None
    outputs = [loss.outputs for loss in measured if loss.outputs is not None]
    divergences = [loss.divergence for loss in measured if loss.divergence is not None]
    return Loss(
        size * sum(loss.weights for loss in measured) / len(measured),
        sum(outputs) / len(outputs) if len(outputs) == len(measured) else None,
        scale * sum(divergences) if len(divergences) == len(measured) else None,
    )


def _samples(tensor: Tensor, statistics: Statistics | None, max_elements: int) -> Iterator[_Sample]:
    """Yield a sample of a tensor, or samples of several experts if the statistics have separate matrices for them."""
    lead = tensor.shape[:-2]
    if statistics is not None and lead and statistics.for_matrix(f"{tensor.name}:expert.0") is not None:
        for expert in _spread(prod(lead), _EXPERTS):
            values = tensor[tuple(map(int, np.unravel_index(expert, lead)))]
            indices = np.array(_spread(len(values), max(1, max_elements // _EXPERTS // values.shape[1])))
            matrix_statistics = statistics.for_matrix(f"{tensor.name}:expert.{expert}")
            yield _sample(tensor, values[indices], indices, len(values), matrix_statistics)
        return
    values = sample_of(tensor, max_elements)
    rows = sampled_rows(tensor, max_elements)
    matrix_statistics = None if statistics is None or rows is None else statistics.for_matrix(tensor.name)
    count, cols = tensor.matrix_shape
    if matrix_statistics is not None:
        matrix_statistics.require_shape(count, cols)
    yield _sample(tensor, values, rows, tensor.size // max(values.shape[1], 1), matrix_statistics)


def _sample(
    tensor: Tensor, values: Array, indices: Array | None, count: int, statistics: MatrixStatistics | None
) -> _Sample:
    usable = statistics if statistics is not None and statistics.count else None
    share = _SHARES.get(role_of(tensor.name)) if usable is not None and usable.has_inputs else None
    return _Sample(np.ascontiguousarray(cast(values, "f32")), values, indices, count, usable, share)


def _losses(tensor: Tensor, sample: _Sample, choices: Sequence[Choice]) -> list[Loss | None]:
    """Return the losses of a sample for each choice, followed by the loss for white noise."""
    rows = sample.rows
    if not np.isfinite(rows).all():
        return [*(Loss(0.0, 0.0, 0.0) if _exact(choice) else None for choice in choices), Loss(0.0)]
    factors = None
    if sample.statistics is not None:
        factors = factors_of(sample.statistics)
        if factors.outputs is not None and sample.indices is not None:
            selected = np.ix_(sample.indices, sample.indices)
            factors = replace(factors, outputs=np.ascontiguousarray(factors.outputs[selected]))
    norms = max(_squares(rows), 1e-300), 1.0 if factors is None else max(_output_squares(rows, factors), 1e-300)
    result: list[Loss | None] = []
    for choice in choices:
        try:
            error = None if _exact(choice) else _stored(tensor, sample, choice, factors) - rows
        except (CodecError, UnsupportedError):
            result.append(None)
            continue
        result.append(_loss(error, sample, factors, norms))
    return [*result, _noise(sample, factors, norms)]


def _noise(sample: _Sample, factors: Factors | None, norms: tuple[float, float]) -> Loss:
    """Return the loss for white noise with the norm of the matrix; the factors have mean 1.

    ``norms`` are the squared norms of the weights and of the outputs.
    """
    if factors is None:
        return Loss(1.0)
    if factors.outputs is None and sample.share is None:
        return Loss(1.0, norms[0] / norms[1])
    return Loss(1.0, norms[0] / norms[1], _nats(norms[0], sample, factors))


def _nats(squared_error: float, sample: _Sample, factors: Factors) -> float:
    """Return the divergence in nats per token for a squared error that is weighted with the factors."""
    per_row = factors.scale / 2 * max(squared_error, 0.0) / len(sample.rows)
    share = sample.share
    return per_row * (share if factors.outputs is None and share is not None else sample.count)


def _loss(error: Array | None, sample: _Sample, factors: Factors | None, norms: tuple[float, float]) -> Loss:
    """Return the loss for an error of the sample's rows; ``error`` is None if the choice is exact."""
    if error is None:
        return Loss(0.0, 0.0, 0.0)
    weights = _squares(error) / norms[0]
    if factors is None:
        return Loss(weights)
    product = multiply(error, factors.inputs)
    outputs = float(np.vdot(error.astype(np.float64), product)) / norms[1]
    if factors.outputs is not None:
        product = multiply(factors.outputs, product)
    elif sample.share is None:
        return Loss(weights, outputs)
    squared_error = float(np.vdot(error.astype(np.float64), product))
    return Loss(weights, outputs, _nats(squared_error, sample, factors))


def _exact(choice: Choice) -> bool:
    return choice.quantizer is None and CODECS[choice.codec].lossless and not choice.changes_values


def _stored(tensor: Tensor, sample: _Sample, choice: Choice, factors: Factors | None) -> Array:
    """Return the sample's rows after they are stored by a choice and decoded, in f32."""
    if choice.quantizer is None:
        return stored_rows(tensor, choice, sample.values)
    quantizer = parse_quantizer(choice.quantizer, choice.codec, choice.options)
    return values_of(round_with(quantizer, sample.rows, factors or no_factors(sample.rows.shape[1])))


def _squares(values: Array) -> float:
    return float(np.vdot(values.astype(np.float64), values))


def _output_squares(rows: Array, factors: Factors) -> float:
    return float(np.vdot(rows.astype(np.float64), multiply(rows, factors.inputs)))


@dataclass(frozen=True, slots=True)
class Measure:
    """Conversion of losses to comparable costs: coefficients for relative errors of weights and of outputs.

    Costs are in nats per token if ``absolute``. ``by`` has the number of matrices for each type of statistics.
    """

    weights: float
    outputs: float
    absolute: bool
    by: Mapping[str, int]

    def cost(self, loss: Loss) -> float:
        """Return the cost of a loss, computed from its best measure: divergence, outputs, or weights."""
        if loss.divergence is not None:
            return loss.divergence
        return self.weights * loss.weights if loss.outputs is None else self.outputs * loss.outputs


BOTH = "both factors"
INPUTS = "inputs"
NOTHING = "weights alone"


def measure_of(losses_by_unit: Mapping[str, Losses], sizes: Mapping[str, int]) -> Measure:
    """Return the coefficients that make losses comparable; ``sizes`` has the number of weights of each unit.

    If no matrix has a divergence, the sum of all costs is a mean of relative squared errors.
    """
    noises = [losses.noise for losses in losses_by_unit.values()]
    by = {BOTH: 0, INPUTS: 0, NOTHING: 0}
    for noise in noises:
        by[BOTH if noise.divergence is not None else NOTHING if noise.outputs is None else INPUTS] += 1
    counts = {key: count for key, count in by.items() if count}
    if by[BOTH]:
        outputs = _mean_ratio([(noise.divergence, noise.outputs) for noise in noises])
        return Measure(_mean_ratio([(noise.divergence, noise.weights) for noise in noises]), outputs, True, counts)
    if by[INPUTS]:
        share = 1 / len(losses_by_unit)
        weights = share * _mean_ratio([(noise.outputs, noise.weights) for noise in noises])
        return Measure(weights, share, False, counts)
    return Measure(1 / max(float(sum(sizes[name] for name in losses_by_unit)), 1.0), 1.0, False, counts)


def _mean_ratio(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the geometric mean of the ratios of the pairs' values.

    Pairs with None or 0 are ignored. If there are no other pairs, the result is 1.
    """
    ratios = [log(numerator / denominator) for numerator, denominator in pairs if numerator and denominator]
    return exp(sum(ratios) / len(ratios)) if ratios else 1.0
