"""Tensors of rows of other tensors, and checkpoints of such tensors: what views are made of (``spec/views.md``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Unpack

import numpy as np

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Attributes, Checkpoint, CheckpointSource
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.reading.pieces import SCATTERED, Origin, PartBytes, Pieces, ValueBytes, backwards, joined, prove, skips
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Decoder, Tensor


@dataclass(frozen=True, slots=True)
class View:
    """A checkpoint that operations made from an opened one, and what they report about it.

    Parameters
    ----------
    checkpoint : Checkpoint
    notes : sequence of str
        Sentences for the report of the operation that uses the view, in the order of the changes.
    bytes_read : int
        Stored bytes that were read to make the view.
    inexact : frozenset of str
        Tensors, by their names in ``checkpoint``, whose values are equal in their own element type but not all in f32.
        No operation renames tensors after one that reports inexact tensors.
    """

    checkpoint: Checkpoint
    notes: Sequence[str] = ()
    bytes_read: int = 0
    inexact: frozenset[str] = frozenset()

    def then(self, operation: Callable[[Checkpoint], Checkpoint | View]) -> View:
        """Apply a further operation to the checkpoint; return its result with the reports of both."""
        result = operation(self.checkpoint)
        if isinstance(result, Checkpoint):
            return replace(self, checkpoint=result)
        return View(
            result.checkpoint,
            (*self.notes, *result.notes),
            self.bytes_read + result.bytes_read,
            self.inexact | result.inexact,
        )

    def with_notes(self, *notes: str) -> View:
        """Return the view with further notes; empty ones are left out."""
        return replace(self, notes=(*self.notes, *filter(None, notes)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of elements of some tensors, one behind the other.

    Parameters
    ----------
    origins : sequence of Tensor
        All of one dtype.
    runs : [3, n] of i64
        For each run the origin, the element at which it begins, and its elements.
    """

    origins: Sequence[Tensor]
    runs: Array

    @staticmethod
    def whole(origins: Sequence[Tensor]) -> Rows:
        """Return all of the tensors."""
        count = len(origins)
        runs = np.array([range(count), [0] * count, [tensor.size for tensor in origins]], np.int64)
        return Rows(origins, runs.reshape(3, count))

    @staticmethod
    def taken(tensor: Tensor, indices: Array) -> Rows:
        """Return some indices of the first dimension; errors are the caller's to find."""
        unit = prod(tensor.shape[1:])
        starts = indices.astype(np.int64) * unit
        return Rows([tensor], np.stack([np.zeros_like(starts), starts, np.full_like(starts, unit)]))


def assemble(name: str, shape: tuple[int, ...], rows: Rows, dense: Decoder) -> Tensor:
    """Return the tensor of ``shape`` whose elements are ``rows``.

    It keeps its codec, and moves stored bytes, where these lie in runs, in a layout of the same numbers at least, and
    all origins agree; else it is what the rows decode to: a dense tensor, of which ``dense`` is the decoder.
    """
    origins, runs = [_in_runs(origin) for origin in rows.origins], joined(rows.runs)
    origin, layout = origins[0], common_layout(origins, shape)
    if layout is not None and not (runs[1:] % layout.elements).any():
        parts = {role: _part(name, role, origins, runs, layout) for role in origin.parts}
        return replace(origin, name=name, shape=shape, parts=parts, origin=None)
    return decoded(name, shape, rows.origins, runs, dense)


def decoded(
    name: str,
    shape: tuple[int, ...],
    origins: Sequence[Tensor],
    runs: Array,
    dense: Decoder,
    columns: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Return the dense tensor of runs of elements; of ``columns`` alone, runs count the elements that are left.

    Raises ``UnsupportedError`` ``codec.unknown`` for what cannot be decoded.
    """
    row = DTYPES.get(origins[0].dtype)
    if row is None or row.bits < 8:
        raise UnsupportedError(
            f"expected values that can be decoded, found {origins[0].dtype}", rule="codec.unknown", where=name
        )
    back = backwards(runs)
    values = [
        ValueBytes(tensor, scattered=back > (SCATTERED if back and skips(tensor) else 0), columns=columns)
        for tensor in origins
    ]
    size = row.bits // 8
    source = Pieces(name, values, np.stack([runs[0], runs[1] * size, runs[2] * size]))
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{name}: data")
    bits = max(origin.source_bits for origin in origins)
    return Tensor(name, shape, row.name, DenseLayout.codec, {"data": part}, {}, dense, source_bits=bits)


def renamed(tensor: Tensor, name: str) -> Tensor:
    """Return the same tensor under another name."""
    origin = None if tensor.origin is None else renamed(tensor.origin, name)
    return replace(tensor, name=name, origin=origin)


Verb = Callable[[Checkpoint, Any], Checkpoint]
"""Makes a view of a checkpoint, and of what is asked of it."""


class ViewSource(CheckpointSource):
    """The checkpoint that a view was made from, and how to make the view again.

    ``opened`` are further sources that the view reads; ``also_close`` releases them with the view.
    """

    __slots__ = ("_also_close", "_argument", "_base", "_opened", "_origins", "_tensors", "_verb", "_views")

    def __init__(
        self,
        base: Checkpoint,
        tensors: Mapping[str, Tensor],
        verb: Verb,
        argument: Any,
        description: Any,
        origins: Mapping[str, Sequence[str]] | None = None,
        opened: Sequence[CheckpointSource] = (),
        also_close: Callable[[], None] | None = None,
    ) -> None:
        self._base = base
        self._tensors = tensors
        self._verb = verb
        self._argument = argument
        self._views = (*base.views, (verb.__name__.removeprefix("_"), description))
        self._origins = origins or {}
        self._opened = opened
        self._also_close = also_close

    @property
    def views(self) -> tuple[tuple[str, Any], ...]:
        return self._views

    def identity(self) -> list[Any]:
        return self._base.source.identity()

    def origins_of(self, name: str) -> tuple[str, ...]:
        parents = self._origins.get(name, (name,))
        return tuple(dict.fromkeys(origin for parent in parents for origin in self._base.origins_of(parent)))

    def require_whole(self) -> None:
        self._base.require_whole()
        for tensor in self._tensors.values():
            for part in tensor.parts.values():
                prove(part)
        for source in self._opened:
            source.require_whole()

    def require_unchanged(self) -> None:
        self._base.require_unchanged()
        for source in self._opened:
            source.require_unchanged()

    def reopen(self) -> tuple[Verb, tuple[Any, ...]]:
        return self._verb, (self._base, self._argument)

    def close(self) -> None:
        if self._also_close is not None:
            self._also_close()
        self._base.close()


def derived(
    base: Checkpoint,
    tensors: Mapping[str, Tensor],
    verb: Verb,
    argument: Any,
    said: Any,
    *,
    origins: Mapping[str, Sequence[str]] | None = None,
    opened: Sequence[CheckpointSource] = (),
    also_close: Callable[[], None] | None = None,
    **changes: Unpack[Attributes],
) -> Checkpoint:
    """Return a checkpoint like ``base`` with other tensors. Closing either closes both.

    Parameters
    ----------
    base : Checkpoint
    tensors : mapping
    verb, argument
        The function that makes the view and its picklable argument: a copy of the view is ``verb(base, argument)``.
    said
        The argument as JSON, or JSON values that identify it.
    origins : mapping, optional
        Names of new tensors to the tensors of ``base`` that they are made of. A name without an entry stands for the
        tensor of ``base`` of the same name.
    opened : sequence of CheckpointSource
        Further sources that the view reads, which are checked with it.
    also_close : callable, optional
        Closes what was opened for the view.
    changes
        Attributes that differ from those of ``base``. Aliases of names without a tensor are left out, and so are
        ``features``, which are those of a file.
    """
    attributes: Attributes = {
        "metadata": base.metadata,
        "companions": base.companions,
        "attachments": base.attachments,
        "importance": base.importance,
        "aliases": base.aliases,
        "unread": base.unread,
        "omissions": base.omissions,
    }
    attributes.update(changes)
    attributes["aliases"] = {name: alias for name, alias in attributes["aliases"].items() if name in tensors}
    source = ViewSource(base, tensors, verb, argument, said, origins, opened, also_close)
    return Checkpoint(tensors, format=base.format, location=base.location, io=base.io, source=source, **attributes)


def _in_runs(tensor: Tensor) -> Tensor:
    """Return the tensor, in a layout that lies in runs where its own does not."""
    found = None if tensor.decoder is None else tensor.decoder.to_runs(tensor)
    return tensor if found is None else found


def common_layout(origins: Sequence[Tensor], shape: tuple[int, ...]) -> RunLayout | None:
    """Return how runs lie in the parts of all origins, if they may stand in one tensor as they are stored."""
    first = origins[0]
    if first.decoder is None:
        return None
    layouts = []
    for tensor in origins:
        same = tensor.codec == first.codec and tensor.dtype == first.dtype and dict(tensor.params) == dict(first.params)
        types = {role: (part.dtype, part.type) for role, part in tensor.parts.items()}
        if not same or types != {role: (part.dtype, part.type) for role, part in first.parts.items()}:
            return None
        layouts.append(first.decoder.runs(tensor, shape))
    alone = all(tensor is first for tensor in origins)
    if any(layout is None or layout != layouts[0] for layout in layouts):
        return None
    layout = layouts[0]
    return layout if layout is not None and (alone or all(layout.nbytes.values())) else None


def _part(name: str, role: str, origins: Sequence[Tensor], runs: Array, layout: RunLayout) -> Part:
    """Return one part of a tensor that is made of runs."""
    part = origins[0].parts[role]
    width = layout.nbytes[role]
    if not width:
        return part
    spans = np.stack([runs[0], runs[1] // layout.elements * width, runs[2] // layout.elements * width])
    if spans.shape[1] == 1 and part.encoding == "raw":
        which, start, length = (int(value) for value in spans[:, 0])
        part = origins[which].parts[role]
        if length == part.nbytes:
            return part
        if part.digest is None or not part.verify:
            return replace(part, offset=part.offset + start, length=length, digest=None, occupies=None)
    scattered = backwards(spans) > SCATTERED
    bytes_of: list[Origin] = [PartBytes(tensor.parts[role], scattered=scattered) for tensor in origins]
    source = Pieces(f"{name}: {role}", bytes_of, spans)
    return Part(part.dtype, source.size, source, type=part.type, where=f"{name}: {role}")
