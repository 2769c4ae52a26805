"""Views of units at even distances: pieces of every row, every other row, and tensors that are put together of such.

A tensor of ``outer`` runs of ``of`` units each, in row-major order. Units that are moved as they lie are not listed one
by one, however many there are; those of a tensor that has to be decoded are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

import numpy as np

from ingot.codecs.affine.windows import ComputedRows, Windows
from ingot.codecs.table import CODECS
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.reading.concat_source import verify_part
from ingot.model.reading.view import common_layout, decode_runs
from ingot.model.tensor import Array, Tensor
from ingot.views.common import Make, require_known, require_once, view_of

_SPARSE = 4  # of so many units one is wanted: then each is read by itself where that is a request


@dataclass(frozen=True, slots=True)
class Units:
    """``count`` of the ``of`` units of each of ``outer`` runs: from ``start`` on, ``step`` apart."""

    outer: int
    of: int
    start: int
    count: int
    step: int = 1

    def positions(self, first: int, last: int) -> Array:
        """Return where, in the whole, the units ``first`` to ``last`` of these lie."""
        run, unit = np.divmod(np.arange(first, last, dtype=np.int64), max(self.count, 1))
        positions: Array = run * self.of + self.start + unit * self.step
        return positions

    def is_within(self) -> bool:
        """Whether there are such units."""
        last = self.start + (self.count - 1) * self.step
        return min(self.outer, self.start, self.count - 1, self.step - 1) >= 0 and last < self.of


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor of ``shape`` that is made of units."""

    shape: tuple[int, ...]
    units: Units


def strided(checkpoint: Checkpoint, names: Mapping[str, Mapping[str, Strided]]) -> Checkpoint:
    """Return the checkpoint with some tensors replaced by others, each made of units of it.

    Stored units are moved where a codec's lie by themselves; else the tensor is decoded.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``, ``view.delta``; ``view.shape``: units that are not there, or another number
        of elements than the shape has.
    """
    require_known(checkpoint, names)
    for name, pieces in names.items():
        for piece in pieces.values():
            _require(piece.units, checkpoint[name].size, prod(piece.shape), name)

    def cut(name: str, new: str) -> Make:
        return lambda: strided_tensor(checkpoint[name], new, names[name][new])

    entries: list[tuple[str, Make | None, str]] = []
    for name in checkpoint:
        entries += [(name, None, name)] if name not in names else [(new, cut(name, new), name) for new in names[name]]
    said = {name: {new: asdict(piece) for new, piece in pieces.items()} for name, pieces in names.items()}
    argument = {name: dict(pieces) for name, pieces in names.items()}
    return view_of(checkpoint, entries, strided, argument, said)


def woven(checkpoint: Checkpoint, names: Mapping[str, tuple[tuple[int, ...], Mapping[str, Units]]]) -> Checkpoint:
    """Return the checkpoint with tensors put together of the units of others; undoes ``strided``.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of new name to (shape, mapping of name to Units)
        Where in the whole the units of each tensor come to lie. The new one stands where the first of them stood.

    Raises
    ------
    UsageError
        As ``strided``; ``view.shape``: other than each unit once, or several element types.
    """
    used = [name for _, members in names.values() for name in members]
    require_known(checkpoint, used)
    require_once(used)
    for new, (shape, members) in names.items():
        _require_once_each(checkpoint, new, shape, members)
    first = {next(iter(members)): new for new, (_, members) in names.items()}

    def whole(new: str) -> Make:
        shape, members = names[new]
        return lambda: _woven(new, shape, [checkpoint[name] for name in members], list(members.values()))

    entries = [
        (first.get(name, name), whole(first[name]) if name in first else None, name)
        for name in checkpoint
        if name in first or name not in used
    ]
    said = {new: [list(shape), {name: asdict(u) for name, u in of.items()}] for new, (shape, of) in names.items()}
    origins = {new: list(members) for new, (_, members) in names.items()}
    return view_of(checkpoint, entries, woven, dict(names), said, origins)


def _require(units: Units, size: int, wanted: int, name: str) -> None:
    whole = units.outer * units.of
    if (
        not units.is_within()
        or (size % whole if whole else size)
        or units.outer * units.count * _unit(units, size) != wanted
    ):
        raise UsageError(
            f"expected units of a tensor of {size} elements that make {wanted}, found {units}",
            rule="view.shape",
            where=name,
        )


def _unit(units: Units, size: int) -> int:
    """Elements of a unit of a whole of ``size``."""
    return size // max(units.outer * units.of, 1)


def _require_once_each(checkpoint: Checkpoint, new: str, shape: tuple[int, ...], members: Mapping[str, Units]) -> None:
    tensors, size = [checkpoint[name] for name in members], prod(shape)
    grids = {(units.outer, units.of) for units in members.values()}
    places = sorted(unit.start + index * unit.step for unit in members.values() for index in range(max(unit.count, 0)))
    of = next(iter(grids))[1] if grids else 0
    if len(grids) != 1 or places != list(range(of)) or len({tensor.dtype for tensor in tensors}) != 1:
        raise UsageError(
            f"expected tensors of one element type that hold each unit once, found {len(places)} of {of} units in "
            f"{', '.join(sorted({tensor.dtype for tensor in tensors}))}",
            rule="view.shape",
            where=new,
        )
    for (name, units), tensor in zip(members.items(), tensors, strict=True):
        _require(units, size, tensor.size, name)


def strided_tensor(tensor: Tensor, name: str, wanted: Strided) -> Tensor:
    """Return a tensor that is made of units of another one, which are there."""
    units = wanted.units
    size = _unit(wanted.units, tensor.size)
    widths = _widths([tensor], wanted.shape, size)
    if widths is None:
        places = units.positions(0, units.outer * units.count)
        runs = np.stack([np.zeros_like(places), places * size, np.full_like(places, size)])
        return decode_runs(name, wanted.shape, [tensor], runs, CODECS[DenseLayout.codec])
    parts = {}
    for role, part in tensor.parts.items():
        if not widths[role]:
            parts[role] = part
            continue
        own = replace(units, outer=(part.nbytes or 0) // (units.of * widths[role]))
        stored = _Stored(part, widths[role], own.outer * own.of)
        parts[role] = _made(f"{name}: {role}", [part], own.outer * own.count, widths[role], _Taken(stored, own).read)
    return replace(tensor, name=name, shape=wanted.shape, parts=parts, origin=None)


def _woven(name: str, shape: tuple[int, ...], tensors: Sequence[Tensor], units: Sequence[Units]) -> Tensor:
    size = _unit(units[0], prod(shape))
    widths = _widths(tensors, shape, size)
    if widths is None or not all(widths.values()):
        return _woven_values(name, shape, tensors, units)
    parts = {}
    for role in tensors[0].parts:
        own = [tensor.parts[role] for tensor in tensors]
        members = [
            (_Stored(part, widths[role], place.outer * place.count), place)
            for part, place in zip(own, units, strict=True)
        ]
        count = units[0].outer * units[0].of
        parts[role] = _made(f"{name}: {role}", own, count, widths[role], _Woven(members, widths[role]).read)
    return replace(tensors[0], name=name, shape=shape, parts=parts, origin=None)


def _woven_values(name: str, shape: tuple[int, ...], tensors: Sequence[Tensor], units: Sequence[Units]) -> Tensor:
    """Return the dense tensor of what tensors decode to."""
    size = _unit(units[0], prod(shape))
    places = np.concatenate([own.positions(0, own.outer * own.count) for own in units])
    which = np.concatenate([np.full(own.outer * own.count, index) for index, own in enumerate(units)])
    within = np.concatenate([np.arange(own.outer * own.count) for own in units])
    order = np.argsort(places)
    runs = np.stack([which[order], within[order] * size, np.full_like(within, size)])
    return decode_runs(name, shape, tensors, runs, CODECS[DenseLayout.codec])


def _widths(tensors: Sequence[Tensor], shape: tuple[int, ...], unit: int) -> Mapping[str, int] | None:
    """Return the bytes that a unit of so many elements takes of each part, 0 where it stays whole; None to decode."""
    layout, first = common_layout(tensors, shape), tensors[0]
    if not unit:
        return None
    if layout is not None:
        fits = unit % layout.elements == 0
        return {role: unit // layout.elements * width for role, width in layout.nbytes.items()} if fits else None
    return first.decoder.columns(first, unit) if len(tensors) == 1 and first.decoder is not None else None


class _Stored:
    """A part as units of ``width`` bytes."""

    def __init__(self, part: Part, width: int, count: int) -> None:
        self._windows = Windows(part, count, width)
        self._width = width

    def read(self, positions: Array) -> Array:
        """Return units, u8 [units, width]; positions ascend."""
        whole = self._windows.all_bytes()
        rows = slice(0, 0)
        if whole is not None:
            units: Array = whole.reshape(self._windows.rows, self._width)
            return _at(units, positions)
        if positions.size:
            rows = slice(int(positions[0]), int(positions[-1]) + 1)
        if rows.stop - rows.start <= _SPARSE * positions.size:
            return _at(self._windows.read(rows, 0, self._width), positions - rows.start)
        return np.concatenate([self._windows.read(slice(at, at + 1), 0, self._width) for at in positions.tolist()])


def _at(units: Array, positions: Array) -> Array:
    found: Array = units[positions]
    return found


class _Taken:
    """Some units of a part."""

    def __init__(self, stored: _Stored, units: Units) -> None:
        self._stored = stored
        self._units = units

    def read(self, first: int, last: int) -> Array:
        return self._stored.read(self._units.positions(first, last))


class _Woven:
    """Units of several parts, each where it belongs."""

    def __init__(self, members: Sequence[tuple[_Stored, Units]], width: int) -> None:
        self._members = members
        self._width = width

    def read(self, first: int, last: int) -> Array:
        out = np.empty((last - first, self._width), np.uint8)
        run, unit = np.divmod(np.arange(first, last, dtype=np.int64), self._members[0][1].of)
        for stored, units in self._members:
            index, between = np.divmod(unit - units.start, units.step)
            here = np.flatnonzero((between == 0) & (index >= 0) & (index < units.count))
            out[here] = stored.read(run[here] * units.count + index[here])
        return out


class _Sources:
    """What several parts lie in."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self._parts = parts

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._parts)


class _Source(ComputedRows):
    """Units that are put together when they are read."""

    def __init__(
        self, name: str, parts: Sequence[Part], count: int, width: int, make: Callable[[int, int], Array]
    ) -> None:
        super().__init__(_Sources(name, parts), count, width, make)
        self._parts = parts

    def verify_sources(self) -> None:
        """Compare the digests of the parts, as far as reading units does not."""
        for part in self._parts:
            verify_part(part)


def _made(where: str, parts: Sequence[Part], count: int, width: int, make: Callable[[int, int], Array]) -> Part:
    source = _Source(where, parts, count, width, make)
    return Part(parts[0].dtype, source.size, source, type=parts[0].type, where=where)
