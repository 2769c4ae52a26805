"""Views of evenly spaced units: tensors split into every n-th run of elements, and tensors interleaved from such runs.

A unit is a run of consecutive elements. A tensor consists of ``outer`` runs of ``per_run`` units each, in row-major
order. Positions of stored units are computed by arithmetic; only decoded tensors need a list of units.
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
from ingot.views.common import BuildTensor, require_names, require_once, view_of

_SPARSE = 4  # if at most one in this number of units is needed, each unit is read separately


@dataclass(frozen=True, slots=True)
class Units:
    """An evenly spaced selection of a tensor's units, such as rows; the selected units form another tensor.

    The full tensor has ``outer`` runs of ``per_run`` units. In each run, ``count`` units are selected: the unit
    ``start``, and every ``step``-th unit after it.
    """

    outer: int
    per_run: int
    start: int
    count: int
    step: int = 1

    def positions(self, first: int, last: int) -> Array:
        """Return the indices in the full tensor of the selected units ``first`` (inclusive) to ``last`` (exclusive)."""
        run, unit = np.divmod(np.arange(first, last, dtype=np.int64), max(self.count, 1))
        positions: Array = run * self.per_run + self.start + unit * self.step
        return positions

    def is_within(self) -> bool:
        """Return whether all selected units exist."""
        last = self.start + (self.count - 1) * self.step
        return min(self.outer, self.start, self.count - 1, self.step - 1) >= 0 and last < self.per_run


@dataclass(frozen=True, slots=True)
class UnitSelection:
    """The shape of a new tensor, and the units of another tensor that form it."""

    shape: tuple[int, ...]
    units: Units


def split_units(checkpoint: Checkpoint, names: Mapping[str, Mapping[str, UnitSelection]]) -> Checkpoint:
    """Return the checkpoint with some tensors replaced by new tensors that consist of their units.

    Packed units are copied if the codec stores them separately; otherwise the tensor is decoded.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of name to mapping of new name to UnitSelection
        The new tensors that replace each tensor.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``, ``view.delta``; ``view.shape``: units outside of the tensor, or a shape with
        another number of elements.
    """
    require_names(checkpoint, names)
    for name, selections in names.items():
        for selection in selections.values():
            _require_units(selection.units, checkpoint[name].size, prod(selection.shape), name)

    def builder(name: str, new: str) -> BuildTensor:
        return lambda: select_units(checkpoint[name], new, names[name][new])

    entries: list[tuple[str, BuildTensor | None, str]] = []
    for name in checkpoint:
        entries += (
            [(name, None, name)] if name not in names else [(new, builder(name, new), name) for new in names[name]]
        )
    description = {
        name: {new: asdict(selection) for new, selection in selections.items()} for name, selections in names.items()
    }
    argument = {name: dict(selections) for name, selections in names.items()}
    return view_of(checkpoint, entries, split_units, argument, description)


def interleave(checkpoint: Checkpoint, names: Mapping[str, tuple[tuple[int, ...], Mapping[str, Units]]]) -> Checkpoint:
    """Return the checkpoint with tensors interleaved from the units of others; undoes ``split_units``.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of new name to (shape, mapping of name to Units)
        The units of the new tensor that each source tensor fills. The new tensor takes the position of the first source
        tensor.

    Raises
    ------
    UsageError
        As ``split_units``; ``view.shape``: units that do not fill the new tensor once, or several element types.
    """
    used = [name for _, members in names.values() for name in members]
    require_names(checkpoint, used)
    require_once(used)
    for new, (shape, members) in names.items():
        _require_once_each(checkpoint, new, shape, members)
    first = {next(iter(members)): new for new, (_, members) in names.items()}

    def builder(new: str) -> BuildTensor:
        shape, members = names[new]
        return lambda: _interleaved(new, shape, [checkpoint[name] for name in members], list(members.values()))

    entries = [
        (first.get(name, name), builder(first[name]) if name in first else None, name)
        for name in checkpoint
        if name in first or name not in used
    ]
    description = {
        new: [list(shape), {name: asdict(units) for name, units in members.items()}]
        for new, (shape, members) in names.items()
    }
    origins = {new: list(members) for new, (_, members) in names.items()}
    return view_of(checkpoint, entries, interleave, dict(names), description, origins)


def _require_units(units: Units, size: int, target_size: int, name: str) -> None:
    count = units.outer * units.per_run
    if (
        not units.is_within()
        or (size % count if count else size)
        or units.outer * units.count * _unit_size(units, size) != target_size
    ):
        raise UsageError(
            f"expected units of a tensor of {size} elements with {target_size} elements in total, found {units}",
            rule="view.shape",
            where=name,
        )


def _unit_size(units: Units, size: int) -> int:
    """Return the number of elements of a unit in a tensor of ``size`` elements."""
    return size // max(units.outer * units.per_run, 1)


def _require_once_each(checkpoint: Checkpoint, new: str, shape: tuple[int, ...], members: Mapping[str, Units]) -> None:
    tensors = [checkpoint[name] for name in members]
    size = prod(shape)
    grids = {(units.outer, units.per_run) for units in members.values()}
    positions = sorted(
        unit.start + index * unit.step for unit in members.values() for index in range(max(unit.count, 0))
    )
    per_run = next(iter(grids))[1] if grids else 0
    if len(grids) != 1 or positions != list(range(per_run)) or len({tensor.dtype for tensor in tensors}) != 1:
        raise UsageError(
            f"expected tensors of one element type with each unit once, found {len(positions)} of {per_run} units in "
            f"{', '.join(sorted({tensor.dtype for tensor in tensors}))}",
            rule="view.shape",
            where=new,
        )
    for (name, units), tensor in zip(members.items(), tensors, strict=True):
        _require_units(units, size, tensor.size, name)


def select_units(tensor: Tensor, name: str, selection: UnitSelection) -> Tensor:
    """Return a tensor that consists of selected units of another tensor; all selected units must exist."""
    units = selection.units
    size = _unit_size(selection.units, tensor.size)
    widths = _widths([tensor], selection.shape, size, units.per_run)
    if widths is None:
        positions = units.positions(0, units.outer * units.count)
        runs = np.stack([np.zeros_like(positions), positions * size, np.full_like(positions, size)])
        return decode_runs(name, selection.shape, [tensor], runs, CODECS[DenseLayout.codec])
    parts = {}
    for role, part in tensor.parts.items():
        if not widths[role]:
            parts[role] = part
            continue
        selected = replace(units, outer=(part.nbytes or 0) // (units.per_run * widths[role]))
        stored = _StoredUnits(part, widths[role], selected.outer * selected.per_run)
        count = selected.outer * selected.count
        parts[role] = _computed_part(
            f"{name}: {role}", [part], count, widths[role], _SelectedUnits(stored, selected).read
        )
    return replace(tensor, name=name, shape=selection.shape, parts=parts, origin=None)


def _interleaved(name: str, shape: tuple[int, ...], tensors: Sequence[Tensor], units: Sequence[Units]) -> Tensor:
    size = _unit_size(units[0], prod(shape))
    widths = _widths(tensors, shape, size)
    if widths is None or not all(widths.values()):
        return _interleaved_values(name, shape, tensors, units)
    parts = {}
    for role in tensors[0].parts:
        stored = [tensor.parts[role] for tensor in tensors]
        members = [
            (_StoredUnits(part, widths[role], item.outer * item.count), item)
            for part, item in zip(stored, units, strict=True)
        ]
        count = units[0].outer * units[0].per_run
        parts[role] = _computed_part(
            f"{name}: {role}", stored, count, widths[role], _InterleavedUnits(members, widths[role]).read
        )
    return replace(tensors[0], name=name, shape=shape, parts=parts, origin=None)


def _interleaved_values(name: str, shape: tuple[int, ...], tensors: Sequence[Tensor], units: Sequence[Units]) -> Tensor:
    """Return the dense tensor interleaved from decoded tensors."""
    size = _unit_size(units[0], prod(shape))
    positions = np.concatenate([item.positions(0, item.outer * item.count) for item in units])
    sources = np.concatenate([np.full(item.outer * item.count, index) for index, item in enumerate(units)])
    within = np.concatenate([np.arange(item.outer * item.count) for item in units])
    order = np.argsort(positions)
    runs = np.stack([sources[order], within[order] * size, np.full_like(within, size)])
    return decode_runs(name, shape, tensors, runs, CODECS[DenseLayout.codec])


def _widths(tensors: Sequence[Tensor], shape: tuple[int, ...], unit: int, per_run: int = 0) -> Mapping[str, int] | None:
    """Return, by role, the number of bytes of a unit of ``unit`` elements in each part; 0 for a part that is not split.

    Returns None if units cannot be copied without decoding. Units may be columns of a packed matrix if ``per_run``
    units form a row.
    """
    layout = common_layout(tensors, shape)
    first = tensors[0]
    if not unit:
        return None
    if layout is not None:
        fits = unit % layout.elements == 0
        return {role: unit // layout.elements * width for role, width in layout.nbytes.items()} if fits else None
    are_columns = len(tensors) == 1 and per_run * unit == first.matrix_shape[1]
    return first.decoder.columns(first, unit) if are_columns and first.decoder is not None else None


class _StoredUnits:
    """Access to a part's bytes by unit: ``count`` units of ``width`` bytes."""

    def __init__(self, part: Part, width: int, count: int) -> None:
        self._windows = Windows(part, count, width)
        self._width = width

    def read(self, positions: Array) -> Array:
        """Return the bytes of the units at ascending ``positions``: u8 [units, width]."""
        cached = self._windows.all_bytes()
        rows = slice(0, 0)
        if cached is not None:
            units: Array = cached.reshape(self._windows.rows, self._width)
            return _take_rows(units, positions)
        if positions.size:
            rows = slice(int(positions[0]), int(positions[-1]) + 1)
        if rows.stop - rows.start <= _SPARSE * positions.size:
            return _take_rows(self._windows.read(rows, 0, self._width), positions - rows.start)
        single = (self._windows.read(slice(index, index + 1), 0, self._width) for index in positions.tolist())
        return np.concatenate([*single])


def _take_rows(units: Array, positions: Array) -> Array:
    rows: Array = units[positions]
    return rows


class _SelectedUnits:
    """Access to the units of a part that ``units`` selects, by their index in the result."""

    def __init__(self, stored: _StoredUnits, units: Units) -> None:
        self._stored = stored
        self._units = units

    def read(self, first: int, last: int) -> Array:
        return self._stored.read(self._units.positions(first, last))


class _InterleavedUnits:
    """Access to the units of an interleaved part, by index; each unit is read from the source part that contains it."""

    def __init__(self, members: Sequence[tuple[_StoredUnits, Units]], width: int) -> None:
        self._members = members
        self._width = width

    def read(self, first: int, last: int) -> Array:
        out = np.empty((last - first, self._width), np.uint8)
        run, unit = np.divmod(np.arange(first, last, dtype=np.int64), self._members[0][1].per_run)
        for stored, units in self._members:
            index, between = np.divmod(unit - units.start, units.step)
            own_units = np.flatnonzero((between == 0) & (index >= 0) & (index < units.count))
            out[own_units] = stored.read(run[own_units] * units.count + index[own_units])
        return out


class _Sources:
    """The byte sources of several parts as one object that detects changes."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self._parts = parts

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._parts)


class _UnitSource(ComputedRows):
    """The byte source of a part whose units are computed on access."""

    def __init__(
        self, name: str, parts: Sequence[Part], count: int, width: int, make: Callable[[int, int], Array]
    ) -> None:
        super().__init__(_Sources(name, parts), count, width, make)
        self._parts = parts

    def verify_sources(self) -> None:
        """Check the digests of the parts, because reading single units does not."""
        for part in self._parts:
            verify_part(part)


def _computed_part(
    location: str, parts: Sequence[Part], count: int, width: int, make: Callable[[int, int], Array]
) -> Part:
    source = _UnitSource(location, parts, count, width, make)
    return Part(parts[0].dtype, source.size, source, type=parts[0].type, where=location)
