"""Masks of a file without a directory (SQUIZD document, section 6): which matrices, bits and blocks they are for.

The document says that masks follow a layer's blocks. It does not say which matrices they are for, which bit is the
first, which value of a bit marks a kept block, or that anything is left out of a block. So every reading is held
against the file: the number of a mask's bytes and the bits past its last block, the sizes in the blocks' headers,
``mean_sparsity``, and the zeros that blocks of full size hold where a mask drops them.

- Full size: the intermediate width I is a size in the headers; a mask has ceil(I / block_size) bits.
- Compacted: the kept blocks are a size in the headers, and ``mean_sparsity`` tells how many blocks there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ingot.core.numeric.blocks import Blocks, block_count, mask_bytes
from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squizd.layout import Sparsity
from ingot.ext.squizd.scales import Array

Matrix = tuple[int, int]
Key = tuple[int, int]
"""A layer, and the number of a matrix in it."""
Order = Literal["little", "big"]
_CLOSE = 1e-3
_ORDERS: tuple[Order, ...] = ("little", "big")


@dataclass(frozen=True, slots=True)
class LayerMasks:
    """A layer with masks.

    ``networks`` are the matrices that a feed-forward network of a width would have: number and axis by width, see
    ``networks_of``. ``shapes`` are examples of the layer's matrices, ``data`` the bytes of the masks at ``offset``.
    """

    layer: int
    networks: Mapping[int, Sequence[tuple[int, int]]]
    offset: int
    data: bytes
    shapes: Sequence[Matrix] = ()


def layer_masks(layer: int, matrices: Mapping[int, Matrix], offset: int, data: bytes) -> LayerMasks:
    """Return a layer with masks; ``matrices`` are rows and columns of its blocks that have two dimensions."""
    return LayerMasks(layer, networks_of(matrices), offset, data, sorted(set(matrices.values()))[:6])


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
    """The mask of one matrix: its axis, its blocks, and whether the matrix is stored in full size.

    ``offset`` is where the mask lies in the file; None if the file has it in another order of bits.
    """

    axis: int
    blocks: Blocks
    whole: bool
    offset: int | None = field(default=None, compare=False)


Places = dict[Key, Placed]
Filled = Callable[[Key, int, int, Array], Array | None]
"""``channels.filled_blocks`` of a matrix: by key, axis, channels of a block, and the blocks to look into."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The masks as one order of bits, and one value of the bits of kept blocks, gives them.

    ``spare`` tells whether bits past the last block are set. ``places`` have them cleared, and masks as Ingot has them.
    """

    width: int
    order: Order
    kept_bit: int
    spare: bool
    places: Places

    @property
    def usual(self) -> bool:
        """Whether the file has the masks as Ingot writes them: the first block in the lowest bit, 1 for a kept one."""
        return self.order == "little" and self.kept_bit == 1

    def describe(self) -> str:
        """Return how the masks are read, for a note."""
        bit = "lowest" if self.order == "little" else "highest"
        return f"masks have the first block in the {bit} bit and {self.kept_bit} for a kept one, as the zeros show"


def reading_of(layers: Sequence[LayerMasks], meta: Sparsity, where: str, filled: Filled) -> Reading | None:
    """Return how the masks are read; None where blocks have their full size and several readings are left.

    Weights are as stored then: in full size, no reading that is left drops anything but zeros.

    Raises
    ------
    FormatError
        ``squizd.sparse-masks``: no reading fits. ``squizd.sparse-conflict``: each drops values that are not zero.
    UnsupportedError
        ``squizd.sparse-ambiguous``: readings of full size and compacted ones fit, or compacted ones in both orders of
        bits. ``squizd.sparse-without-directory``: blocks are compacted, and the widths before that are lost.
    """
    compacted = _compacted(layers, meta.block, meta.mean)
    full = _full(layers, meta.block)
    strict = [reading for reading in full if not reading.spare]
    full = strict if strict or compacted else full
    exact = [reading for reading in full if _near(_mean(reading.places), meta.mean)]
    if compacted and not exact:
        return _recovered(compacted, where)
    if not full:
        raise FormatError(
            "squizd.sparse-masks",
            f"expected masks of one bit per {meta.block} channels of the feed-forward width, found "
            f"{sorted({len(item.data) for item in layers})} bytes beside matrices of {_shapes(layers)}",
            where=where,
        )
    other = compacted if exact else _compacted(layers, meta.block, None)
    if other and not (exact and all(_all_kept(reading.places) for reading in exact)):
        raise _ambiguous("fit blocks of full size and blocks without what is dropped", where)
    left, checked = _consistent(exact or full, meta.block, filled)
    if not left:
        raise FormatError(
            "squizd.sparse-conflict",
            "expected zeros in the blocks that the masks drop, found other values in whichever order their bits are "
            "read; the masks are not those of these weights: write the file again",
            where=where,
        )
    same_width = len({reading.width for reading in left}) == 1
    sure = bool(exact) and same_width and (checked or len(left) == 1)
    return left[0] if sure else None


def _near(value: float, other: float) -> bool:
    return abs(value - other) < _CLOSE


def _shapes(layers: Sequence[LayerMasks]) -> list[list[int]]:
    return [list(shape) for shape in sorted({shape for item in layers for shape in item.shapes})][:6]


def _ambiguous(found: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"the masks {found}; no directory tells which they are", rule="squizd.sparse-ambiguous", where=where
    )


def _consistent(readings: Sequence[Reading], block: int, filled: Filled) -> tuple[list[Reading], bool]:
    """Return the readings that drop nothing but zeros, and whether every matrix could be checked."""
    left, checked = list(readings), True
    for key, axis in dict.fromkeys((key, placed.axis) for item in readings for key, placed in item.places.items()):
        dropped = [_dropped(reading, key, axis) for reading in left]
        masks = [mask for mask in dropped if mask is not None]
        wanted = np.logical_or.reduce(masks) if masks else np.zeros(0, np.bool_)
        if not wanted.any():
            continue
        values = filled(key, axis, block, wanted)
        if values is None:
            checked = False
            continue
        left = [item for item, mask in zip(left, dropped, strict=True) if mask is None or not (mask & values).any()]
    return left, checked


def _dropped(reading: Reading, key: Key, axis: int) -> Array | None:
    """Return which blocks of a matrix a reading drops; None if it has no mask along this axis."""
    placed = reading.places.get(key)
    if placed is None or placed.axis != axis:
        return None
    bits = np.unpackbits(np.frombuffer(placed.blocks.mask, np.uint8), count=placed.blocks.count, bitorder="little")
    dropped: Array = bits == 0
    return dropped


def _cut(item: LayerMasks, count: int, size: int) -> Iterator[tuple[int, bytes]] | None:
    """Yield offset and bytes of the mask of each of ``count`` matrices: one for all of the layer, or one each."""
    if len(item.data) == size:
        return iter([(item.offset, item.data)] * count)
    if len(item.data) == size * count:
        return iter([(item.offset + size * at, item.data[size * at : size * (at + 1)]) for at in range(count)])
    return None


def _normalized(data: bytes, count: int, order: Order, kept_bit: int) -> tuple[bytes, bool]:
    """Return a mask of ``count`` blocks as Ingot has it, and whether bits past the last block are set."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder=order)
    return np.packbits(bits[:count] == kept_bit, bitorder="little").tobytes(), bool(bits[count:].any())


def _full(layers: Sequence[LayerMasks], block: int) -> list[Reading]:
    """Return the different readings of blocks of full size: as Ingot writes them first."""
    readings: list[Reading] = []
    for width in sorted(set.intersection(*(set(item.networks) for item in layers))):
        for kept_bit in (1, 0):
            for order in _ORDERS:
                reading = _full_reading(layers, width, block, order, kept_bit)
                if reading is not None and all(reading.places != other.places for other in readings):
                    readings.append(reading)
    return readings


def _full_reading(layers: Sequence[LayerMasks], width: int, block: int, order: Order, kept_bit: int) -> Reading | None:
    places: Places = {}
    any_spare = False
    for item in layers:
        pairs = item.networks[width]
        masks = _cut(item, len(pairs), mask_bytes(width, block))
        if masks is None:
            return None
        seen: dict[bytes, tuple[bytes, bool]] = {}
        for (number, axis), (offset, data) in zip(pairs, masks, strict=True):
            if data not in seen:
                seen[data] = _normalized(data, block_count(width, block), order, kept_bit)
            mask, spare = seen[data]
            any_spare |= spare
            blocks = Blocks(width, block, mask)
            places[item.layer, number] = Placed(axis, blocks, whole=True, offset=offset if mask == data else None)
    return Reading(width, order, kept_bit, any_spare, places)


def _mean(places: Places) -> float:
    """Return the mean over layers of the share of dropped blocks."""
    layers: dict[int, list[float]] = {}
    for (layer, _), placed in places.items():
        layers.setdefault(layer, []).append(1 - _bits(placed.blocks.mask) / placed.blocks.count)
    means = [sum(shares) / len(shares) for shares in layers.values()]
    return sum(means) / len(means)


def _all_kept(places: Places) -> bool:
    return all(placed.blocks.kept == placed.blocks.channels for placed in places.values())


def _bits(mask: bytes) -> int:
    return int.from_bytes(mask, "little").bit_count()


def _compacted(layers: Sequence[LayerMasks], block: int, mean: float | None) -> list[Reading]:
    """Return the readings of compacted blocks, one for each order of bits that gives other blocks.

    A matrix has the size that masks keep of as many blocks as ``mean`` tells; without a mean, of as many as the masks
    have bits for.
    """
    readings: list[Reading] = []
    for order in _ORDERS:
        places: Places = {}
        for item in layers:
            kept = (_kept_of(item, width, block, mean, order) for width in sorted(item.networks))
            found = next(filter(None, kept), None)
            if found is None:
                break
            places |= found
        else:
            if all(places != other.places for other in readings):
                readings.append(Reading(0, order, 1, False, places))
    return readings


def _kept_of(item: LayerMasks, width: int, block: int, mean: float | None, order: Order) -> Places:
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
        normalized = {data: _normalized(data, total, order, 1) for data in dict.fromkeys(data for _, data in masks)}
        if masks and all(_bits(mask) == kept and not spare for mask, spare in normalized.values()):
            channels = total * block - (kept * block - width)
            return {
                (item.layer, number): Placed(
                    axis,
                    Blocks(channels, block, normalized[data][0]),
                    whole=False,
                    offset=offset if normalized[data][0] == data else None,
                )
                for (number, axis), (offset, data) in zip(pairs, masks, strict=True)
            }
    return {}


def _recovered(readings: Sequence[Reading], where: str) -> Reading:
    """Return the one reading of compacted matrices, if their last block is kept, which tells their width."""
    if len(readings) > 1:
        raise _ambiguous("keep other blocks where their bits are read in the other order", where)
    for (layer, number), placed in readings[0].places.items():
        last = placed.blocks.count - 1
        if not placed.blocks.mask[last // 8] >> last % 8 & 1:
            raise UnsupportedError(
                f"expected a directory: matrix {number} of layer {layer} is stored without its dropped blocks, and how "
                "wide the last of them was is not stored",
                rule="squizd.sparse-without-directory",
                where=where,
            )
    return readings[0]
