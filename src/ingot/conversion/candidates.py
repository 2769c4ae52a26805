"""Measuring the candidates of a recipe's rule on a sample of a tensor, so that a plan can pick one of them.

The sample is the same for any number of threads and any ceiling of memory: what is picked may not depend on them.
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
from ingot.core.bytes import encodings
from ingot.core.numeric.dtypes import DTYPES, FLOATS, from_file, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.engine.chunks import leading_rows
from ingot.errors import CodecError, IngotError, UnsupportedError
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.recipes.choice import SMALLEST, Choice, Measured

SAMPLE = 1 << 20
"""Elements that a sample has at most, in whole rows unless one row is longer."""

_PIECES = 16
_PIECE_ROWS = 64
# A row this long is sampled in runs instead of whole.
_RUN = SAMPLE // _PIECES
STORED = "as stored"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way that tensor and target allow: what will be stored, and whether every value survives.

    ``choice`` is None for the tensor as it is stored already. ``share`` of the tensor is left by pruning; how well the
    rest is kept is measured as if nothing was pruned.
    """

    choice: Choice | None
    spec: TensorSpec
    exact: bool
    share: float = 1.0

    def __str__(self) -> str:
        return STORED if self.choice is None else str(self.choice)


@dataclass(frozen=True, slots=True)
class Picked:
    """The candidate's index, None if every one failed, and why it was picked, for the report."""

    index: int | None
    reason: str


def pick(tensor: Tensor, measured: Measured, candidates: Sequence[Candidate]) -> Picked:
    """Pick one of ``candidates``; reads a sample of the tensor where figures known beforehand do not decide.

    A candidate whose codec refuses the sampled values (``CodecError``) is left out, and the reason says so.
    """
    trials = _Trials(tensor)
    best = _smallest(trials, candidates) if measured.pick == SMALLEST else _accurate(trials, measured, candidates)
    failed = [f"not {choice}: {rule}" for choice, rule in trials.failed]
    return Picked(best.index, "; ".join([*failed, *([best.reason] if best.reason else [])]))


def trial_snr_db(tensor: Tensor, choice: Choice) -> float | None:
    """Return the signal-to-noise ratio in decibels of a tensor's sample stored as ``choice`` says.

    Infinite where nothing is lost, None where the codec refuses the values.
    """
    spec = TensorSpec(tensor.name, tensor.shape, tensor.dtype, choice.codec, ())
    exact = CODECS[choice.codec].lossless and not choice.changes_values
    return _Trials(tensor).snr_db(Candidate(choice, spec, exact))


def stored_rows(tensor: Tensor, choice: Choice, rows: Array) -> Array:
    """Return what rows of a tensor become if they are stored as ``choice`` says: f32 of their shape.

    Raises ``CodecError`` and ``UnsupportedError`` where the codec refuses them.
    """
    encoder = _fitted(tensor, choice, rows)
    decoded = np.empty(rows.shape, np.float32)
    encoder.decode(encoder.encode(rows), decoded)
    return decoded


def _fitted(tensor: Tensor, choice: Choice, rows: Array) -> Encoder:
    """Return an encoder of a sample's rows that has seen them as often as it wants to."""

    def made(options: Mapping[str, Any]) -> Encoder:
        return CODECS[choice.codec].encoder(_shape(tensor, rows), tensor.dtype, options)

    encoder = resolve_range(made(choice.options), made, choice.options, [(0, rows)])[0]
    for _ in range(encoder.fit_passes):
        encoder.fit_pass(rows)
    return encoder


def _shape(tensor: Tensor, rows: Array) -> tuple[int, ...]:
    """Return the shape to encode a sample under: the tensor's number of dimensions, where that is possible."""
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
    least = measured.min_snr_db or 0.0
    below: list[tuple[int, float]] = []
    for index, candidate in enumerate(candidates):
        snr = trials.snr_db(candidate)
        if snr is not None and snr >= least:
            return Picked(index, _compared(below, least) + _reached(candidate, snr, least))
        if snr is not None:
            below.append((index, snr))
    if not below:
        return Picked(None, "")
    last = below[-1][0]
    return Picked(last, _compared(below, least) + str(candidates[last]))


def _compared(below: Sequence[tuple[int, float]], least: float) -> str:
    return f"{', '.join(f'{snr:.2f}' for _, snr in below)} dB < {least:g}: " if below else ""


def _reached(candidate: Candidate, snr: float, least: float) -> str:
    return f"{candidate}, exact" if snr == inf else f"{candidate}, {snr:.2f} dB >= {least:g}"


class _Trials:
    """Encodes one sample of one tensor in several ways."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._sample: Array | None = None
        self.failed: list[tuple[Choice, str]] = []

    def size(self, candidate: Candidate) -> float | None:
        """Return the stored bytes of the whole tensor: exact where they are known, else in proportion to the sample's.

        None where the codec refuses the values.
        """
        spec, choice = candidate.spec, candidate.choice
        lengths = [part.length for part in spec.parts]
        if choice is None or None not in lengths:
            return float(sum(length or 0 for length in lengths))
        parts = self._encoded(choice)
        if parts is None:
            return None
        scale = candidate.share * self._tensor.size / max(self._rows().size, 1)
        return sum(_stored(part, parts.get(part.role), scale) for part in spec.parts)

    def snr_db(self, candidate: Candidate) -> float | None:
        """Return the signal-to-noise ratio over the sample; infinite for what is exact, None where it is refused."""
        if candidate.exact or candidate.choice is None:
            return inf
        rows = self._rows()
        choice = candidate.choice
        try:
            return measure(rows, stored_rows(self._tensor, choice, rows)).snr_db
        except (CodecError, UnsupportedError) as error:  # the latter: groups that fit the tensor and not its sample
            self._failed(choice, error)
            return None

    def _encoded(self, choice: Choice) -> dict[str, Array] | None:
        rows = self._rows()
        try:
            return _fitted(self._tensor, choice, rows).encode(rows)
        except (CodecError, UnsupportedError) as error:
            self._failed(choice, error)
            return None

    def _failed(self, choice: Choice, error: IngotError) -> None:
        self.failed.append((choice, error.rule or "refused"))

    def _rows(self) -> Array:
        if self._sample is None:
            self._sample = sample_of(self._tensor)
        return self._sample


def _stored(part: PartSpec, sample: Array | None, scale: float) -> float:
    """Return the bytes of a part whose like over the sample is ``sample``."""
    if part.length is not None or sample is None:
        return float(part.at_most)
    if part.encoding == "raw":
        return sample.nbytes * scale
    data = sample.reshape(-1).view(np.uint8) if sample.size else np.empty(0, np.uint8)
    packed = sum(
        len(encodings.compress_frame(data[start : start + encodings.FRAME].data))
        for start in range(0, max(data.nbytes, 1), encodings.FRAME)
    )
    whole = part.uncompressed_length or 0
    return float(packed) if whole == data.nbytes else packed * whole / max(data.nbytes, 1)


def sample_of(tensor: Tensor, most: int = SAMPLE) -> Array:
    """Return evenly spaced rows of a tensor, at most about ``most`` elements: a matrix in its own dtype.

    All of it where it is small. Dense raw tensors are read where the rows lie, others from the start to the last row
    of the sample. Digests, which are of whole parts, are left to the conversion.
    """
    streams_runs = tensor.codec in CODECS and CODECS[tensor.codec].elementwise
    rows, cols = tensor.matrix_shape
    if cols > _RUN and tensor.size > most and streams_runs:
        rows = tensor.size // _RUN
        cols = _RUN
    ranges = _pieces(rows, cols, most)
    out = empty((sum(count for _, count in ranges), cols), tensor.dtype, tensor.name)
    if not out.size:
        return out
    part = tensor.parts.get("data")
    if tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw":
        _read_at(tensor, ranges, out)
    else:
        _read_on(tensor, ranges, out, streams_runs)
    return out


def sampled_rows(tensor: Tensor, most: int = SAMPLE) -> Array | None:
    """Return which rows ``sample_of`` takes: i64; None where it takes runs of other lengths."""
    rows, cols = tensor.matrix_shape
    if cols > _RUN and tensor.size > most:
        return None
    return np.concatenate([np.arange(start, start + count) for start, count in _pieces(rows, cols, most)])


def _pieces(rows: int, cols: int, most: int) -> list[tuple[int, int]]:
    """Return starts and numbers of the sampled rows."""
    if rows * cols <= most:
        return [(0, rows)]
    each = max(1, min(_PIECE_ROWS, most // (_PIECES * cols)))
    count = max(1, most // (each * cols))
    return [(index * (rows - each) // max(count - 1, 1), each) for index in range(count)]


def _read_at(tensor: Tensor, ranges: Sequence[tuple[int, int]], out: Array) -> None:
    # Unchecked: a sample only helps to choose, and whoever then encodes the tensor checks all of it.
    row = DTYPES[tensor.dtype]
    part = replace(tensor.parts["data"], verify=False)
    width = out.shape[1] * row.bits // 8
    done = 0
    for start, count in ranges:
        raw = np.empty(count * width, np.uint8)
        part.readinto(start * width, raw.data)
        values = from_file(raw, row.storage).view(numpy_dtype(row.name))
        out[done : done + count] = values.reshape(count, -1)
        done += count


def _read_on(tensor: Tensor, ranges: Sequence[tuple[int, int]], out: Array, runs: bool) -> None:
    cols = out.shape[1]
    reader = CODECS[tensor.codec].reader(tensor)
    skipped = empty((max(1, SAMPLE // _PIECES // cols), cols), tensor.dtype, tensor.name)
    position = done = 0

    def read(rows: Array) -> None:
        reader.read_into(rows.reshape(-1, 1) if runs else rows)

    for start, count in ranges:
        while position < start:
            step = min(len(skipped), start - position)
            read(skipped[:step])
            position += step
        read(out[done : done + count])
        position = position + count
        done = done + count


def first_values(tensor: Tensor) -> Iterator[tuple[int, Array]]:
    """Yield rows from the first on; no more where those begin small and a sample of the others is all zeros."""
    if tensor.dtype not in FLOATS:
        return
    looked = False
    for start, values in leading_rows(tensor):
        if start and not looked and not sample_of(tensor).any():
            return
        looked = start > 0
        yield start, values[0]
