"""Masks of a file without a directory (SQUIZD document, section 6): are blocks stored in full size, or compacted?

The document says that masks follow a layer's blocks and not which matrices they are for, nor that anything is left out
of these. So both readings are held against what is there: the number of a mask's bytes and the bits past its last
block, the sizes in the blocks' headers, and ``mean_sparsity``.

- Full size: the intermediate width I is a size in the headers; a mask has ceil(I / block_size) bits and none past them.
- Compacted: what a mask keeps is a size in the headers, and ``mean_sparsity`` tells how many blocks there were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ingot.core.blocks import Blocks, block_count, mask_bytes
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.squizd.layout import Sparsity

Matrix = tuple[int, int]
_CLOSE = 1e-3


@dataclass(frozen=True, slots=True)
class Masked:
    """A layer with masks.

    ``networks`` are the matrices that a feed-forward network of a width would have: number and axis by width, see
    ``networks_of``. ``shapes`` are some of the layer's, ``data`` the bytes of the masks at ``offset``.
    """

    layer: int
    networks: Mapping[int, Sequence[tuple[int, int]]]
    offset: int
    data: bytes
    shapes: Sequence[Matrix] = ()


def masked(layer: int, matrices: Mapping[int, Matrix], offset: int, data: bytes) -> Masked:
    """Return a layer with masks; ``matrices`` are rows and columns of its blocks that have two dimensions."""
    return Masked(layer, networks_of(matrices), offset, data, sorted(set(matrices.values()))[:6])


def networks_of(matrices: Mapping[int, Matrix]) -> dict[int, list[tuple[int, int]]]:
    """Return which matrices a network of each width would have: made of it (axis 0), and reading it (axis 1).

    Those of an axis have one other size. There are at least as many with rows for the width as with columns; where as
    many, these come later.
    """
    by_width: dict[int, list[tuple[int, int]]] = {}
    others: dict[int, set[tuple[int, int]]] = {}
    for number, matrix in matrices.items():
        for axis in (0, 1):
            by_width.setdefault(matrix[axis], []).append((number, axis))
            others.setdefault(matrix[axis], set()).add((axis, matrix[1 - axis]))
    networks = {}
    for width, pairs in by_width.items():
        axes = [axis for _, axis in pairs]
        rows, columns = axes.count(0), axes.count(1)
        fits = len(axes) == 1 or rows > columns or (rows == columns and axes[0] == 0)
        sizes = {size for _, size in others[width]}
        if width and fits and len(others[width]) == len(set(axes)) and width not in sizes:
            networks[width] = pairs
    return networks


@dataclass(frozen=True, slots=True)
class Placed:
    """What a mask says of one matrix: its axis, where its mask is, and the channels of the whole matrix."""

    axis: int
    offset: int
    blocks: Blocks
    whole: bool


Places = dict[tuple[int, int], Placed]
"""By layer and number of the matrix in it."""


def places_of(layers: Sequence[Masked], meta: Sparsity, where: str) -> Places | None:
    """Return which matrices the masks are for; None where blocks have their full size and it is not clear.

    Then the weights are as stored: a dropped block holds zeros in a matrix of full size.

    Raises
    ------
    FormatError
        ``squizd.sparse-masks``: neither reading fits.
    UnsupportedError
        ``squizd.sparse-ambiguous``: both do. ``squizd.sparse-without-directory``: blocks are compacted, and the widths
        before that cannot be recovered.
    """
    widths = sorted(set.intersection(*(set(item.networks) for item in layers)))
    full = [places for width in widths if (places := _full(layers, width, meta.block)) is not None]
    exact = [places for places in full if _near(_mean(places), meta.mean) or _near(1 - _mean(places), meta.mean)]
    compacted = _compacted(layers, meta.block, meta.mean)
    if compacted is not None and not exact:
        return _recovered(compacted, where)
    if not full:
        raise FormatError(
            "squizd.sparse-masks",
            f"expected masks of one bit per {meta.block} channels of the feed-forward width, found "
            f"{sorted({len(item.data) for item in layers})} bytes beside matrices of {_shapes(layers)}",
            where=where,
        )
    other = compacted if exact else _compacted(layers, meta.block, None)
    if other is not None and not (exact and all(_all_kept(places) for places in exact)):
        raise UnsupportedError(
            "the masks fit blocks of full size and blocks without what is dropped; no directory tells which they are",
            rule="squizd.sparse-ambiguous",
            where=where,
        )
    # A share of one half leaves open which bits mark what is kept.
    sure = len(exact) == 1 and _near(_mean(exact[0]), meta.mean) and not _near(meta.mean, 0.5)
    return exact[0] if sure else None


def _near(value: float, other: float) -> bool:
    return abs(value - other) < _CLOSE


def _shapes(layers: Sequence[Masked]) -> list[list[int]]:
    return [list(shape) for shape in sorted({shape for item in layers for shape in item.shapes})][:6]


def _cut(item: Masked, count: int, size: int) -> Iterator[tuple[int, bytes]] | None:
    """Yield offset and bytes of the mask of each of ``count`` matrices: one for all of the layer, or one each."""
    if len(item.data) == size:
        return iter([(item.offset, item.data)] * count)
    if len(item.data) == size * count:
        return iter([(item.offset + size * at, item.data[size * at : size * (at + 1)]) for at in range(count)])
    return None


def _full(layers: Sequence[Masked], width: int, block: int) -> Places | None:
    places: Places = {}
    for item in layers:
        pairs = item.networks[width]
        masks = _cut(item, len(pairs), mask_bytes(width, block))
        if masks is None:
            return None
        for (number, axis), (offset, data) in zip(pairs, masks, strict=True):
            blocks = Blocks(width, block, data)
            if blocks.spare:
                return None
            places[item.layer, number] = Placed(axis, offset, blocks, whole=True)
    return places


def _mean(places: Places) -> float:
    """Return the mean over layers of the share of blocks whose bit is 0."""
    layers: dict[int, list[float]] = {}
    for (layer, _), placed in places.items():
        layers.setdefault(layer, []).append(1 - _bits(placed.blocks.mask) / placed.blocks.count)
    means = [sum(shares) / len(shares) for shares in layers.values()]
    return sum(means) / len(means)


def _all_kept(places: Places) -> bool:
    return all(placed.blocks.kept == placed.blocks.channels for placed in places.values())


def _bits(mask: bytes) -> int:
    return int.from_bytes(mask, "little").bit_count()


def _compacted(layers: Sequence[Masked], block: int, mean: float | None) -> Places | None:
    """Return the matrices whose size along an axis is what masks keep of as many blocks as ``mean`` tells.

    Without a mean of as many as the masks have bits for.
    """
    places: Places = {}
    for item in layers:
        own = next((own for width in sorted(item.networks) if (own := _kept_of(item, width, block, mean))), None)
        if own is None:
            return None
        places |= own
    return places


def _kept_of(item: Masked, width: int, block: int, mean: float | None) -> Places:
    """Return the places of the matrices of a network of which ``width`` channels are left; none where masks differ."""
    pairs, kept = item.networks[width], block_count(width, block)
    if mean is None:
        totals = [8 * len(item.data), 8 * len(item.data) // len(pairs)]
    else:
        totals = [round(kept / (1 - mean))] if mean < 1 else []
    for total in totals:
        masks = list(_cut(item, len(pairs), mask_bytes(total * block, block)) or ()) if total >= kept else []
        if mean is not None and not _near(1 - kept / total, mean):
            continue
        if masks and all(_bits(data) == kept and not int.from_bytes(data, "little") >> total for _, data in masks):
            channels = total * block - (kept * block - width)
            return {
                (item.layer, number): Placed(axis, offset, Blocks(channels, block, data), whole=False)
                for (number, axis), (offset, data) in zip(pairs, masks, strict=True)
            }
    return {}


def _recovered(places: Places, where: str) -> Places:
    """Return compacted matrices whose last block is kept, which tells their width."""
    for (layer, number), placed in places.items():
        last = placed.blocks.count - 1
        if not placed.blocks.mask[last // 8] >> last % 8 & 1:
            raise UnsupportedError(
                f"expected a directory: matrix {number} of layer {layer} is stored without its dropped blocks, and how "
                "wide the last of them was is not stored",
                rule="squizd.sparse-without-directory",
                where=where,
            )
    return places
