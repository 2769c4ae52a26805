"""The affine family's integers as other programs pack them (``spec/affine_words.md``)."""

from __future__ import annotations

import numpy as np

from ingot.codecs.affine.repack import AffineRepack, difference, pieces
from ingot.codecs.affine.word_rows import AWQ_PLACES, packed_words, plane_words, unpacked
from ingot.codecs.base import Repacked, RepackReader, cannot
from ingot.core import native
from ingot.core.dtypes import file_bytes, from_file
from ingot.core.floats import cast
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, AffineLayout, Points
from ingot.model.layouts.words import AWQ, AWQ_GEMV, GPTQ_PLANES, GPTQ_V1, MODELOPT, WordsLayout, words
from ingot.model.tensor import Array, Tensor

_ROWS = 256  # that are brought to words at a time where all are turned together
_PLANES_MEMORY = 24  # bytes per code on the way to planes: a byte a bit, twice, and words


def to_words(tensor: Tensor, stored: AffineLayout, target: WordsLayout) -> Repacked:
    """Return a checked tensor of layout ``stored`` in the layout ``target``.

    What goes row by row is made chunk by chunk; what is turned is made of all rows at once.
    """
    rows, cols = tensor.matrix_shape
    reason = "the order or factors of columns are not known" if target.scattered else difference(stored, target.rows)
    if len(tensor.shape) != 2 or not rows or not cols:
        reason = f"words are of matrices with weights in them, not of shape {list(tensor.shape)}"
    elif target.form == AWQ and (rows % 8 or cols % 8):
        reason = f"AWQ has rows and columns in eights, not {rows} x {cols}"
    elif target.form == GPTQ_PLANES and (rows % 32 or cols % 32):
        reason = f"planes are of rows and columns in 32s, not {rows} x {cols}"
    elif target.form == MODELOPT and rows % 2:
        reason = f"ModelOpt has two rows in a byte, not {rows} rows"
    elif not target.known.written:
        reason = f"the form {target.form} is read only"
    if reason is not None:
        return cannot(target, reason)
    plain = AffineRepack(tensor, stored, target.rows)
    parts = target.part_specs(tensor.shape)
    why_not = plain.why_not() or _why_not(plain, target)
    memory = 3 * plain.memory + 16 * target.groups(cols)
    step = 32
    if target.turned:  # codes and words of all rows, and what some of them take on the way
        width, groups = 4 * words(cols, target.bits), target.groups(cols)
        if target.form == GPTQ_PLANES:
            memory += _PLANES_MEMORY * cols
        memory, step = 2 * width + 24 * groups + -(-memory * min(_ROWS, rows) // rows), rows
    return Repacked(target, parts, rows, step, memory, why_not, lambda: _reader(plain, target))


def _reader(plain: AffineRepack, target: WordsLayout) -> RepackReader:
    return TurnedReader(plain, target) if target.turned else RowsReader(plain, target)


def _range(target: WordsLayout) -> tuple[int, int]:
    """Return the least and the largest zero point that the form holds."""
    if target.signed:
        return -128, 127
    return int(target.form == GPTQ_V1), (1 << target.bits) - 1


def _why_not(plain: AffineRepack, target: WordsLayout) -> str | None:
    """Why the form cannot hold a zero point; reads them, and checks their digest, where they must be."""
    if not isinstance(target.zero, Points):
        return None
    fits = True
    every = pieces(plain.tensor.parts[ZEROS]) if plain.stored.zeros else iter((plain.new_zeros(1),))
    for zeros in every:
        shifted = plain.shift(zeros) if plain.stored.zeros else zeros
        fits = fits and _integers(shifted, target) is not None
    low, high = _range(target)
    return None if fits else f"zero points are integers from {low} to {high} in the form {target.form}"


def _integers(zeros: Array, target: WordsLayout) -> Array | None:
    low, high = _range(target)
    wide = cast(zeros, "f32")
    if not bool(((wide >= low) & (wide <= high) & (wide == np.rint(wide))).all()):
        return None
    return wide.astype(np.int16)


class _Reader:
    """One pass over a tensor's parts."""

    def __init__(self, plain: AffineRepack, target: WordsLayout) -> None:
        self._inner, self._target, self._where = plain.reader(), target, plain.tensor.name
        self._cols = plain.tensor.matrix_shape[1]
        self._groups = target.groups(self._cols)

    def finish(self) -> None:
        self._inner.finish()

    def _rows(self, rows: int) -> tuple[Array, Array, Array | None]:
        """Return the next rows: codes [rows, whole words in bytes], scales and zero points [rows, groups]."""
        parts = self._inner.read(rows)
        padded = codes = parts[CODES].reshape(rows, -1)
        if codes.shape[1] % 4:
            padded = np.zeros((rows, -(-codes.shape[1] // 4) * 4), np.uint8)
            padded[:, : codes.shape[1]] = codes
        zeros = None
        if ZEROS in parts:
            zeros = _integers(parts[ZEROS].reshape(rows, -1), self._target)
            if zeros is None:  # ``_why_not`` saw others
                raise IntegrityError(
                    "store.changed",
                    "expected the zero points that were read before, found others: the source changed",
                    where=self._where,
                )
        return padded, parts[SCALES].reshape(rows, -1), zeros


class RowsReader(_Reader):
    """Makes forms that go row by row."""

    def read(self, rows: int) -> dict[str, Array]:
        target = self._target
        codes, scales, zeros = self._rows(rows)
        if target.form == MODELOPT:
            return {CODES: self._in_pairs(codes), SCALES: scales}
        if target.signed:
            codes = codes[:, : self._cols].view(np.int8)
        if target.form != AWQ_GEMV:
            parts = {CODES: codes, SCALES: scales}
            if zeros is not None:
                packed = zeros.astype(np.int8) if target.signed else packed_words(zeros.T, target.bits).T
                parts[ZEROS] = np.ascontiguousarray(packed)
            return parts
        return self._for_gemv(codes, scales, zeros)

    def _in_pairs(self, codes: Array) -> Array:
        """Return rows of codes in words as bytes of two rows each, the first in the low bits."""
        every = unpacked(from_file(codes.reshape(-1), "u32").reshape(len(codes), -1), 4, self._cols)
        pairs: Array = every[0::2] | every[1::2] << 4
        return pairs

    def _for_gemv(self, codes: Array, scales: Array, zeros: Array | None) -> dict[str, Array]:
        target, rows = self._target, len(codes)
        width = target.zero_shape((rows, self._cols))[1]
        wide = np.zeros((rows, 8 * width), scales.dtype)
        wide[:, : self._groups] = scales
        parts = {CODES: codes, SCALES: wide}
        if zeros is not None:
            points = np.zeros((rows, 8 * width), np.uint8)
            points[:, : self._groups] = zeros
            parts[ZEROS] = packed_words(points, target.bits)
        return parts


class TurnedReader(_Reader):
    """Makes forms whose words hold several inputs of one output, or several outputs of one input: of all rows."""

    def read(self, rows: int) -> dict[str, Array]:
        target = self._target
        codes, scales, zeros = self._every(rows)
        turned = np.empty(codes.size, np.uint8)
        turn = native.kernels.words_to_awq if target.form == AWQ else native.kernels.words_turn
        turn(codes.reshape(-1), 0, codes.shape[1], rows, codes.shape[1] // 4, turned)
        parts = {CODES: turned, SCALES: np.ascontiguousarray(scales.T)}
        if zeros is not None:
            points = zeros.T - 1 if target.form == GPTQ_V1 else zeros.T
            pack = plane_words if target.form == GPTQ_PLANES else packed_words
            parts[ZEROS] = _awq_words(points) if target.form == AWQ else pack(points, target.bits)
        return parts

    def _in_planes(self, rows: Array) -> Array:
        """Return rows of codes in words, one stream a row, as words of planes; both in bytes as files have them."""
        stored = from_file(rows.reshape(-1), "u32").reshape(len(rows), -1)
        packed = plane_words(unpacked(stored, self._target.bits, self._cols), self._target.bits)
        return np.frombuffer(file_bytes(packed), np.uint8).reshape(len(rows), -1)

    def _every(self, rows: int) -> tuple[Array, Array, Array | None]:
        """Return all rows, as ``_rows`` does: read some at a time, since reading takes several times their bytes."""
        codes = np.empty((rows, 4 * words(self._cols, self._target.bits)), np.uint8)
        scales, zeros = list[Array](), list[Array]()
        for start in range(0, rows, _ROWS):
            some, steps, points = self._rows(min(_ROWS, rows - start))
            codes[start : start + _ROWS] = self._in_planes(some) if self._target.form == GPTQ_PLANES else some
            scales.append(steps)
            zeros += [] if points is None else [points]
        return codes, np.concatenate(scales), np.concatenate(zeros) if zeros else None


def _awq_words(points: Array) -> Array:
    """Return zero points, [groups, rows], as AWQ's words."""
    lanes = np.empty((len(points), points.shape[1] // 8, 8), np.uint8)
    for output, place in enumerate(AWQ_PLACES):
        lanes[:, :, place] = points[:, output::8]
    return packed_words(lanes.reshape(points.shape), 4)
