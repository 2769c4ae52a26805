"""Views that drop blocks of channels, or set the importance of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ingot.codecs.sparse.blocks import with_blocks_dropped
from ingot.codecs.table import CODECS
from ingot.core.bytes import checksums
from ingot.core.numeric.blocks import Blocks
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import ElementRuns, assemble, decode_runs, derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.views.common import BuildTensor, require_names, view_of


@dataclass(frozen=True, slots=True)
class Pruning:
    """The blocks of channels that remain in a matrix, along ``axis`` (0 for rows, 1 for columns).

    Examples
    --------
    >>> name = "model.layers.0.mlp.up_proj.weight"
    >>> pruning = ingot.views.Pruning(0, ingot.views.weakest_blocks(ingot.open("model"), 0.25)[name].blocks)
    """

    axis: int
    blocks: Blocks


def prune(checkpoint: Checkpoint, prunings: Mapping[str, Pruning]) -> Checkpoint:
    """Return the checkpoint without some blocks of rows or columns of some matrices; dropped weights read as zeros.

    A writer stores only the remaining weights of a pruned matrix (codec ``sparse_blocks``). ``Tensor.origin`` of the
    pruned matrix is the full matrix.

    Parameters
    ----------
    checkpoint : Checkpoint
    prunings : mapping of name to Pruning

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``view.blocks``: no matrix, or a mask for another number of channels; ``view.delta``.

    Examples
    --------
    >>> model = ingot.open("model")
    >>> view = ingot.views.prune(model, ingot.views.weakest_blocks(model, 0.25))
    >>> round(float((view["model.layers.0.mlp.up_proj.weight"].numpy() == 0).mean()), 2)
    0.25
    """
    require_names(checkpoint, prunings)
    for name, pruning in prunings.items():
        shape = checkpoint[name].shape
        axis = pruning.axis
        channels = pruning.blocks.channels
        if len(shape) != 2 or axis not in (0, 1) or shape[axis] != channels or pruning.blocks.has_spare_bits:
            raise UsageError(
                f"expected a matrix and blocks of all its channels along axis 0 or 1, found shape {list(shape)}, axis "
                f"{axis} and {channels} channels",
                rule="view.blocks",
                where=name,
            )

    def builder(name: str) -> BuildTensor:
        return lambda: _pruned(checkpoint[name], prunings[name])

    entries = [(name, builder(name) if name in prunings else None, name) for name in checkpoint]
    description = {name: [item.axis, item.blocks.block, item.blocks.mask.hex()] for name, item in prunings.items()}
    return view_of(checkpoint, entries, prune, dict(prunings), description)


def weigh(checkpoint: Checkpoint, importance: Mapping[str, Array]) -> Checkpoint:
    """Return the checkpoint with weights for the errors of matrices' columns, which the palette codec uses.

    Parameters
    ----------
    checkpoint : Checkpoint
    importance : mapping of name to array
        One weight per column: the mean square of the column's inputs, up to a constant factor.

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``convert.importance``: not one weight per column, or weights negative, not finite or all 0.

    Examples
    --------
    >>> name = "lm_head.weight"
    >>> view = ingot.views.weigh(ingot.open("model"), {name: np.ones(192, "f4")})
    >>> view[name].shape
    (1024, 192)
    """
    require_names(checkpoint, importance)
    weights = {name: np.ascontiguousarray(values, np.float64) for name, values in importance.items()}
    for name, values in weights.items():
        cols = checkpoint[name].matrix_shape[1]
        if values.shape != (cols,) or not (np.isfinite(values) & (values >= 0)).all() or not values.any():
            raise UsageError(
                f"expected {cols} finite weights, not negative and not all 0, found an array of shape "
                f"{list(values.shape)} with other values",
                rule="convert.importance",
                where=name,
            )
    description = {name: checksums.digest("crc32c", values.view(np.uint8).data) for name, values in weights.items()}
    importance = {**checkpoint.importance, **weights}
    tensors = LazyMap(checkpoint, checkpoint.__getitem__)
    return derive_checkpoint(checkpoint, tensors, weigh, weights, description, importance=importance)


def _pruned(tensor: Tensor, pruning: Pruning) -> Tensor:
    spans = np.array(pruning.blocks.spans(), np.int64).reshape(-1, 2)
    rows, cols = tensor.shape
    if pruning.axis == 0:
        counts = (spans[:, 1] - spans[:, 0]) * cols
        remaining_rows = ElementRuns([tensor], np.stack([np.zeros_like(counts), spans[:, 0] * cols, counts]))
        inner = assemble(tensor.name, (pruning.blocks.kept_channels, cols), remaining_rows, CODECS[DenseLayout.codec])
    else:
        remaining_shape = (rows, pruning.blocks.kept_channels)
        columns = [(int(start), int(stop)) for start, stop in spans]
        inner = decode_runs(
            tensor.name,
            remaining_shape,
            [tensor],
            np.array([[0], [0], [prod(remaining_shape)]]),
            CODECS[DenseLayout.codec],
            columns,
        )
    return replace(with_blocks_dropped(tensor, inner, pruning.axis, pruning.blocks), origin=tensor)
