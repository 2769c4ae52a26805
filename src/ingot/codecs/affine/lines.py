"""Conversion of GPTQ's words to AWQ's and back, line by line; both store the matrix input by input.

Scales are stored alike. Eight inputs of all outputs are one line in AWQ's form and eight lines in GPTQ's.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np

from ingot.codecs.affine.repack import number_chunks
from ingot.codecs.affine.to_words import point_range
from ingot.codecs.affine.word_codes import pack_points, points_of
from ingot.codecs.base import Repacked
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, from_file
from ingot.core.runtime import native
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, Constant, Points
from ingot.model.layouts.packed_words import AWQ, GPTQ, GPTQ_V1, WordsLayout
from ingot.model.part import PartReader
from ingot.model.tensor import Array, Tensor

_SUPPORTED = (GPTQ, GPTQ_V1, AWQ)


def with_one_point(tensor: Tensor, stored: WordsLayout) -> tuple[Tensor, WordsLayout]:
    """Return a checked tensor without its zero points if all are the middle one; else the tensor unchanged.

    Reads zero points, and checks their digest if it returns the tensor without them.
    """
    rows = tensor.matrix_shape[0]
    packed = stored.form in _SUPPORTED and 32 % stored.bits == 0 and rows * stored.bits % 32 == 0
    if not packed or not isinstance(stored.zero, Points) or not tensor.size:
        return tensor, stored
    code = stored.point - (stored.form == GPTQ_V1)
    word = np.uint32(sum(code << shift for shift in range(0, 32, stored.bits)))
    if not all(bool((chunk.view(np.uint32) == word).all()) for chunk in number_chunks(tensor.parts[ZEROS])):
        return tensor, stored
    layout = replace(stored, zero=Constant(stored.point))
    parts = {role: part for role, part in tensor.parts.items() if role != ZEROS}
    return replace(tensor, parts=parts, params=layout.attributes()), layout


def between_lines(tensor: Tensor, stored: WordsLayout, target: WordsLayout) -> Repacked | None:
    """Return a checked tensor in another of these forms; None if more than the order of lines would change."""
    rows, cols = tensor.matrix_shape
    unit = lcm(32, stored.group or 32)
    if not {stored.form, target.form} <= set(_SUPPORTED) or not tensor.size or rows % 32 or cols % unit:
        return None
    if target != replace(stored, form=target.form, zero=target.zero):
        return None
    if target.zero != stored.zero and target.zero == Constant(target.point):
        return None
    low, high = point_range(target)
    if isinstance(stored.zero, Points):
        packed = from_file(np.frombuffer(tensor.parts[ZEROS].view(), np.uint8), "u32")
        points = points_of(packed.reshape(-1, rows * stored.bits // 32), stored)
        if int(points.min()) < low or int(points.max()) > high:
            return None
    unit_bytes = unit * rows * stored.bits // 8
    group_bytes = DTYPES[stored.scales].bits // 8 + 8
    parts = target.part_specs(tensor.shape)
    memory = 2 * unit_bytes + stored.groups(unit) * rows * group_bytes
    extra = 0 if stored.group else rows * group_bytes
    return Repacked(
        target, parts, cols // unit, 1, memory, None, lambda: _Lines(tensor, stored, target, unit), extra_memory=extra
    )


class _Lines:
    """A pass over a tensor's parts, a run of columns at a time."""

    def __init__(self, tensor: Tensor, stored: WordsLayout, target: WordsLayout, unit: int) -> None:
        self._stored, self._target, self._unit = stored, target, unit
        self._rows = tensor.matrix_shape[0]
        self._readers = {role: part.reader() for role, part in tensor.parts.items()}
        self._has_begun = False

    def read(self, units: int) -> dict[str, Array]:
        """Return the next columns."""
        stored, target, rows, cols = self._stored, self._target, self._rows, units * self._unit
        groups = stored.groups(cols) if stored.group or not self._has_begun else 0
        self._has_begun = True
        size = DTYPES[stored.scales].bits // 8
        parts = {
            CODES: self._codes(_next(self._readers[CODES], cols * rows * stored.bits // 8), cols),
            SCALES: from_file(_next(self._readers[SCALES], groups * rows * size), stored.scales),
        }
        if isinstance(target.zero, Points) and groups:
            parts[ZEROS] = pack_points(self._points(groups), target)
        return parts

    def _codes(self, stored: Array, cols: int) -> Array:
        to_awq = self._target.form == AWQ
        if to_awq == (self._stored.form == AWQ):
            return stored
        lines, words = (cols // 8, self._rows) if to_awq else (cols, self._rows // 8)
        out = scratch(stored.shape, np.uint8)
        native.kernels.lines_turn(stored, lines, words, to_awq, out)
        return out

    def _points(self, groups: int) -> Array:
        """Return the zero points of the next groups, [groups, rows]."""
        if isinstance(self._stored.zero, Constant):
            return np.full((groups, self._rows), self._stored.zero.point, np.uint8)
        width = self._rows * self._stored.bits // 32
        packed = from_file(_next(self._readers[ZEROS], 4 * groups * width), "u32")
        return points_of(packed.reshape(groups, width), self._stored)

    def finish(self) -> None:
        for reader in self._readers.values():
            reader.finish()


def _next(reader: PartReader, nbytes: int) -> Array:
    raw = scratch((nbytes,), np.uint8)
    reader.readinto(raw.data)
    return raw
