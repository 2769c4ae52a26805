"""Views that leave out blocks of channels, or say what errors weigh."""

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
from ingot.views.common import Make, require_known, view_of


@dataclass(frozen=True, slots=True)
class Pruning:
    """Blocks of channels along ``axis`` (0 for rows, 1 for columns) that a matrix keeps or loses."""

    axis: int
    blocks: Blocks


def prune(checkpoint: Checkpoint, prunings: Mapping[str, Pruning]) -> Checkpoint:
    """Return the checkpoint without some blocks of rows or columns of some matrices: they read as zeros.

    Stored anywhere, a pruned matrix takes the bytes of what is left (codec ``sparse_blocks``). ``origin`` of its tensor
    is the matrix as it was.

    Parameters
    ----------
    checkpoint : Checkpoint
    prunings : mapping of name to Pruning

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``view.blocks``: not a matrix, or a mask for another number of channels; ``view.delta``.
    """
    require_known(checkpoint, prunings)
    for name, pruning in prunings.items():
        shape = checkpoint[name].shape
        axis = pruning.axis
        channels = pruning.blocks.channels
        if len(shape) != 2 or axis not in (0, 1) or shape[axis] != channels or pruning.blocks.spare:
            raise UsageError(
                f"expected a matrix and blocks of all its channels along axis 0 or 1, found shape {list(shape)}, axis "
                f"{axis} and {channels} channels",
                rule="view.blocks",
                where=name,
            )

    def pruned(name: str) -> Make:
        return lambda: _pruned(checkpoint[name], prunings[name])

    entries = [(name, pruned(name) if name in prunings else None, name) for name in checkpoint]
    said = {name: [item.axis, item.blocks.block, item.blocks.mask.hex()] for name, item in prunings.items()}
    return view_of(checkpoint, entries, prune, dict(prunings), said)


def weigh(checkpoint: Checkpoint, importance: Mapping[str, Array]) -> Checkpoint:
    """Return the checkpoint with what errors of matrices' columns weigh, for palettes that are chosen for them.

    Parameters
    ----------
    checkpoint : Checkpoint
    importance : mapping of name to array
        One weight per column: the mean square of what the column is multiplied with, up to a factor.

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``convert.importance``: not one finite weight from 0 on per column, or all 0.
    """
    require_known(checkpoint, importance)
    weights = {name: np.ascontiguousarray(values, np.float64) for name, values in importance.items()}
    for name, values in weights.items():
        cols = checkpoint[name].matrix_shape[1]
        if values.shape != (cols,) or not (np.isfinite(values) & (values >= 0)).all() or not values.any():
            raise UsageError(
                f"expected {cols} finite weights, not negative and not all 0, found an array of shape "
                f"{list(values.shape)} that is not so",
                rule="convert.importance",
                where=name,
            )
    said = {name: checksums.digest("crc32c", values.view(np.uint8).data) for name, values in weights.items()}
    importance = {**checkpoint.importance, **weights}
    tensors = LazyMap(checkpoint, checkpoint.__getitem__)
    return derive_checkpoint(checkpoint, tensors, weigh, weights, said, importance=importance)


def _pruned(tensor: Tensor, pruning: Pruning) -> Tensor:
    spans = np.array(pruning.blocks.spans(), np.int64).reshape(-1, 2)
    rows, cols = tensor.shape
    if pruning.axis == 0:
        counts = (spans[:, 1] - spans[:, 0]) * cols
        kept = ElementRuns([tensor], np.stack([np.zeros_like(counts), spans[:, 0] * cols, counts]))
        inner = assemble(tensor.name, (pruning.blocks.kept, cols), kept, CODECS[DenseLayout.codec])
    else:
        left = (rows, pruning.blocks.kept)
        columns = [(int(start), int(stop)) for start, stop in spans]
        inner = decode_runs(
            tensor.name, left, [tensor], np.array([[0], [0], [prod(left)]]), CODECS[DenseLayout.codec], columns
        )
    return replace(with_blocks_dropped(tensor, inner, pruning.axis, pruning.blocks), origin=tensor)
