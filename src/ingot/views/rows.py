"""Views that select, reorder, join and split rows (the first dimension) of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.bytes import checksums
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.view import ElementRuns, Verb, assemble
from ingot.model.tensor import Array, Tensor
from ingot.views.common import BuildTensor, require_names, require_once, view_of

Index = slice | Sequence[int] | Array


def take(checkpoint: Checkpoint, rows: Mapping[str, Index]) -> Checkpoint:
    """Return the checkpoint with selected rows of some tensors: ``tensor[index]`` along the first dimension.

    Parameters
    ----------
    checkpoint : Checkpoint
    rows : mapping of name to index
        A slice, or integers in any order and with repetitions; negative ones count from the end, as in NumPy's
        ``take``.

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``view.rows``: an index out of range, or rows of a tensor without dimensions;
        ``view.delta``.

    Examples
    --------
    >>> view = ingot.views.take(ingot.open("model"), {"lm_head.weight": slice(0, 512)})
    >>> view["lm_head.weight"].shape
    (512, 192)
    """
    require_names(checkpoint, rows)
    indices = {name: _indices(checkpoint[name], index) for name, index in rows.items()}

    def builder(name: str) -> BuildTensor:
        def make() -> Tensor:
            tensor = checkpoint[name]
            shape = (len(indices[name]), *tensor.shape[1:])
            return assemble(name, shape, ElementRuns.from_indices(tensor, indices[name]), CODECS[DenseLayout.codec])

        return make

    entries = [(name, builder(name) if name in indices else None, name) for name in checkpoint]
    description = {
        name: [len(index), checksums.digest("sha256", index.view(np.uint8).data)] for name, index in indices.items()
    }
    return view_of(checkpoint, entries, take, dict(rows), description)


def permute(checkpoint: Checkpoint, order: Mapping[str, Sequence[int] | Array]) -> Checkpoint:
    """Return the checkpoint with reordered rows of some tensors: new row ``i`` is old row ``order[i]``.

    Raises
    ------
    UsageError
        As ``take``; ``view.rows``: an order that does not contain each row once.

    Examples
    --------
    >>> view = ingot.views.permute(ingot.open("model"), {"lm_head.weight": range(1023, -1, -1)})
    >>> view["lm_head.weight"].shape
    (1024, 192)
    """
    require_names(checkpoint, order)
    for name, index in order.items():
        sorted_index = np.sort(_indices(checkpoint[name], index))
        if not np.array_equal(sorted_index, np.arange(checkpoint[name].shape[0])):
            raise UsageError(
                f"expected each of {checkpoint[name].shape[0]} rows once, found {len(sorted_index)} indices",
                rule="view.rows",
                where=name,
            )
    return take(checkpoint, order)


def concatenate(checkpoint: Checkpoint, names: Mapping[str, Sequence[str]]) -> Checkpoint:
    """Return the checkpoint with tensors joined along the first dimension, as ``numpy.concatenate``.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of new name to names
        The new tensor takes the position of the first joined tensor; the joined tensors are removed.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``; ``view.shape``: incompatible shapes or element types; ``view.delta``.

    Examples
    --------
    >>> names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    >>> view = ingot.views.concatenate(ingot.open("model"), {"gate_up": names})
    >>> view["gate_up"].shape
    (1024, 192)
    """
    return _join_view(checkpoint, names, concatenate, _concatenated_shape)


def stack(checkpoint: Checkpoint, names: Mapping[str, Sequence[str]]) -> Checkpoint:
    """Return the checkpoint with tensors of one shape stacked along a new first dimension, as ``numpy.stack``.

    Parameters and errors are those of ``concatenate``.

    Examples
    --------
    >>> names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
    >>> view = ingot.views.stack(ingot.open("model"), {"up": names})
    >>> view["up"].shape
    (4, 512, 192)
    """
    return _join_view(checkpoint, names, stack, _stacked_shape)


def split(checkpoint: Checkpoint, names: Mapping[str, Mapping[str, int]]) -> Checkpoint:
    """Return the checkpoint with tensors split along the first dimension, as ``numpy.split``; undoes ``concatenate``.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of name to mapping of new name to rows
        The new tensors in order; their rows must add up to all rows of the tensor.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``; ``view.rows``: rows that do not add up; ``view.delta``.

    Examples
    --------
    >>> name = "model.layers.0.mlp.up_proj.weight"
    >>> view = ingot.views.split(ingot.open("model"), {name: {"first": 128, "second": 384}})
    >>> view["second"].shape
    (384, 192)
    """
    require_names(checkpoint, names)
    for name, parts in names.items():
        shape = checkpoint[name].shape
        if not shape or sum(parts.values()) != shape[0] or any(count < 0 for count in parts.values()):
            raise UsageError(
                f"expected numbers of rows that add up to those of shape {list(shape)}, found {list(parts.values())}",
                rule="view.rows",
                where=name,
            )
    slices = {
        name: [
            (new, (count, *checkpoint[name].shape[1:]), end - count)
            for (new, count), end in zip(parts.items(), accumulate(parts.values()), strict=True)
        ]
        for name, parts in names.items()
    }
    return _split_view(checkpoint, slices, split, {name: dict(parts) for name, parts in names.items()})


def unstack(checkpoint: Checkpoint, names: Mapping[str, Sequence[str]]) -> Checkpoint:
    """Return the checkpoint with tensors split along the first dimension, which is removed; undoes ``stack``.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of name to names
        A new name for each index of the first dimension.

    Raises
    ------
    UsageError
        As ``split``.

    Examples
    --------
    >>> ingot.save("experts.zt", {"up": np.zeros((2, 4, 32), "f4")})
    >>> view = ingot.views.unstack(ingot.open("experts.zt"), {"up": ["up.0", "up.1"]})
    >>> view["up.1"].shape
    (4, 32)
    """
    require_names(checkpoint, names)
    for name, parts in names.items():
        shape = checkpoint[name].shape
        if not shape or len(parts) != shape[0]:
            raise UsageError(
                f"expected a name for each index of the first dimension of {list(shape)}, found {len(parts)}",
                rule="view.rows",
                where=name,
            )
    slices = {
        name: [(new, checkpoint[name].shape[1:], row) for row, new in enumerate(parts)] for name, parts in names.items()
    }
    return _split_view(checkpoint, slices, unstack, {name: list(parts) for name, parts in names.items()})


def _concatenated_shape(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    first = tensors[0]
    if not first.shape or any(tensor.shape[1:] != first.shape[1:] or not tensor.shape for tensor in tensors):
        return None
    return (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])


def _stacked_shape(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    first = tensors[0].shape
    return None if any(tensor.shape != first for tensor in tensors) else (len(tensors), *first)


def _join_view(
    checkpoint: Checkpoint,
    names: Mapping[str, Sequence[str]],
    verb: Verb,
    shape_of: Callable[[Sequence[Tensor]], tuple[int, ...] | None],
) -> Checkpoint:
    used = [name for members in names.values() for name in members]
    require_names(checkpoint, used)
    require_once(used)
    shapes = {}
    for new, members in names.items():
        tensors = [checkpoint[name] for name in members]
        shape = shape_of(tensors) if tensors else None
        if shape is None or len({tensor.dtype for tensor in tensors}) > 1:
            shapes_found = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors[:6])
            raise UsageError(
                f"expected tensors of one element type and of compatible shapes, found {shapes_found or 'none'}",
                rule="view.shape",
                where=new,
            )
        shapes[new] = shape
    first = {members[0]: new for new, members in names.items()}
    removed = set(used) - set(first)

    def builder(new: str) -> BuildTensor:
        def make() -> Tensor:
            return assemble(
                new,
                shapes[new],
                ElementRuns.from_tensors([checkpoint[name] for name in names[new]]),
                CODECS[DenseLayout.codec],
            )

        return make

    entries = [
        (first.get(name, name), builder(first[name]) if name in first else None, name)
        for name in checkpoint
        if name not in removed
    ]
    joined_names = {new: list(members) for new, members in names.items()}
    importance = {}
    for new, members in names.items():
        first_weights, *other_weights = [checkpoint.importance.get(name) for name in members]
        if first_weights is not None and all(
            weights is not None and np.array_equal(first_weights, weights) for weights in other_weights
        ):
            importance[new] = first_weights
    return view_of(checkpoint, entries, verb, joined_names, origins=joined_names, importance=importance)


def _split_view(
    checkpoint: Checkpoint,
    slices: Mapping[str, Sequence[tuple[str, tuple[int, ...], int]]],
    verb: Verb,
    argument: Any,
) -> Checkpoint:
    """Return the view in which some tensors are replaced by slices of their rows.

    ``slices`` has, for each tensor, the name, the shape and the first row of each slice.
    """

    def builder(name: str, new: str, shape: tuple[int, ...], row: int) -> BuildTensor:
        def make() -> Tensor:
            tensor = checkpoint[name]
            run = np.array([[0], [row * prod(tensor.shape[1:])], [prod(shape)]], np.int64)
            return assemble(new, shape, ElementRuns([tensor], run), CODECS[DenseLayout.codec])

        return make

    entries: list[tuple[str, BuildTensor | None, str]] = []
    for name in checkpoint:
        parts = slices.get(name)
        entries += (
            [(name, None, name)]
            if parts is None
            else [(new, builder(name, new, shape, row), name) for new, shape, row in parts]
        )
    columns = {
        new: weights
        for name, weights in checkpoint.importance.items()
        for new, shape, _ in slices.get(name, ())
        if shape and len(weights) == shape[-1]
    }
    return view_of(checkpoint, entries, verb, argument, importance=columns)


def _indices(tensor: Tensor, index: Index) -> Array:
    """Return ``index`` as int64 indices of the tensor's rows; negative indices are replaced.

    Raises ``UsageError`` ``view.rows`` for an index out of range, and for a tensor without dimensions.
    """
    count = tensor.shape[0] if tensor.shape else None
    if count is None:
        raise UsageError(
            "expected a tensor with rows, found one without dimensions", rule="view.rows", where=tensor.name
        )
    if isinstance(index, slice):
        return np.ascontiguousarray(np.arange(count, dtype=np.int64)[index])
    indices = np.asarray(index)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise UsageError("expected a slice or a list of integers", rule="view.rows", where=tensor.name)
    outside = indices[(indices < -count) | (indices >= count)] if indices.size else indices
    if outside.size:
        raise UsageError(
            f"expected rows from {-count} to {count - 1}, found {outside[0]}", rule="view.rows", where=tensor.name
        )
    signed = indices.astype(np.int64)
    return np.where(signed < 0, signed + count, signed)
