"""Measurement of a rule's candidates on a sample of a tensor, so that a plan can pick one of them.

The sample and the pick do not depend on the number of threads or on the memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, empty
from ingot.codecs.resolve_range import resolve_range
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, FLOATS, from_file, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.engine.chunks import leading_rows
from ingot.engine.frames import part_encoder
from ingot.errors import CodecError, IngotError, UnsupportedError
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.recipes.choice import SMALLEST, Choice, Measured

SAMPLE = 1 << 20
"""The maximum number of elements of a sample, which consists of full rows unless one row is longer."""

_RUN_COUNT = 16
_RUN_ROWS = 64

# The number of consecutive elements of a sampled part of a row that is longer than a sample.
_RUN_LENGTH = SAMPLE // _RUN_COUNT
STORED = "as stored"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store a tensor that the recipe's rule lists and the target supports.

    ``choice`` is None if the tensor is stored as in the source. ``share`` is the share of the tensor, 0 to 1, that
    pruning leaves; errors are measured on the unpruned tensor.
    """

    choice: Choice | None
    spec: TensorSpec
    exact: bool
    share: float = 1.0

    def __str__(self) -> str:
        return STORED if self.choice is None else str(self.choice)


@dataclass(frozen=True, slots=True)
class Picked:
    """The index of the picked candidate, None if all failed, and the reason for the report."""

    index: int | None
    reason: str


def pick(tensor: Tensor, measured: Measured, candidates: Sequence[Candidate]) -> Picked:
    """Return the best of ``candidates``; read a sample of the tensor if the sizes in the specs do not determine it.

    A candidate whose codec raises ``CodecError`` for the sampled values is left out, and the reason names it.
    """
    trials = _Trials(tensor)
    best = _smallest(trials, candidates) if measured.pick == SMALLEST else _accurate(trials, measured, candidates)
    failed = [f"not {choice}: {rule}" for choice, rule in trials.failed]
    return Picked(best.index, "; ".join([*failed, *([best.reason] if best.reason else [])]))


def trial_snr_db(tensor: Tensor, choice: Choice) -> float | None:
    """Return the signal-to-noise ratio in decibels after a tensor's sample is stored by ``choice`` and decoded.

    It is infinite if no value changes, and None if the codec refuses the values.
    """
    spec = TensorSpec(tensor.name, tensor.shape, tensor.dtype, choice.codec, ())
    exact = CODECS[choice.codec].lossless and not choice.changes_values
    return _Trials(tensor).snr_db(Candidate(choice, spec, exact))


def stored_rows(tensor: Tensor, choice: Choice, rows: Array) -> Array:
    """Encode rows of a tensor by ``choice`` and return the decoded values, f32 of the same shape.

    Raises ``CodecError`` and ``UnsupportedError`` if the codec refuses the values or the shape.
    """
    encoder = _fitted(tensor, choice, rows)
    decoded = np.empty(rows.shape, np.float32)
    encoder.decode(encoder.encode(rows), decoded)
    return decoded


def _fitted(tensor: Tensor, choice: Choice, rows: Array) -> Encoder:
    """Return an encoder after all of its fitting passes over the sampled rows."""

    def build(options: Mapping[str, Any]) -> Encoder:
        return CODECS[choice.codec].encoder(_shape(tensor, rows), tensor.dtype, options)

    encoder = resolve_range(build(choice.options), build, choice.options, [(0, rows)])[0]
    for _ in range(encoder.fit_passes):
        encoder.fit_pass(rows)
    return encoder


def _shape(tensor: Tensor, rows: Array) -> tuple[int, ...]:
    """Return the shape in which a sample is encoded; it has the number of dimensions of the tensor if possible."""
    shape = tensor.shape
    if rows.size == tensor.size:
        return shape
    return (rows.size,) if len(shape) == 1 else ((1,) * (len(shape) - 2)) + rows.shape


def _smallest(trials: _Trials, candidates: Sequence[Candidate]) -> Picked:
    sizes = {0: 0.0} if len(candidates) == 1 else dict(_sizes(trials, candidates))
    if not sizes:
        return Picked(None, "")
    best = min(sizes, key=lambda index: (sizes[index], index))
    return Picked(best, str(candidates[best]))


def _sizes(trials: _Trials, candidates: Sequence[Candidate]) -> Iterator[tuple[int, float]]:
    for index, candidate in enumerate(candidates):
        size = trials.size(candidate)
        if size is not None:
            yield index, size


def _accurate(trials: _Trials, measured: Measured, candidates: Sequence[Candidate]) -> Picked:
    limit = measured.min_snr_db or 0.0
    below: list[tuple[int, float]] = []
    for index, candidate in enumerate(candidates):
        snr = trials.snr_db(candidate)
        if snr is not None and snr >= limit:
            return Picked(index, _failed_label(below, limit) + _passed_label(candidate, snr, limit))
        if snr is not None:
            below.append((index, snr))
    if not below:
        return Picked(None, "")
    last = below[-1][0]
    return Picked(last, _failed_label(below, limit) + str(candidates[last]))


def _failed_label(below: Sequence[tuple[int, float]], limit: float) -> str:
    return f"{', '.join(f'{snr:.2f}' for _, snr in below)} dB < {limit:g}: " if below else ""


def _passed_label(candidate: Candidate, snr: float, limit: float) -> str:
    return f"{candidate}, exact" if snr == inf else f"{candidate}, {snr:.2f} dB >= {limit:g}"


class _Trials:
    """Encodings of a sample of a tensor by several candidates; the sample is read on first use."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._sample: Array | None = None
        self.failed: list[tuple[Choice, str]] = []

    def size(self, candidate: Candidate) -> float | None:
        """Return the size of the full tensor in bytes: as in the spec if possible, else extrapolated from the sample.

        Returns None if the codec refuses the values.
        """
        choice = candidate.choice
        parts = candidate.spec.parts
        lengths = [part.length for part in parts]
        if choice is None or None not in lengths:
            return float(sum(length or 0 for length in lengths))
        encoded = self._encode(choice)
        if encoded is None:
            return None
        scale = candidate.share * self._tensor.size / max(self._rows().size, 1)
        return sum(_part_size(candidate.spec, part, encoded.get(part.role), scale) for part in parts)

    def snr_db(self, candidate: Candidate) -> float | None:
        """Return the signal-to-noise ratio over the sample; infinite if exact, None if the codec refuses the values."""
        if candidate.exact or candidate.choice is None:
            return inf
        rows = self._rows()
        choice = candidate.choice
        try:
            return measure(rows, stored_rows(self._tensor, choice, rows)).snr_db
        except (CodecError, UnsupportedError) as error:  # UnsupportedError: a group size that does not fit the sample
            self._record_failure(choice, error)
            return None

    def _encode(self, choice: Choice) -> dict[str, Array] | None:
        rows = self._rows()
        try:
            return _fitted(self._tensor, choice, rows).encode(rows)
        except (CodecError, UnsupportedError) as error:
            self._record_failure(choice, error)
            return None

    def _record_failure(self, choice: Choice, error: IngotError) -> None:
        self.failed.append((choice, error.rule or "refused"))

    def _rows(self) -> Array:
        if self._sample is None:
            self._sample = sample_of(self._tensor)
        return self._sample


def _part_size(spec: TensorSpec, part: PartSpec, sample: Array | None, scale: float) -> float:
    """Return the size of a part in bytes: as in the spec, else the size of the encoded ``sample`` times ``scale``."""
    if part.length is not None or sample is None:
        return float(part.at_most)
    if part.encoding == "raw":
        return sample.nbytes * scale
    data = sample.reshape(-1).view(np.uint8) if sample.size else np.empty(0, np.uint8)
    size = compressed_size(spec, part, data)
    length = part.uncompressed_length or 0
    return float(size) if length == data.nbytes else size * length / max(data.nbytes, 1)


def compressed_size(spec: TensorSpec, part: PartSpec, data: Array) -> int:
    """Return the bytes of ``data`` (u8) in the encoding of a part."""
    encoder = part_encoder(spec, part)
    contents = (data[start : start + encoder.content] for start in range(0, max(data.nbytes, 1), encoder.content))
    return sum(len(encoder.add(encoder.encode(content.tobytes())())) for content in contents) + len(encoder.index())


def sample_of(tensor: Tensor, max_elements: int = SAMPLE) -> Array:
    """Return evenly spaced rows of a tensor as a matrix in the tensor's dtype.

    The matrix has at most about ``max_elements`` elements.

    A tensor with fewer elements is returned in full. For a raw dense tensor, only the sampled rows are read; any other
    tensor is read from its start to the last sampled row. Digests are not checked.
    """
    elementwise = tensor.codec in CODECS and CODECS[tensor.codec].elementwise
    rows, cols = tensor.matrix_shape
    if cols > _RUN_LENGTH and tensor.size > max_elements and elementwise:
        rows = tensor.size // _RUN_LENGTH
        cols = _RUN_LENGTH
    runs = _sampled_runs(rows, cols, max_elements)
    out = empty((sum(count for _, count in runs), cols), tensor.dtype, tensor.name)
    if not out.size:
        return out
    part = tensor.parts.get("data")
    if tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw":
        _read_runs(tensor, runs, out)
    else:
        _decode_runs(tensor, runs, out, elementwise)
    return out


def sampled_rows(tensor: Tensor, max_elements: int = SAMPLE) -> Array | None:
    """Return the indices of the rows that ``sample_of`` returns, i64; None if it returns parts of rows."""
    rows, cols = tensor.matrix_shape
    if cols > _RUN_LENGTH and tensor.size > max_elements:
        return None
    return np.concatenate([np.arange(start, start + count) for start, count in _sampled_runs(rows, cols, max_elements)])


def _sampled_runs(rows: int, cols: int, max_elements: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each run of sampled rows."""
    if rows * cols <= max_elements:
        return [(0, rows)]
    run_rows = max(1, min(_RUN_ROWS, max_elements // (_RUN_COUNT * cols)))
    count = max(1, max_elements // (run_rows * cols))
    return [(index * (rows - run_rows) // max(count - 1, 1), run_rows) for index in range(count)]


def _read_runs(tensor: Tensor, runs: Sequence[tuple[int, int]], out: Array) -> None:
    # Digests are not checked: a sample only guides a choice, and encoding later checks the full tensor.
    row = DTYPES[tensor.dtype]
    part = replace(tensor.parts["data"], verify=False)
    width = out.shape[1] * row.bits // 8
    filled = 0
    for start, count in runs:
        raw = np.empty(count * width, np.uint8)
        part.readinto(start * width, raw.data)
        values = from_file(raw, row.storage).view(numpy_dtype(row.name))
        out[filled : filled + count] = values.reshape(count, -1)
        filled += count


def _decode_runs(tensor: Tensor, runs: Sequence[tuple[int, int]], out: Array, elementwise: bool) -> None:
    cols = out.shape[1]
    reader = CODECS[tensor.codec].reader(tensor)
    skipped = empty((max(1, SAMPLE // _RUN_COUNT // cols), cols), tensor.dtype, tensor.name)
    position = filled = 0

    def read(rows: Array) -> None:
        reader.read_into(rows.reshape(-1, 1) if elementwise else rows)

    for start, count in runs:
        while position < start:
            step = min(len(skipped), start - position)
            read(skipped[:step])
            position += step
        read(out[filled : filled + count])
        position = position + count
        filled = filled + count


def first_values(tensor: Tensor) -> Iterator[tuple[int, Array]]:
    """Yield (first row, values) for the chunks of a floating-point tensor, in order.

    If a sample that is read after the first chunk is all zeros, the other chunks are not yielded.
    """
    if tensor.dtype not in FLOATS:
        return
    sampled = False
    for start, values in leading_rows(tensor):
        if start and not sampled and not sample_of(tensor).any():
            return
        sampled = start > 0
        yield start, values[0]
