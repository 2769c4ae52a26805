"""Interpret the masks of a file without a directory (SQUIZD document, section 6).

According to the document, masks follow the blocks of a layer. It does not define to which matrices they apply, or which
bit is the first. It does not define which value of a bit marks a kept block, or whether dropped blocks are stored. So
every interpretation is compared with the file. These properties are compared: the bytes of a mask, the bits past its
last block, the sizes in the blocks' headers, and ``mean_sparsity``. In matrices of full size, dropped blocks must
contain zeros.

- Full size: the intermediate width I is a size in the headers; a mask has ceil(I / block_size) bits.
- Compacted: the size in the headers counts the kept blocks, and ``mean_sparsity`` gives the original number of blocks.
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
"""A layer, and the index of a matrix in it."""
Order = Literal["little", "big"]
_CLOSE = 1e-3
_ORDERS: tuple[Order, ...] = ("little", "big")


@dataclass(frozen=True, slots=True)
class LayerMasks:
    """The masks of a layer, in a file without a directory, and the matrices to which they may belong.

    ``networks`` is the result of ``networks_of``. ``data`` are the bytes of all masks of the layer, at ``offset`` in
    the file. ``shapes`` are at most six shapes of the layer's matrices, for error messages.
    """

    layer: int
    networks: Mapping[int, Sequence[tuple[int, int]]]
    offset: int
    data: bytes
    shapes: Sequence[Matrix] = ()


def layer_masks(layer: int, matrices: Mapping[int, Matrix], offset: int, data: bytes) -> LayerMasks:
    """Return the masks of a layer; ``matrices`` maps the index of a two-dimensional block to its rows and columns."""
    return LayerMasks(layer, networks_of(matrices), offset, data, sorted(set(matrices.values()))[:6])


def networks_of(matrices: Mapping[int, Matrix]) -> dict[int, list[tuple[int, int]]]:
    """Return for each possible width of a feed-forward network its matrices, as pairs of index and axis.

    ``matrices`` maps the index of a matrix to its rows and columns. A matrix with the width as its number of rows
    produces the width (axis 0). A matrix with the width as its number of columns consumes it (axis 1).

    A width is possible under three conditions. All producers have the same number of columns, and all consumers the
    same number of rows; neither is the width. There are not fewer producers than consumers, unless there is only one
    matrix. If the numbers are equal, the first matrix is a producer.
    """
    by_width: dict[int, list[tuple[int, int]]] = {}
    axis_sizes: dict[int, set[tuple[int, int]]] = {}
    for index, matrix in matrices.items():
        for axis in (0, 1):
            by_width.setdefault(matrix[axis], []).append((index, axis))
            axis_sizes.setdefault(matrix[axis], set()).add((axis, matrix[1 - axis]))
    networks = {}
    for width, pairs in by_width.items():
        axes = [axis for _, axis in pairs]
        rows = axes.count(0)
        columns = axes.count(1)
        fits = len(axes) == 1 or rows > columns or (rows == columns and axes[0] == 0)
        sizes = {size for _, size in axis_sizes[width]}
        if width and fits and len(axis_sizes[width]) == len(set(axes)) and width not in sizes:
            networks[width] = pairs
    return networks


@dataclass(frozen=True, slots=True)
class PlacedMask:
    """The mask of a matrix: its axis, its blocks, and whether the matrix is stored in full size.

    ``offset`` is the offset of the mask in the file; None if the bits in the file have another order or meaning.
    """

    axis: int
    blocks: Blocks
    is_full_size: bool
    offset: int | None = field(default=None, compare=False)


MasksByMatrix = dict[Key, PlacedMask]
Filled = Callable[[Key, int, int, Array], Array | None]
"""A function that applies ``channels.filled_blocks`` to the matrix with a key.

Its arguments are the key, the axis, the number of channels of a block, and the blocks to examine.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """An interpretation of the masks: an order of bits, and the value of the bit of a kept block.

    ``width`` is the width of the feed-forward network, 0 for compacted matrices. ``spare`` states whether a mask in the
    file has set bits past the last block. ``masks`` are in Ingot's form, with these bits cleared.
    """

    width: int
    order: Order
    kept_bit: int
    spare: bool
    masks: MasksByMatrix

    @property
    def usual(self) -> bool:
        """Whether the masks in the file are in Ingot's form: the first block in the lowest bit, 1 for a kept block."""
        return self.order == "little" and self.kept_bit == 1

    def describe(self) -> str:
        """Return a description of the interpretation, for a note."""
        bit = "lowest" if self.order == "little" else "highest"
        return (
            f"masks have the first block in the {bit} bit and {self.kept_bit} for a kept block, according to the zeros"
        )


def reading_of(layers: Sequence[LayerMasks], meta: Sparsity, location: str, filled: Filled) -> Reading | None:
    """Return the only interpretation of the masks; None if several remain and matrices have full size.

    If the result is None, weights can be read as stored, because all remaining interpretations drop only zeros.

    Raises
    ------
    FormatError
        ``squizd.sparse-masks``: no interpretation fits. ``squizd.sparse-conflict``: every interpretation drops values
        that are not zero.
    UnsupportedError
        ``squizd.sparse-ambiguous``: both full size and compacted interpretations fit, or compacted interpretations in
        both orders of bits. ``squizd.sparse-without-directory``: matrices are compacted, and their original widths are
        not stored.
    """
    compacted = _compacted(layers, meta.block, meta.mean)
    full = _full(layers, meta.block)
    strict = [reading for reading in full if not reading.spare]
    full = strict if strict or compacted else full
    exact = [reading for reading in full if _near(_mean(reading.masks), meta.mean)]
    if compacted and not exact:
        return _require_recoverable(compacted, location)
    if not full:
        raise FormatError(
            "squizd.sparse-masks",
            f"expected masks of one bit per {meta.block} channels of the feed-forward width, found "
            f"{sorted({len(item.data) for item in layers})} bytes for matrices of {_shapes(layers)}",
            where=location,
        )
    compacted_readings = compacted if exact else _compacted(layers, meta.block, None)
    if compacted_readings and not (exact and all(_all_kept(reading.masks) for reading in exact)):
        raise _ambiguous("fit matrices of full size and matrices without the dropped blocks", location)
    remaining, checked = _consistent(exact or full, meta.block, filled)
    if not remaining:
        raise FormatError(
            "squizd.sparse-conflict",
            "expected zeros in the blocks that the masks drop, found other values in whichever order their bits are "
            "read; the masks do not belong to these weights: write the file again",
            where=location,
        )
    same_width = len({reading.width for reading in remaining}) == 1
    is_unique = bool(exact) and same_width and (checked or len(remaining) == 1)
    return remaining[0] if is_unique else None


def _near(value: float, second: float) -> bool:
    return abs(value - second) < _CLOSE


def _shapes(layers: Sequence[LayerMasks]) -> list[list[int]]:
    return [list(shape) for shape in sorted({shape for item in layers for shape in item.shapes})][:6]


def _ambiguous(reason: str, location: str) -> UnsupportedError:
    return UnsupportedError(
        f"the masks {reason}; the file has no directory that resolves this",
        rule="squizd.sparse-ambiguous",
        where=location,
    )


def _consistent(readings: Sequence[Reading], block: int, filled: Filled) -> tuple[list[Reading], bool]:
    """Return the interpretations that drop only zeros, and whether the values of every matrix could be checked."""
    remaining = list(readings)
    checked = True
    for key, axis in dict.fromkeys((key, mask_.axis) for item in readings for key, mask_ in item.masks.items()):
        dropped = [_dropped(reading, key, axis) for reading in remaining]
        masks = [mask for mask in dropped if mask is not None]
        examined = np.logical_or.reduce(masks) if masks else np.zeros(0, np.bool_)
        if not examined.any():
            continue
        values = filled(key, axis, block, examined)
        if values is None:
            checked = False
            continue
        remaining = [
            item for item, mask in zip(remaining, dropped, strict=True) if mask is None or not (mask & values).any()
        ]
    return remaining, checked


def _dropped(reading: Reading, key: Key, axis: int) -> Array | None:
    """Return for each block of a matrix along ``axis`` whether ``reading`` drops it.

    Returns None if ``reading`` has no mask of the matrix for this axis.
    """
    mask = reading.masks.get(key)
    if mask is None or mask.axis != axis:
        return None
    bits = np.unpackbits(np.frombuffer(mask.blocks.mask, np.uint8), count=mask.blocks.count, bitorder="little")
    dropped: Array = bits == 0
    return dropped


def _cut(item: LayerMasks, count: int, size: int) -> Iterator[tuple[int, bytes]] | None:
    """Return the offset and the bytes of the mask of each of ``count`` matrices; None if the sizes do not fit.

    A layer has one mask of ``size`` bytes for all matrices, or one mask for each matrix.
    """
    if len(item.data) == size:
        return iter([(item.offset, item.data)] * count)
    if len(item.data) == size * count:
        return iter(
            [(item.offset + size * index, item.data[size * index : size * (index + 1)]) for index in range(count)]
        )
    return None


def _normalize(data: bytes, count: int, order: Order, kept_bit: int) -> tuple[bytes, bool]:
    """Return a mask of ``count`` blocks in Ingot's form, and whether bits past the last block are set.

    ``order`` and ``kept_bit`` are the order of bits in ``data`` and the value of the bits of kept blocks.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder=order)
    return np.packbits(bits[:count] == kept_bit, bitorder="little").tobytes(), bool(bits[count:].any())


def _full(layers: Sequence[LayerMasks], block: int) -> list[Reading]:
    """Return the distinct interpretations under which all matrices are stored in full size.

    For each width, the interpretation in Ingot's form comes first.
    """
    readings: list[Reading] = []
    for width in sorted(set.intersection(*(set(item.networks) for item in layers))):
        for kept_bit in (1, 0):
            for order in _ORDERS:
                reading = _full_reading(layers, width, block, order, kept_bit)
                if reading is not None and all(reading.masks != earlier.masks for earlier in readings):
                    readings.append(reading)
    return readings


def _full_reading(layers: Sequence[LayerMasks], width: int, block: int, order: Order, kept_bit: int) -> Reading | None:
    by_matrix: MasksByMatrix = {}
    any_spare = False
    for item in layers:
        pairs = item.networks[width]
        masks = _cut(item, len(pairs), mask_bytes(width, block))
        if masks is None:
            return None
        normalized: dict[bytes, tuple[bytes, bool]] = {}
        for (index, axis), (offset, data) in zip(pairs, masks, strict=True):
            if data not in normalized:
                normalized[data] = _normalize(data, block_count(width, block), order, kept_bit)
            mask, spare = normalized[data]
            any_spare |= spare
            blocks = Blocks(width, block, mask)
            own_offset = offset if mask == data else None
            by_matrix[item.layer, index] = PlacedMask(axis, blocks, is_full_size=True, offset=own_offset)
    return Reading(width, order, kept_bit, any_spare, by_matrix)


def _mean(masks: MasksByMatrix) -> float:
    """Return the share of blocks that ``masks`` drop: the mean over matrices, then over layers."""
    layers: dict[int, list[float]] = {}
    for (layer, _), mask in masks.items():
        layers.setdefault(layer, []).append(1 - _bits(mask.blocks.mask) / mask.blocks.count)
    means = [sum(shares) / len(shares) for shares in layers.values()]
    return sum(means) / len(means)


def _all_kept(masks: MasksByMatrix) -> bool:
    return all(mask.blocks.kept_channels == mask.blocks.channels for mask in masks.values())


def _bits(mask: bytes) -> int:
    return int.from_bytes(mask, "little").bit_count()


def _compacted(layers: Sequence[LayerMasks], block: int, mean: float | None) -> list[Reading]:
    """Return the distinct interpretations under which dropped blocks are not stored, at most one for each order of
    bits.

    The stored size of a matrix gives the number of kept blocks. The original number of blocks is computed from
    ``mean``, the share of dropped blocks. If ``mean`` is None, it is the number of bits of a mask.
    """
    readings: list[Reading] = []
    for order in _ORDERS:
        masks: MasksByMatrix = {}
        for item in layers:
            candidates = (_masks_of_network(item, width, block, mean, order) for width in sorted(item.networks))
            masks_of_layer = next(filter(None, candidates), None)
            if masks_of_layer is None:
                break
            masks |= masks_of_layer
        else:
            if all(masks != earlier.masks for earlier in readings):
                readings.append(Reading(0, order, 1, False, masks))
    return readings


def _masks_of_network(item: LayerMasks, width: int, block: int, mean: float | None, order: Order) -> MasksByMatrix:
    """Return the masks of a network's compacted matrices; empty if the masks do not fit.

    ``width`` is the number of channels that are stored.
    """
    pairs = item.networks[width]
    kept_blocks = block_count(width, block)
    if mean is None:
        totals = [8 * len(item.data), 8 * len(item.data) // len(pairs)]
    else:
        totals = [round(kept_blocks / (1 - mean))] if mean < 1 else []
    for total in totals:
        masks = list(_cut(item, len(pairs), mask_bytes(total * block, block)) or ()) if total >= kept_blocks else []
        if mean is not None and not _near(1 - kept_blocks / total, mean):
            continue
        normalized = {data: _normalize(data, total, order, 1) for data in dict.fromkeys(data for _, data in masks)}
        if masks and all(_bits(mask) == kept_blocks and not spare for mask, spare in normalized.values()):
            channels = total * block - (kept_blocks * block - width)
            return {
                (item.layer, index): PlacedMask(
                    axis,
                    Blocks(channels, block, normalized[data][0]),
                    is_full_size=False,
                    offset=offset if normalized[data][0] == data else None,
                )
                for (index, axis), (offset, data) in zip(pairs, masks, strict=True)
            }
    return {}


def _require_recoverable(readings: Sequence[Reading], location: str) -> Reading:
    """Return the only interpretation of compacted matrices.

    Raises ``UnsupportedError`` if there are several, or if a last block is dropped, because the original width is then
    unknown.
    """
    if len(readings) > 1:
        raise _ambiguous("keep other blocks if their bits are read in the other order", location)
    for (layer, index), mask in readings[0].masks.items():
        last = mask.blocks.count - 1
        if not mask.blocks.mask[last // 8] >> last % 8 & 1:
            raise UnsupportedError(
                f"expected a directory: matrix {index} of layer {layer} is stored without its dropped blocks, and the "
                "width of "
                "the last block is not stored",
                rule="squizd.sparse-without-directory",
                where=location,
            )
    return readings[0]
