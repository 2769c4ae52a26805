"""The view that gives integers smaller groups of columns, for formats in which groups divide the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.codecs.affine.regroup import split_groups
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout, Group
from ingot.model.tensor import Tensor
from ingot.views.common import Make, view_of


def even_group(group: object, cols: int, sizes: Sequence[int]) -> int | None:
    """Return the largest of ``sizes`` that divides ``group`` and the columns, if ``group`` does not divide them."""
    if not isinstance(group, int) or not group or cols % group == 0:
        return None
    return max((size for size in sizes if group % size == 0 and cols % size == 0), default=None)


def regroup(checkpoint: Checkpoint, groups: Mapping[str, int]) -> Checkpoint:
    """Return the checkpoint with smaller groups in some affine tensors, itself without ``groups``; no value changes.

    Parameters
    ----------
    checkpoint : Checkpoint
    groups : mapping of name to int
        Columns of a group, which divide the stored groups.

    Raises
    ------
    UsageError
        ``view.delta``.
    """

    def with_smaller_groups(name: str) -> Make:
        return lambda: split_groups(checkpoint[name], groups[name])

    if not groups:
        return checkpoint
    entries = [(name, with_smaller_groups(name) if name in groups else None, name) for name in checkpoint]
    return view_of(checkpoint, entries, regroup, dict(groups), dict(groups))


def smaller_groups(checkpoint: Checkpoint, sizes: Sequence[int], *, one: bool) -> dict[str, int]:
    """Return the affine tensors that need smaller groups, and the columns of those.

    Groups divide the columns; with ``one`` they are of one size in all tensors, if there is a size that divides all.
    """
    names = checkpoint.tensor_map.names_where(lambda tensor: _group(tensor) is not None)
    groups = {name: group for name in names if (group := _group(checkpoint[name])) is not None}
    cols = {name: checkpoint[name].matrix_shape[1] for name in groups}
    even = {name: size for name, group in groups.items() if (size := even_group(group, cols[name], sizes)) is not None}
    now = {**groups, **even}
    if not one or len(set(now.values())) < 2:
        return even
    common = next((size for size in sizes if all(group % size == 0 for group in now.values())), None)
    return even if common is None else {name: common for name, group in groups.items() if group != common}


def _group(tensor: Tensor) -> int | None:
    """Return the columns of a group of an affine tensor; None for other tensors."""
    if tensor.codec != AffineLayout.codec:
        return None
    try:
        layout = AffineLayout.from_tensor(tensor)
    except CodecError:  # reported when the tensor is read
        return None
    return layout.grid.columns if isinstance(layout.grid, Group) and layout.matrix is None else None
