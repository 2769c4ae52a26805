"""The same indices and scales in another layout of the family (``spec/scaled_codebook.md``, "Repacking")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from ingot.codecs.base import Repacked, cannot
from ingot.codecs.scaled_codebook.decode import codebook_of, second_of
from ingot.codecs.scaled_codebook.tables import TABLES, numbers
from ingot.core.dtypes import DTYPES, from_file
from ingot.core.floats import cast
from ingot.model.layouts.affine import Group, Row, Whole
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
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.layouts.scaled_others import same_scales
from ingot.model.part import PartReader
from ingot.model.tensor import Array, Tensor

_ONE = np.float32(1)
# One rounding in f32 more or less turns one value of bf16 in 2^15 over, of some thousand products that there may be:
# with a few reciprocals to choose from there is mostly one with which none is. There is none where two products lie
# just between numbers of bf16 and would have to go to opposite sides.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Second:
    """The second scale that a target has (None: none), and whether values are equal only once they are rounded."""

    value: np.float32 | None
    rounded: bool = False


def repack(tensor: Tensor, stored: ScaledCodebookLayout, target: ScaledCodebookLayout) -> Repacked:
    """Return a checked tensor in another layout, or why not; reads tables, the second scale, and scales beside it."""
    shape = stored.stored_shape(tensor.shape)
    rows, cols = matrix_shape(shape)
    reason = _difference(stored, target, cols) or _other_table(tensor, stored, target)
    if reason is not None:
        return cannot(target, reason)
    second = second_scale(tensor, stored, target)
    if isinstance(second, str):
        return cannot(target, second)
    made = _Made(tensor, stored, target, second)
    parts = target.part_specs(tensor.shape)
    whole = isinstance(stored.grid, Whole) and not isinstance(target.grid, Whole)
    memory = cols * stored.bits // 4 + 8 + 12 * stored.groups(cols) + 12 * target.groups(cols) + (4 if whole else 0)
    step = 8 // gcd(8, cols * stored.bits) if cols else 1
    spread = isinstance(stored.grid, Tiles) and not same_scales(stored.grid, target.grid, cols)
    held = 5 * stored.scale_count(tensor.shape) if spread else 0  # all of them, and in f32
    return Repacked(
        target, parts, rows if cols else 0, step, memory, None, lambda: _Reader(made, rows, cols), second.rounded, held
    )


def _difference(stored: ScaledCodebookLayout, target: ScaledCodebookLayout, cols: int) -> str | None:
    """Return why no layout ``target`` has the indices and scales of ``stored``, whatever they are; None if it may."""
    reasons = (
        (
            (stored.bits, stored.transposed, stored.factor) != (target.bits, target.transposed, target.factor),
            "indices of other bits, another factor, or matrices stored the other way round are other numbers",
        ),
        (
            stored.values is not None and stored.values != target.values,
            f"indices of {stored.values} are none of {target.values or 'a table'}",
        ),
        (stored.order != target.order and cols % 2, "rows end within a byte, whose halves cannot change places"),
        (target.nested and target.nested != stored.nested, "scales are not made codes of a table"),
        (
            not target.nested and target.scales not in (stored.scales, "f32"),
            f"scales of {stored.scales} stay or become f32, not {target.scales}",
        ),
        (
            (target.scales != stored.scales or target.nested != stored.nested) and (stored.second or target.second),
            "scales beside a second one keep their type",
        ),
        (not _same_or_repeated(stored, target, cols), "scales on another grid are other numbers"),
    )
    return next((reason for wrong, reason in reasons if wrong), None)


def _same_or_repeated(stored: ScaledCodebookLayout, target: ScaledCodebookLayout, cols: int) -> bool:
    if same_scales(stored.grid, target.grid, cols) or isinstance(stored.grid, Whole):
        return True
    one, other = stored.grid, target.grid
    if isinstance(one, Tiles):
        tall, wide = _tile(other, cols)
        whole = wide >= cols <= one.columns
        return tall > 0 and one.rows % tall == 0 and (one.columns % wide == 0 or whole) and not stored.nested
    fits = isinstance(one, Group) and isinstance(other, Group) and one.columns % other.columns == 0
    return fits and not stored.nested


def _tile(grid: Grid, cols: int) -> tuple[int, int]:
    """Return the rows and columns of a matrix that share a scale; no rows where that is no block."""
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
        return None if stored.values or stored.codebook == target.codebook else "a table keeps its type"
    table = codebook_of(tensor, stored)
    assert table is not None
    assert target.values is not None
    same = target.values in TABLES and table.tobytes() == TABLES[target.values].tobytes()
    return None if same else f"the table is not that of {target.values}"


def second_scale(tensor: Tensor, stored: ScaledCodebookLayout, target: ScaledCodebookLayout) -> Second | str:
    """Return the second scale with which values stay, or why there is none.

    From multiplying to dividing it is the reciprocal or a number near it in f32: the nearest with which the products of
    all values and those bytes of scales that there are stay equal, in f32 or at least in the tensor's type.
    """
    own = second_of(tensor, stored)
    if stored.second == target.second:
        return Second(own)
    if own is None or own == _ONE:
        return Second(None if target.second is None else _ONE)
    if target.second is None:
        return f"a second scale of {own:g} has no place in it"
    if stored.scales not in SMALL_SCALES or stored.values is None:
        return "a second scale beside scales in floats stays as it is"
    present = np.unique(tensor.parts[SCALES].array())
    scales, values = numbers(stored.scales)[present][:, None], numbers(stored.values)[None, :]
    with np.errstate(all="ignore"):
        reciprocal = _ONE / own
        near = list(_neighbours(reciprocal))
        wanted = _products(scales, own, stored.second, values)
        made = [_products(scales, other, target.second, values) for other in near]
    usable = [index for index, other in enumerate(near) if np.isfinite(other) and other != 0]
    for rounded in (False, True):
        for index in usable:
            if _same(wanted, made[index], tensor.dtype if rounded else "f32"):
                return Second(near[index], rounded and tensor.dtype != "f32")
    return f"no reciprocal of the second scale {own:g} gives equal values in {tensor.dtype}"


def _neighbours(number: np.float32) -> Iterator[np.float32]:
    """Yield a number and those beside it in f32, the nearest first."""
    yield number
    below = above = number
    for _ in range(_NEIGHBOURS):
        below, above = (np.nextafter(one, np.float32(side)) for one, side in ((below, 0), (above, np.inf)))
        yield below
        yield above


def _products(scales: Array, second: np.float32, how: str | None, values: Array) -> Array:
    made: Array = (scales / second if how == DIVIDE else scales * second) * values
    return made


def _same(one: Array, other: Array, dtype: str) -> bool:
    """Return whether values are the same bits in a type; all NaN are alike."""
    first, second = (cast(cast(array, dtype), "f32") for array in (one, other))
    return bool(((first.view(np.uint32) == second.view(np.uint32)) | (np.isnan(first) & np.isnan(second))).all())


@dataclass(frozen=True, slots=True)
class _Made:
    tensor: Tensor
    stored: ScaledCodebookLayout
    target: ScaledCodebookLayout
    second: Second


class _Reader:
    """One pass over a tensor's parts, row by row as they are stored."""

    def __init__(self, made: _Made, rows: int, cols: int) -> None:
        parts = made.tensor.parts
        self._made, self._rows, self._cols, self._row = made, rows, cols, 0
        self._indices = parts[INDICES].reader()
        self._scales = parts[SCALES].reader()
        self._count = made.stored.scale_count(made.tensor.shape)
        self._whole: Array | None = None  # scales of blocks of which each row gets its share

    def read(self, rows: int) -> dict[str, Array]:
        made, first, last = self._made, self._row, self._row + rows
        self._row = last
        bits = self._cols * made.stored.bits
        indices = _next(self._indices, -(-last * bits // 8) - first * bits // 8)
        if made.stored.order != made.target.order:
            indices = indices >> 4 | indices << 4
        parts = {INDICES: indices, SCALES: self._next_scales(first, last)}
        if made.target.values is None:
            table = made.tensor.parts[CODEBOOK].array()
            parts[CODEBOOK] = table[: None if first == 0 else 0]
        if made.target.nested:
            for role in (SCALE_CODEBOOK, SCALE_SCALES):
                parts[role] = made.tensor.parts[role].array()[: None if first == 0 else 0]
        if made.target.second:
            parts[SECOND] = np.full(int(first == 0), made.second.value, np.float32)
        return parts

    def finish(self) -> None:
        self._indices.finish()
        self._scales.finish()

    def _next_scales(self, first: int, last: int) -> Array:
        """Return the scales of some rows; of those that belong to several, their share."""
        made, count, total = self._made, self._count, max(self._rows, 1)
        stored, target = made.stored, made.target
        if isinstance(stored.grid, Whole) and not isinstance(target.grid, Whole):
            return self._filled(first, last, target.scale_count(made.tensor.shape))
        if isinstance(stored.grid, Tiles) and not same_scales(stored.grid, target.grid, self._cols):
            return self._spread(first, last, stored.grid)
        start, stop = (count * row // total for row in (first, last))
        width = DTYPES[stored.scales].bits // 8
        raw = _next(self._scales, (stop - start) * width)
        scales = self._typed(raw, start, stop)
        if isinstance(target.grid, Group) and not same_scales(stored.grid, target.grid, self._cols):
            assert isinstance(stored.grid, Group)
            scales = np.repeat(scales, stored.grid.columns // target.grid.columns)
        return scales

    def _filled(self, first: int, last: int, count: int) -> Array:
        one = self._made.tensor.parts[SCALES].view()
        if last == self._rows:
            _next(self._scales, len(one))  # for its digest
        scale = self._typed(np.frombuffer(one, np.uint8), 0, 1)
        share = count * last // max(self._rows, 1) - count * first // max(self._rows, 1)
        return np.repeat(scale, share)

    def _spread(self, first: int, last: int, grid: Tiles) -> Array:
        """Return the scales of rows on a finer grid than that of the blocks in which they lie."""
        made = self._made
        if self._whole is None:
            raw = _next(self._scales, self._count * DTYPES[made.stored.scales].bits // 8)
            self._whole = self._typed(raw, 0, self._count).reshape(-1, made.stored.groups(self._cols))
        tall, wide = _tile(made.target.grid, self._cols)
        across = -(-self._cols // wide)
        start, stop = (-(-row // tall) for row in (first, last))
        lines = np.arange(start, stop) * tall // grid.rows
        return self._whole[lines][:, np.arange(across) * wide // grid.columns].reshape(-1)

    def _typed(self, raw: Array, start: int, stop: int) -> Array:
        """Return stored scales as the target has them."""
        stored, target = self._made.stored, self._made.target
        if stored.scales == target.scales and stored.nested == target.nested:
            return raw if DTYPES[stored.scales].bits == 8 else from_file(raw, stored.scales)
        if stored.nested:
            parts, run = self._made.tensor.parts, stored.nested.run
            outer = parts[SCALE_SCALES].array()[np.arange(start, stop) // run]
            with np.errstate(over="ignore", invalid="ignore"):
                made: Array = parts[SCALE_CODEBOOK].array()[raw] * outer + np.float32(stored.nested.offset)
            return made
        if stored.scales in SMALL_SCALES:
            return numbers(stored.scales)[raw]
        return cast(from_file(raw, stored.scales), "f32")


def _next(reader: PartReader, count: int) -> Array:
    raw = np.empty(count, np.uint8)
    reader.readinto(raw.data)
    return raw
