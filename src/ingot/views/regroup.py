"""A view with smaller quantization groups of integers, for formats in which the group size must divide the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.codecs.affine.regroup import split_groups
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout, Group
from ingot.model.tensor import Tensor
from ingot.views.common import BuildTensor, view_of


def even_group(group: object, cols: int, sizes: Sequence[int]) -> int | None:
    """Return the largest of ``sizes`` that divides the group size ``group`` and the number of columns.

    Returns None if ``group`` divides the columns already, or if no size divides both.
    """
    if not isinstance(group, int) or not group or cols % group == 0:
        return None
    return max((size for size in sizes if group % size == 0 and cols % size == 0), default=None)


def regroup(checkpoint: Checkpoint, groups: Mapping[str, int]) -> Checkpoint:
    """Return the checkpoint with smaller groups in some affine tensors; no value changes.

    If ``groups`` is empty, ``checkpoint`` itself is returned.

    Parameters
    ----------
    checkpoint : Checkpoint
    groups : mapping of name to int
        Columns per group, a divisor of the stored group size.

    Raises
    ------
    UsageError
        ``view.delta``.
    """

    def with_smaller_groups(name: str) -> BuildTensor:
        return lambda: split_groups(checkpoint[name], groups[name])

    if not groups:
        return checkpoint
    entries = [(name, with_smaller_groups(name) if name in groups else None, name) for name in checkpoint]
    return view_of(checkpoint, entries, regroup, dict(groups), dict(groups))


def smaller_groups(checkpoint: Checkpoint, sizes: Sequence[int], *, common_size: bool) -> dict[str, int]:
    """Return the new group sizes of the affine tensors whose groups must be split, by name.

    New group sizes divide the columns. If ``common_size`` is true, all tensors must have one group size. They then get
    the first of ``sizes`` that divides all group sizes, if there is one.
    """
    names = checkpoint.tensor_map.names_where(lambda tensor: _group(tensor) is not None)
    groups = {name: group for name in names if (group := _group(checkpoint[name])) is not None}
    cols = {name: checkpoint[name].matrix_shape[1] for name in groups}
    dividing = {
        name: size for name, group in groups.items() if (size := even_group(group, cols[name], sizes)) is not None
    }
    all_sizes = {**groups, **dividing}
    if not common_size or len(set(all_sizes.values())) < 2:
        return dividing
    size = next((size for size in sizes if all(group % size == 0 for group in all_sizes.values())), None)
    return dividing if size is None else {name: size for name, group in groups.items() if group != size}


def _group(tensor: Tensor) -> int | None:
    """Return the number of columns per group of an affine tensor whose scales belong to groups of a row, else None."""
    if tensor.codec != AffineLayout.codec:
        return None
    try:
        layout = AffineLayout.from_tensor(tensor)
    except CodecError:  # the tensor's reader will raise the error
        return None
    return layout.grid.columns if isinstance(layout.grid, Group) and layout.matrix is None else None
