"""Repacking of indices and scales into another layout of the family (``spec/scaled_codebook.md``, "Repacking")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from ingot.codecs.base import Repacked, cannot
from ingot.codecs.scaled_codebook.decode import codebook_of, second_of
from ingot.codecs.scaled_codebook.tables import TABLES, numbers
from ingot.core.numeric.dtypes import DTYPES, cast, from_file
from ingot.model.layouts.affine import Group, PerTensor, Row
from ingot.model.layouts.base import matrix_shape
from ingot.model.layouts.scaled_codebook import (
    CODEBOOK,
    DIVIDE,
    INDICES,
    SCALE_CODEBOOK,
    SCALE_SCALES,
    SCALES,
    SECOND,
    SMALL_SCALES,
    Grid,
    Run,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.part import PartReader
from ingot.model.tensor import Array, Tensor

_UNIT = np.float32(1)
# A further rounding in f32 changes one in 2^15 bf16 values, and there may be a few thousand products. Usually one of
# the few neighbours of the reciprocal changes no product. There is none if two products lie close to a border between
# bf16 numbers and would have to move in opposite directions.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Second:
    """The second scale of the target layout; ``value`` is None if the target has no second scale.

    If ``rounded`` is true, some values are equal only after rounding to the tensor's type.
    """

    value: np.float32 | None
    rounded: bool = False


def repack(tensor: Tensor, stored: ScaledCodebookLayout, target: ScaledCodebookLayout) -> Repacked:
    """Return the repacking of a checked tensor into another layout, or the reason why it is impossible.

    Tables and the second scale are read. If there is a second scale, all scales are read too.
    """
    shape = stored.stored_shape(tensor.shape)
    rows, cols = matrix_shape(shape)
    reason = _difference(stored, target, cols) or _other_table(tensor, stored, target)
    if reason is not None:
        return cannot(target, reason)
    second = second_scale(tensor, stored, target)
    if isinstance(second, str):
        return cannot(target, second)
    conversion = _Repack(tensor, stored, target, second)
    parts = target.part_specs(tensor.shape)
    single = isinstance(stored.grid, PerTensor) and not isinstance(target.grid, PerTensor)
    memory = cols * stored.bits // 4 + 8 + 12 * stored.groups(cols) + 12 * target.groups(cols) + (4 if single else 0)
    step = 8 // gcd(8, cols * stored.bits) if cols else 1
    finer = isinstance(stored.grid, Tiles) and not _same_scales(stored.grid, target.grid, cols)
    extra_memory = 5 * stored.scale_count(tensor.shape) if finer else 0  # all scales, as stored and in f32
    return Repacked(
        target,
        parts,
        rows if cols else 0,
        step,
        memory,
        None,
        lambda: _Reader(conversion, rows, cols),
        second.rounded,
        extra_memory,
    )


def _difference(stored: ScaledCodebookLayout, target: ScaledCodebookLayout, cols: int) -> str | None:
    """Return why no tensor with layout ``stored`` can be repacked into ``target``; None if the layouts allow it."""
    reasons = (
        (
            (stored.bits, stored.transposed, stored.factor) != (target.bits, target.transposed, target.factor),
            "the target has other bits, another factor, or transposed matrices, so its indices differ",
        ),
        (
            stored.values is not None and stored.values != target.values,
            f"indices of {stored.values} have other values in {target.values or 'a table'}",
        ),
        (stored.order != target.order and cols % 2, "rows end within a byte, so the order of codes cannot change"),
        (target.nested and target.nested != stored.nested, "scales cannot become codes of a table"),
        (
            not target.nested and target.scales not in (stored.scales, "f32"),
            f"scales of {stored.scales} stay or become f32, not {target.scales}",
        ),
        (
            (target.scales != stored.scales or target.nested != stored.nested) and (stored.second or target.second),
            "scales cannot change their type if there is a second scale",
        ),
        (not _same_or_repeated(stored, target, cols), "the target has another grid of scales, so its numbers differ"),
    )
    return next((reason for fails, reason in reasons if fails), None)


def _same_or_repeated(stored: ScaledCodebookLayout, target: ScaledCodebookLayout, cols: int) -> bool:
    if _same_scales(stored.grid, target.grid, cols) or isinstance(stored.grid, PerTensor):
        return True
    source = stored.grid
    grid = target.grid
    if isinstance(source, Tiles):
        tall, wide = _tile(grid, cols)
        full_width = wide >= cols <= source.columns
        return tall > 0 and source.rows % tall == 0 and (source.columns % wide == 0 or full_width) and not stored.nested
    fits = isinstance(source, Group) and isinstance(grid, Group) and source.columns % grid.columns == 0
    return fits and not stored.nested


def _tile(grid: Grid, cols: int) -> tuple[int, int]:
    """Return rows and columns of the rectangular block that shares a scale; 0 rows if scales have no such blocks."""
    match grid:
        case Tiles(tall, wide):
            return tall, wide
        case Group(columns):
            return 1, columns
        case Row():
            return 1, cols
    return 0, 1


def _other_table(tensor: Tensor, stored: ScaledCodebookLayout, target: ScaledCodebookLayout) -> str | None:
    if stored.values == target.values:
        return None if stored.values or stored.codebook == target.codebook else "a table cannot change its type"
    table = codebook_of(tensor, stored)
    assert table is not None
    assert target.values is not None
    same = target.values in TABLES and table.tobytes() == TABLES[target.values].tobytes()
    return None if same else f"the stored table differs from the table {target.values}"


def second_scale(tensor: Tensor, stored: ScaledCodebookLayout, target: ScaledCodebookLayout) -> Second | str:
    """Return the second scale with which values stay equal, or the reason why there is none.

    If only one of the layouts divides by the second scale, the result is the reciprocal or a neighbouring f32 number.
    It is the nearest number with which all products of table values and occurring scales stay equal, in f32 or at least
    in the tensor's type.
    """
    current = second_of(tensor, stored)
    if stored.second == target.second:
        return Second(current)
    if current is None or current == _UNIT:
        return Second(None if target.second is None else _UNIT)
    if target.second is None:
        return f"the layout cannot store a second scale of {current:g}"
    if stored.scales not in SMALL_SCALES or stored.values is None:
        return "a second scale can change only if scales are bytes"
    present = np.unique(tensor.parts[SCALES].array())
    scales, values = numbers(stored.scales)[present][:, None], numbers(stored.values)[None, :]
    with np.errstate(all="ignore"):
        reciprocal = _UNIT / current
        candidates = list(_neighbours(reciprocal))
        expected = _products(scales, current, stored.second, values)
        products = [_products(scales, candidate, target.second, values) for candidate in candidates]
    usable = [index for index, candidate in enumerate(candidates) if np.isfinite(candidate) and candidate != 0]
    for rounded in (False, True):
        for index in usable:
            if _same(expected, products[index], tensor.dtype if rounded else "f32"):
                return Second(candidates[index], rounded and tensor.dtype != "f32")
    return f"no reciprocal of the second scale {current:g} gives equal values in {tensor.dtype}"


def _neighbours(number: np.float32) -> Iterator[np.float32]:
    """Yield a number and its neighbours in f32, the nearest first."""
    yield number
    below = above = number
    for _ in range(_NEIGHBOURS):
        below = np.nextafter(below, np.float32(0))
        above = np.nextafter(above, np.float32(np.inf))
        yield below
        yield above


def _products(scales: Array, second: np.float32, how: str | None, values: Array) -> Array:
    products: Array = (scales / second if how == DIVIDE else scales * second) * values
    return products


def _same(first: Array, second: Array, dtype: str) -> bool:
    """Return whether values have the same bits in a type; all NaNs count as equal."""
    first, second = (cast(cast(array, dtype), "f32") for array in (first, second))
    return bool(((first.view(np.uint32) == second.view(np.uint32)) | (np.isnan(first) & np.isnan(second))).all())


@dataclass(frozen=True, slots=True)
class _Repack:
    tensor: Tensor
    stored: ScaledCodebookLayout
    target: ScaledCodebookLayout
    second: Second


class _Reader:
    """A sequential reader that returns a tensor's parts repacked, row by row as stored."""

    def __init__(self, repack: _Repack, rows: int, cols: int) -> None:
        parts = repack.tensor.parts
        self._repack = repack
        self._rows = rows
        self._cols = cols
        self._row = 0
        self._indices = parts[INDICES].reader()
        self._scales = parts[SCALES].reader()
        self._count = repack.stored.scale_count(repack.tensor.shape)
        self._block_scales: Array | None = None  # scales of all blocks, from which rows get theirs

    def read(self, rows: int) -> dict[str, Array]:
        repack = self._repack
        first = self._row
        last = self._row + rows
        self._row = last
        bits = self._cols * repack.stored.bits
        indices = _next(self._indices, -(-last * bits // 8) - first * bits // 8)
        if repack.stored.order != repack.target.order:
            indices = indices >> 4 | indices << 4
        parts = {INDICES: indices, SCALES: self._next_scales(first, last)}
        if repack.target.values is None:
            table = repack.tensor.parts[CODEBOOK].array()
            parts[CODEBOOK] = table[: None if first == 0 else 0]
        if repack.target.nested:
            for role in (SCALE_CODEBOOK, SCALE_SCALES):
                parts[role] = repack.tensor.parts[role].array()[: None if first == 0 else 0]
        if repack.target.second:
            parts[SECOND] = np.full(int(first == 0), repack.second.value, np.float32)
        return parts

    def finish(self) -> None:
        self._indices.finish()
        self._scales.finish()

    def _next_scales(self, first: int, last: int) -> Array:
        """Return the scales of the target for rows ``first`` to ``last``.

        If a stored scale applies to a larger area than a scale of the target, it is repeated. If the target stores one
        scale for several rows, it is returned with one of these rows.
        """
        repack, count, total = self._repack, self._count, max(self._rows, 1)
        stored = repack.stored
        target = repack.target
        if isinstance(stored.grid, PerTensor) and not isinstance(target.grid, PerTensor):
            return self._repeat_single(first, last, target.scale_count(repack.tensor.shape))
        if isinstance(stored.grid, Tiles) and not _same_scales(stored.grid, target.grid, self._cols):
            return self._finer_scales(first, last, stored.grid)
        start, stop = (count * row // total for row in (first, last))
        width = DTYPES[stored.scales].bits // 8
        raw = _next(self._scales, (stop - start) * width)
        scales = self._convert(raw, start, stop)
        if isinstance(target.grid, Group) and not _same_scales(stored.grid, target.grid, self._cols):
            assert isinstance(stored.grid, Group)
            scales = np.repeat(scales, stored.grid.columns // target.grid.columns)
        return scales

    def _repeat_single(self, first: int, last: int, count: int) -> Array:
        single = self._repack.tensor.parts[SCALES].view()
        if last == self._rows:
            _next(self._scales, len(single))  # to check its digest
        scale = self._convert(np.frombuffer(single, np.uint8), 0, 1)
        share = count * last // max(self._rows, 1) - count * first // max(self._rows, 1)
        return np.repeat(scale, share)

    def _finer_scales(self, first: int, last: int, grid: Tiles) -> Array:
        """Return the scales of rows ``first`` to ``last`` on the target's grid; its blocks divide those of ``grid``."""
        repack = self._repack
        if self._block_scales is None:
            raw = _next(self._scales, self._count * DTYPES[repack.stored.scales].bits // 8)
            self._block_scales = self._convert(raw, 0, self._count).reshape(-1, repack.stored.groups(self._cols))
        tall, wide = _tile(repack.target.grid, self._cols)
        across = -(-self._cols // wide)
        start, stop = (-(-row // tall) for row in (first, last))
        lines = np.arange(start, stop) * tall // grid.rows
        return self._block_scales[lines][:, np.arange(across) * wide // grid.columns].reshape(-1)

    def _convert(self, raw: Array, start: int, stop: int) -> Array:
        """Convert stored scales to the target's type."""
        stored = self._repack.stored
        target = self._repack.target
        if stored.scales == target.scales and stored.nested == target.nested:
            return raw if DTYPES[stored.scales].bits == 8 else from_file(raw, stored.scales)
        if stored.nested:
            parts = self._repack.tensor.parts
            run = stored.nested.run
            outer = parts[SCALE_SCALES].array()[np.arange(start, stop) // run]
            with np.errstate(over="ignore", invalid="ignore"):
                wide: Array = parts[SCALE_CODEBOOK].array()[raw] * outer + np.float32(stored.nested.offset)
            return wide
        if stored.scales in SMALL_SCALES:
            return numbers(stored.scales)[raw]
        return cast(from_file(raw, stored.scales), "f32")


def _next(reader: PartReader, count: int) -> Array:
    raw = np.empty(count, np.uint8)
    reader.readinto(raw.data)
    return raw


def _same_scales(first: Grid, second: Grid, cols: int) -> bool:
    """Return whether two grids have the same scales in the same order."""
    return _as_groups(first, cols) == _as_groups(second, cols)


def _as_groups(grid: Grid, cols: int) -> Grid:
    """Return the equivalent ``Group`` if each row of ``grid`` consists of full groups of columns; else ``grid``."""
    if isinstance(grid, Row):
        return Group(cols)
    if isinstance(grid, Tiles) and grid.rows == 1 and cols and cols % grid.columns == 0:
        return Group(grid.columns)
    return Group(grid.elements) if isinstance(grid, Run) and cols % grid.elements == 0 else grid
