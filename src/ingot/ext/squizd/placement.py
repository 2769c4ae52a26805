"""The placement of all data in a ``.squizd`` file, computed from the specs, for the writer and for the file's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import gt

from ingot.core.bytes.chunk_digests import DeclaredChunks
from ingot.errors import UnsupportedError, UsageError
from ingot.ext.squizd.blocks import ASTC, FLAG_OF, INT2, INT4, MAX_U32, TCA, gap_to
from ingot.ext.squizd.carry import StorageForm, storage_forms
from ingot.ext.squizd.directory import Entry
from ingot.ext.squizd.layout import MAX_LAYERS, SCALE_ENTRY, TABLE_HEADER, tensor_id
from ingot.model.checkpoint import group_by_layer
from ingot.model.layouts.base import file_id
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.spec import TensorSpec
from ingot.model.stacks import Flags

# Blocks that one file may contain in addition to NPCL (section 5: one primary encoding; the hybrid of INT2 and INT4).
_PRIMARY = ({ASTC}, {TCA}, {INT4}, {INT2, INT4})


def layers_of(names: Sequence[str]) -> tuple[list[int], int]:
    """Return the layer that each tensor is stored with, and the number of layers.

    Tensors before the layers are stored with the first layer, tensors after them with the last layer. If there are no
    layers, or an index exceeds 65,534, all tensors are stored with one layer.
    """
    ranked, count = _ranked(names)
    return [rank // 3 for rank in ranked], count


def _ranked(names: Sequence[str]) -> tuple[list[int], int]:
    """Return a rank for each tensor, by which tensors are sorted, and the number of layers.

    A rank is three times the layer, plus 0 for tensors before the layers, 1 for tensors of the layer, and 2 for tensors
    after the layers.
    """
    before, layers, after = group_by_layer(names)
    count = 1 + max(layers, default=0)
    if count > MAX_LAYERS:
        layers = {0: [name for members in layers.values() for name in members]}
        count = 1
    rank_by_name = {name: 3 * layer + 1 for layer, members in layers.items() for name in members}
    rank_by_name.update(dict.fromkeys(before, 0))
    rank_by_name.update(dict.fromkeys(after, 3 * count - 1))
    return [rank_by_name[name] for name in names], count


def order(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the order in the file: tensors before the layers, then by layer, then tensors after the layers.

    Raises
    ------
    UnsupportedError
        ``squizd.mixed-encodings``, ``squizd.mixed-blocks``.
    """
    _check_together(specs)
    ranked, _ = _ranked([spec.name for spec in specs])
    return sorted(range(len(ranked)), key=ranked.__getitem__)


def layers_in_order(specs: Sequence[TensorSpec], name: str) -> tuple[list[int], int]:
    """Return the result of ``layers_of`` for tensors that are in the format's order; raises the errors of ``order``.

    Raises ``UsageError`` ``writer.order`` if the tensors are in another order.
    """
    _check_together(specs)
    ranked, count = _ranked([spec.name for spec in specs])
    if any(map(gt, ranked, ranked[1:])):
        raise UsageError("expected the tensors in the format's order", rule="writer.order", where=name)
    return [rank // 3 for rank in ranked], count


def _check_together(specs: Sequence[TensorSpec]) -> None:
    magics = {storage.block.magic for storage in storage_forms(specs)} & FLAG_OF.keys()
    if magics and not any(magics <= allowed for allowed in _PRIMARY):
        encodings = " and ".join(sorted(magic.decode() for magic in magics))
        raise UnsupportedError(
            f"expected one primary encoding (INT2 may include INT4), found {encodings}; use one of them, or .zt",
            rule="squizd.mixed-encodings",
        )
    blocks = {BlocksLayout.from_tensor(spec).block for spec in specs if spec.codec == BlocksLayout.codec}
    if len(blocks) > 1:
        raise UnsupportedError(
            f"expected one size of pruned blocks, found {sorted(map(str, blocks))}",
            rule="squizd.mixed-blocks",
        )


def flags_of(specs: Sequence[TensorSpec]) -> Flags:
    """Return the header's feature flags for the tensors; INT4 blocks of an INT2 file need no flag."""
    flags = Flags(0)
    for magic in {storage.block.magic for storage in storage_forms(specs)}:
        flags |= FLAG_OF.get(magic, Flags(0))
    if any(spec.codec == BlocksLayout.codec for spec in specs):
        flags |= Flags.SPARSE
    return flags & ~Flags.INT4 if flags & Flags.INT2 else flags


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor with its layer and storage; if it has scales, also with its id and the indices of its scale entries.

    ``first`` is the index of its entry in the first round. ``table`` is the index of a table of the second round, and
    ``second`` the index of its first entry in that table.
    """

    spec: TensorSpec
    storage: StorageForm
    layer: int
    id: int = 0
    first: int = 0
    table: int = 0
    second: int = 0


@dataclass(frozen=True, slots=True)
class Tables:
    """The sizes of the scale tables: entries of the first round, and of each table of the second round."""

    first: int = 0
    second: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of entries of every table in file order; empty if nothing is quantized."""
        return (self.first, *self.second) if self.first else ()

    @property
    def size(self) -> int:
        """The number of bytes of all tables."""
        return sum(TABLE_HEADER + count * SCALE_ENTRY for count in self.counts)

    def first_at(self, start: int, placed: PlacedTensor) -> int:
        """Return the offset of the tensor's first-round entry if the tables begin at ``start``."""
        return start + TABLE_HEADER + placed.first * SCALE_ENTRY

    def second_at(self, start: int, placed: PlacedTensor) -> int:
        """Return the offset of the tensor's second-round scale entries; ``start`` is the offset of the tables."""
        before = sum(TABLE_HEADER + count * SCALE_ENTRY for count in self.counts[: 1 + placed.table])
        return start + before + TABLE_HEADER + placed.second * SCALE_ENTRY


@dataclass(frozen=True, slots=True)
class Placement:
    """The tensors in file order, each with its layer and its scale entries.

    A ``Cursor`` computes the offsets of their blocks.
    """

    tensors: Sequence[PlacedTensor]
    layer_count: int
    tables: Tables = field(default_factory=Tables)


def place_tensors(specs: Sequence[TensorSpec], layers: Sequence[int], layer_count: int) -> Placement:
    """Return the placement with the layer, id and scale entries of every tensor.

    Raises ``UnsupportedError`` ``squizd.id-collision``.
    """
    placed: list[PlacedTensor] = []
    first = 0
    second = [0]
    ids: dict[int, str] = {}
    for spec, storage, layer in zip(specs, storage_forms(specs), layers, strict=True):
        second_count = storage.second or 0
        if second[-1] + second_count > MAX_U32:
            second.append(0)
        if storage.first:
            id = tensor_id(layer, spec.name)
            if ids.setdefault(id, spec.name) != spec.name:
                raise UnsupportedError(
                    f"{spec.name!r} and {ids[id]!r} have one tensor id; rename one", rule="squizd.id-collision"
                )
            placed.append(PlacedTensor(spec, storage, layer, id, first, len(second) - 1, second[-1]))
        else:
            placed.append(PlacedTensor(spec, storage, layer))
        first += storage.first
        second[-1] += second_count
    return Placement(placed, layer_count, Tables(first, tuple(count for count in second if count)))


class Cursor:
    """A cursor through the weight blocks in file order, which computes the offset of the next block.

    At most 63 zero bytes precede a layer, so that its first payload begins at a multiple of 64. Its blocks follow each
    other without a gap, because other programs expect that. Its masks follow the last block: one per pruned tensor, in
    order.
    """

    def __init__(self, start: int, layer_count: int) -> None:
        self.tail = start
        self.layer = 0
        self.closed = 0
        self.spans = [(0, 0)] * layer_count
        self.mask_starts: list[int | None] = [None] * layer_count
        self._mask_bytes = [0] * layer_count
        self._layer_start: int | None = None

    def block(self, layer: int, lead: int) -> tuple[int, int]:
        """Return the offset of the zero bytes before the next block, which is in ``layer``, and the offset of its
        magic.

        Closes all earlier layers. ``lead`` is the number of bytes of the block's header.
        """
        self.enter(layer)
        gap = self.tail
        if self._layer_start is None:
            self.tail = self._layer_start = gap + gap_to(gap, lead)
        return gap, self.tail

    def enter(self, layer: int) -> None:
        """Close all layers before ``layer``."""
        while self.layer < layer:
            self._close()
            self.layer += 1

    def mask(self, nbytes: int) -> int:
        """Add a mask to the current layer; return its offset relative to the layer's first mask."""
        offset = self._mask_bytes[self.layer]
        self._mask_bytes[self.layer] += nbytes
        return offset

    def finish(self) -> int:
        """Close every layer; return the end of the last layer."""
        self.enter(len(self.spans) - 1)
        self._close()
        return self.tail

    def _close(self) -> None:
        layer_start = self.tail if self._layer_start is None else self._layer_start
        if self._mask_bytes[self.layer]:
            self.mask_starts[self.layer] = self.tail
            self.tail += self._mask_bytes[self.layer]
        self.spans[self.layer] = (layer_start, self.tail)
        self._layer_start = None
        self.closed += 1


def lay_out(placement: Placement, start: int) -> tuple[list[int], Cursor]:
    """Return the offset of each tensor's block, and the cursor after the last layer.

    Unknown lengths count as their maximum.
    """
    cursor = Cursor(start, placement.layer_count)
    offsets = []
    for placed in placement.tensors:
        storage = placed.storage
        offsets.append(cursor.block(placed.layer, storage.block.lead)[1])
        length = storage.block.length
        cursor.tail += max_block_bytes(placed) if length is None else length
        if storage.mask_bytes is not None:
            cursor.mask(storage.mask_bytes)
    cursor.finish()
    return offsets, cursor


def max_block_bytes(placed: PlacedTensor) -> int:
    """Return the maximum number of bytes of a tensor's block whose length depends on its values."""
    block = placed.storage.block
    known_bytes = max(part.start or 0 for part in block.parts)
    unknown = [placed.spec.part(part.role).at_most for part in block.parts if part.length is None]
    return known_bytes + sum(size + 63 for size in unknown)


def entry_of(
    placed: PlacedTensor,
    offset: int,
    tables: Tables,
    tables_start: int,
    digests: dict[str, str],
    chunks: dict[str, DeclaredChunks],
) -> Entry:
    """Return the directory's entry for a tensor without its mask, which is added later."""
    spec = placed.spec
    storage = placed.storage
    return Entry(
        shape=spec.shape,
        dtype=spec.dtype,
        codec=file_id(spec.codec),
        layer=placed.layer,
        offset=offset,
        params=dict(spec.params),
        scales=storage.scale_dtype,
        zeros=any(part.role == "zeros" for part in spec.parts),
        first=(tables.first_at(tables_start, placed), storage.first) if storage.first else None,
        second=None if storage.second is None else (tables.second_at(tables_start, placed), storage.second),
        digests=digests,
        chunks=chunks,
    )
