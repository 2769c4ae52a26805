"""Views: checkpoints whose tensors are assembled from rows or values of other tensors (``spec/views.md``)."""

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
from ingot.model.reading.concat_source import (
    SCATTERED,
    ConcatSource,
    DecodedRange,
    PartRange,
    RandomAccess,
    can_skip,
    count_backward_runs,
    join_runs,
    verify_sources,
)
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Decoder, Tensor


@dataclass(frozen=True, slots=True)
class View:
    """A checkpoint that operations computed from an opened one, with notes for reports.

    Parameters
    ----------
    checkpoint : Checkpoint
    notes : sequence of str
        Sentences for the report of the operation that uses the view, in the order of the changes.
    bytes_read : int
        Stored bytes that were read to compute the view.
    inexact : frozenset of str
        Names of tensors whose values equal the source's in their element type but not in f32. They are names in
        ``checkpoint``, so tensors must be renamed before.
    """

    checkpoint: Checkpoint
    notes: Sequence[str] = ()
    bytes_read: int = 0
    inexact: frozenset[str] = frozenset()

    def then(self, operation: Callable[[Checkpoint], Checkpoint | View]) -> View:
        """Apply an operation to the checkpoint; return its result with the notes and bytes of both."""
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
        """Return the view with additional notes; empty texts are left out."""
        return replace(self, notes=(*self.notes, *filter(None, notes)))


@dataclass(frozen=True, slots=True)
class ElementRuns:
    """Concatenated runs of elements of tensors.

    Parameters
    ----------
    origins : sequence of Tensor
        Tensors of one dtype.
    runs : i64 array [3, n]
        For each run the index of its origin, the index of its first element, and its number of elements.
    """

    origins: Sequence[Tensor]
    runs: Array

    @staticmethod
    def from_tensors(origins: Sequence[Tensor]) -> ElementRuns:
        """Return the runs that concatenate full tensors."""
        count = len(origins)
        runs = np.array([range(count), [0] * count, [tensor.size for tensor in origins]], np.int64)
        return ElementRuns(origins, runs.reshape(3, count))

    @staticmethod
    def from_indices(tensor: Tensor, indices: Array) -> ElementRuns:
        """Return the runs that select ``indices`` along the first dimension. The caller checks the indices."""
        row_size = prod(tensor.shape[1:])
        starts = indices.astype(np.int64) * row_size
        return ElementRuns([tensor], np.stack([np.zeros_like(starts), starts, np.full_like(starts, row_size)]))


def assemble(name: str, shape: tuple[int, ...], elements: ElementRuns, dense: Decoder) -> Tensor:
    """Return a tensor of ``shape`` that consists of runs of elements of other tensors.

    The tensor has the codec of the origins and consists of their stored bytes if this is possible: the origins must
    have equal layouts, and the positions of runs in their parts must be known. Otherwise it is a dense tensor of the
    decoded values, with the decoder ``dense``.
    """
    origins = [_with_runs(origin) for origin in elements.origins]
    runs = join_runs(elements.runs)
    origin = origins[0]
    layout = common_layout(origins, shape)
    if layout is not None and not (runs[1:] % layout.elements).any():
        parts = {role: _part(name, role, origins, runs, layout) for role in origin.parts}
        return replace(origin, name=name, shape=shape, parts=parts, origin=None)
    return decode_runs(name, shape, elements.origins, runs, dense)


def decode_runs(
    name: str,
    shape: tuple[int, ...],
    origins: Sequence[Tensor],
    runs: Array,
    dense: Decoder,
    columns: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Return a dense tensor of the decoded values of runs of elements.

    If ``columns`` are given, the origins contain only these columns, and ``runs`` counts their elements.

    Raises ``UnsupportedError`` ``codec.unknown`` if the values cannot be decoded.
    """
    row = DTYPES.get(origins[0].dtype)
    if row is None or row.bits < 8:
        raise UnsupportedError(
            f"expected values that can be decoded, found {origins[0].dtype}", rule="codec.unknown", where=name
        )
    back = count_backward_runs(runs)
    values = [
        DecodedRange(tensor, scattered=back > (SCATTERED if back and can_skip(tensor) else 0), columns=columns)
        for tensor in origins
    ]
    size = row.bits // 8
    source = ConcatSource(name, values, np.stack([runs[0], runs[1] * size, runs[2] * size]))
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{name}: data")
    bits = max(origin.source_bits for origin in origins)
    return Tensor(name, shape, row.name, DenseLayout.codec, {"data": part}, {}, dense, source_bits=bits)


def with_name(tensor: Tensor, name: str) -> Tensor:
    """Return the same tensor under another name."""
    origin = None if tensor.origin is None else with_name(tensor.origin, name)
    return replace(tensor, name=name, origin=origin)


Verb = Callable[[Checkpoint, Any], Checkpoint]
"""A function that returns a view of a checkpoint for a picklable argument."""


class ViewSource(CheckpointSource):
    """The source of a view: its base checkpoint, and the function and argument that create the view again.

    ``opened`` contains further sources that the view reads; ``also_close`` closes them with the view.
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
                verify_sources(part)
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


def derive_checkpoint(
    base: Checkpoint,
    tensors: Mapping[str, Tensor],
    verb: Verb,
    argument: Any,
    description: Any,
    *,
    origins: Mapping[str, Sequence[str]] | None = None,
    opened: Sequence[CheckpointSource] = (),
    also_close: Callable[[], None] | None = None,
    **changes: Unpack[Attributes],
) -> Checkpoint:
    """Return a checkpoint like ``base``, but with the tensors ``tensors``. Closing one of the two closes both.

    Parameters
    ----------
    base : Checkpoint
    tensors : mapping
    verb, argument
        The function that creates the view and its picklable argument: a copy of the view is ``verb(base, argument)``.
    description
        The argument as JSON, or JSON values that identify it.
    origins : mapping, optional
        For the name of each new tensor, the names of the tensors of ``base`` from which it is computed. A tensor
        without an entry is computed from the tensor of ``base`` with the same name.
    opened : sequence of CheckpointSource
        Further sources that the view reads, which are checked with it.
    also_close : callable, optional
        Closes sources that were opened for the view.
    changes
        Attributes that differ from those of ``base``. Aliases of names that are not in ``tensors`` are removed. The
        view has no ``features``, because they describe a file.
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
    source = ViewSource(base, tensors, verb, argument, description, origins, opened, also_close)
    return Checkpoint(tensors, format=base.format, location=base.location, io=base.io, source=source, **attributes)


def _with_runs(tensor: Tensor) -> Tensor:
    """Return the tensor in a layout whose runs of elements have known positions (``Decoder.to_runs``).

    If the codec has no such layout, return ``tensor``.
    """
    converted = None if tensor.decoder is None else tensor.decoder.to_runs(tensor)
    return tensor if converted is None else converted


def common_layout(origins: Sequence[Tensor], shape: tuple[int, ...]) -> RunLayout | None:
    """Return the layout of runs that all ``origins`` share.

    Returns None if a tensor of ``shape`` cannot be assembled from their stored bytes.
    """
    first = origins[0]
    if first.decoder is None:
        return None
    layouts = []
    for tensor in origins:
        is_equal = (
            tensor.codec == first.codec and tensor.dtype == first.dtype and dict(tensor.params) == dict(first.params)
        )
        types = {role: (part.dtype, part.type) for role, part in tensor.parts.items()}
        if not is_equal or types != {role: (part.dtype, part.type) for role, part in first.parts.items()}:
            return None
        layouts.append(first.decoder.runs(tensor, shape))
    single_origin = all(tensor is first for tensor in origins)
    if any(layout is None or layout != layouts[0] for layout in layouts):
        return None
    layout = layouts[0]
    return layout if layout is not None and (single_origin or all(layout.nbytes.values())) else None


def _part(name: str, role: str, origins: Sequence[Tensor], runs: Array, layout: RunLayout) -> Part:
    """Return the part ``role`` of a tensor that is assembled from ``runs`` of elements of ``origins``."""
    part = origins[0].parts[role]
    width = layout.nbytes[role]
    if not width:
        return part
    spans = np.stack([runs[0], runs[1] // layout.elements * width, runs[2] // layout.elements * width])
    if spans.shape[1] == 1 and part.encoding == "raw":
        origin, start, length = (int(value) for value in spans[:, 0])
        part = origins[origin].parts[role]
        if length == part.nbytes:
            return part
        if part.digest is None or not part.verify:
            return replace(part, offset=part.offset + start, length=length, digest=None, occupies=None)
    scattered = count_backward_runs(spans) > SCATTERED
    bytes_of: list[RandomAccess] = [PartRange(tensor.parts[role], scattered=scattered) for tensor in origins]
    source = ConcatSource(f"{name}: {role}", bytes_of, spans)
    return Part(part.dtype, source.size, source, type=part.type, where=f"{name}: {role}")
