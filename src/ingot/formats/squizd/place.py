"""Where everything will lie in a ``.squizd`` file: computed from the specs, for the writer and for the file's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import gt

from ingot.core.chunk_digests import StatedChunks
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.squizd.blocks import ASTC, FLAG_OF, INT2, INT4, MOST, TCA, gap_to
from ingot.formats.squizd.carry import Form, forms_of
from ingot.formats.squizd.directory import Entry
from ingot.formats.squizd.layout import MAX_LAYERS, SCALE_ENTRY, TABLE_HEADER, tensor_id
from ingot.model.checkpoint import group_by_layer
from ingot.model.features import Flags
from ingot.model.layouts.ids import file_id
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.spec import TensorSpec

# Blocks that may stand in one file beside NPCL (section 5: one primary encoding; INT2's hybrid may hold INT4).
_PRIMARY = ({ASTC}, {TCA}, {INT4}, {INT2, INT4})


def layers_of(names: Sequence[str]) -> tuple[list[int], int]:
    """Return the layer that each tensor is stored with, and the number of layers.

    Tensors before the layers go with the first, those after them with the last; without layers, or with numbers past
    65,534, all go with one.
    """
    ranked, count = _ranked(names)
    return [place // 3 for place in ranked], count


def _ranked(names: Sequence[str]) -> tuple[list[int], int]:
    """Return three times each tensor's layer, and more for one behind others of its layer; the number of layers."""
    before, layers, after = group_by_layer(names)
    count = 1 + max(layers, default=0)
    if count > MAX_LAYERS:
        layers, count = {0: [name for members in layers.values() for name in members]}, 1
    places = {name: 3 * layer + 1 for layer, members in layers.items() for name in members}
    places.update(dict.fromkeys(before, 0))
    places.update(dict.fromkeys(after, 3 * count - 1))
    return [places[name] for name in names], count


def order(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the order in the file: by layer; what comes before the layers first, what comes after them last.

    Raises
    ------
    UnsupportedError
        ``squizd.mixed-encodings``, ``squizd.mixed-blocks``.
    """
    _check_together(specs)
    ranked, _ = _ranked([spec.name for spec in specs])
    return sorted(range(len(ranked)), key=ranked.__getitem__)


def in_order(specs: Sequence[TensorSpec], name: str) -> tuple[list[int], int]:
    """Return what ``layers_of`` gives of tensors that come in the format's order; errors as of ``order``.

    Raises ``UsageError`` ``writer.order`` where they do not.
    """
    _check_together(specs)
    ranked, count = _ranked([spec.name for spec in specs])
    if any(map(gt, ranked, ranked[1:])):
        raise UsageError("expected the tensors in the format's order", rule="writer.order", where=name)
    return [place // 3 for place in ranked], count


def _check_together(specs: Sequence[TensorSpec]) -> None:
    magics = {form.block.magic for form in forms_of(specs)} & FLAG_OF.keys()
    if magics and not any(magics <= allowed for allowed in _PRIMARY):
        kinds = " and ".join(sorted(magic.decode() for magic in magics))
        raise UnsupportedError(
            f"a .squizd file has one primary encoding (INT2 may hold INT4), found {kinds}; use one of them, or .zt",
            rule="squizd.mixed-encodings",
        )
    blocks = {BlocksLayout.of(spec).block for spec in specs if spec.codec == BlocksLayout.codec}
    if len(blocks) > 1:
        raise UnsupportedError(
            f"a .squizd file has one size of pruned blocks, found {sorted(map(str, blocks))}",
            rule="squizd.mixed-blocks",
        )


def flags_of(specs: Sequence[TensorSpec]) -> Flags:
    """Return the flags that the tensors call for. INT4 blocks of an INT2 file need none of their own."""
    flags = Flags(0)
    for magic in {form.block.magic for form in forms_of(specs)}:
        flags |= FLAG_OF.get(magic, Flags(0))
    if any(spec.codec == BlocksLayout.codec for spec in specs):
        flags |= Flags.SPARSE
    return flags & ~Flags.INT4 if flags & Flags.INT2 else flags


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor: its layer, how it lies in the file, and, where it has scales, its id and entries of the tables.

    ``first`` is an index into the first round, ``table`` and ``second`` a table of the second round and an index in it.
    """

    spec: TensorSpec
    form: Form
    layer: int
    id: int = 0
    first: int = 0
    table: int = 0
    second: int = 0


@dataclass(frozen=True, slots=True)
class Tables:
    """The scale tables: entries of the first round, entries of each table of the second."""

    first: int = 0
    second: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries of every table in file order; none where nothing is quantized."""
        return (self.first, *self.second) if self.first else ()

    @property
    def size(self) -> int:
        """Bytes of all tables."""
        return sum(TABLE_HEADER + count * SCALE_ENTRY for count in self.counts)

    def first_at(self, start: int, placed: Placed) -> int:
        """Return where the tensor's first-round entry lies, the tables beginning at ``start``."""
        return start + TABLE_HEADER + placed.first * SCALE_ENTRY

    def second_at(self, start: int, placed: Placed) -> int:
        """Return where the tensor's second-round entries begin."""
        before = sum(TABLE_HEADER + count * SCALE_ENTRY for count in self.counts[: 1 + placed.table])
        return start + before + TABLE_HEADER + placed.second * SCALE_ENTRY


@dataclass(frozen=True, slots=True)
class Placement:
    """Tensors in file order with their layers and scale entries; where blocks begin follows from a ``Cursor``."""

    tensors: Sequence[Placed]
    layer_count: int
    tables: Tables = field(default_factory=Tables)


def place(specs: Sequence[TensorSpec], layers: Sequence[int], layer_count: int) -> Placement:
    """Give every tensor its layer, id and scale entries; ``UnsupportedError`` ``squizd.id-collision``."""
    placed: list[Placed] = []
    first, second = 0, [0]
    ids: dict[int, str] = {}
    for spec, form, layer in zip(specs, forms_of(specs), layers, strict=True):
        more = form.second or 0
        if second[-1] + more > MOST:
            second.append(0)
        if form.first:
            id = tensor_id(layer, spec.name)
            if ids.setdefault(id, spec.name) != spec.name:
                raise UnsupportedError(
                    f"{spec.name!r} and {ids[id]!r} have one tensor id; rename one", rule="squizd.id-collision"
                )
            placed.append(Placed(spec, form, layer, id, first, len(second) - 1, second[-1]))
        else:
            placed.append(Placed(spec, form, layer))
        first += form.first
        second[-1] += more
    return Placement(placed, layer_count, Tables(first, tuple(count for count in second if count)))


class Cursor:
    """Runs through the weight blocks in file order and knows where the next one goes.

    Before a layer lie at most 63 zero bytes, so that its first payload begins at a multiple of 64. Its blocks follow
    each other without a gap, since others read them so, and its masks the last block: one per pruned tensor, in order.
    """

    def __init__(self, start: int, layer_count: int) -> None:
        self.tail = start
        self.layer = 0
        self.closed = 0
        self.spans = [(0, 0)] * layer_count
        self.mask_starts: list[int | None] = [None] * layer_count
        self._mask_bytes = [0] * layer_count
        self._begun: int | None = None

    def block(self, layer: int, lead: int) -> tuple[int, int]:
        """Return where the zero bytes before the next block begin and where its magic goes; closes earlier layers."""
        self.enter(layer)
        gap = self.tail
        if self._begun is None:
            self.tail = self._begun = gap + gap_to(gap, lead)
        return gap, self.tail

    def enter(self, layer: int) -> None:
        """Close all layers before ``layer``."""
        while self.layer < layer:
            self._close()
            self.layer += 1

    def mask(self, nbytes: int) -> int:
        """Note a mask of the present layer; return where it will lie behind the layer's first mask."""
        offset = self._mask_bytes[self.layer]
        self._mask_bytes[self.layer] += nbytes
        return offset

    def finish(self) -> int:
        """Close every layer; return the end of the last one."""
        self.enter(len(self.spans) - 1)
        self._close()
        return self.tail

    def _close(self) -> None:
        begun = self.tail if self._begun is None else self._begun
        if self._mask_bytes[self.layer]:
            self.mask_starts[self.layer] = self.tail
            self.tail += self._mask_bytes[self.layer]
        self.spans[self.layer] = (begun, self.tail)
        self._begun = None
        self.closed += 1


def lay_out(placement: Placement, start: int) -> tuple[list[int], Cursor]:
    """Return where each tensor's block begins, and the cursor behind the last layer.

    Lengths that only the bytes tell count as the most that they can be.
    """
    cursor, offsets = Cursor(start, placement.layer_count), []
    for placed in placement.tensors:
        form = placed.form
        offsets.append(cursor.block(placed.layer, form.block.lead)[1])
        length = form.block.length
        cursor.tail += most_bytes(placed) if length is None else length
        if form.mask_bytes is not None:
            cursor.mask(form.mask_bytes)
    cursor.finish()
    return offsets, cursor


def most_bytes(placed: Placed) -> int:
    """Return the most bytes that the block of a tensor can take whose length only its bytes tell."""
    block = placed.form.block
    known = max(piece.start or 0 for piece in block.pieces)
    unknown = [placed.spec.part(piece.role).at_most for piece in block.pieces if piece.length is None]
    return known + sum(size + 63 for size in unknown)


def entry_of(
    placed: Placed,
    offset: int,
    tables: Tables,
    tables_start: int,
    digests: dict[str, str],
    chunks: dict[str, StatedChunks],
) -> Entry:
    """Return the directory's entry for a tensor, without its mask: the mask is added later."""
    spec, form = placed.spec, placed.form
    return Entry(
        shape=spec.shape,
        dtype=spec.dtype,
        codec=file_id(spec.codec),
        layer=placed.layer,
        offset=offset,
        params=dict(spec.params),
        scales=form.scale_dtype,
        zeros=any(part.role == "zeros" for part in spec.parts),
        first=(tables.first_at(tables_start, placed), form.first) if form.first else None,
        second=None if form.second is None else (tables.second_at(tables_start, placed), form.second),
        digests=digests,
        chunks=chunks,
    )
