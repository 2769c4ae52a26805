"""Where everything will lie in a ``.squizd`` file: computed from the specs, for the writer and for the file's size."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import gt

from ingot.errors import UnsupportedError, UsageError
from ingot.formats.squizd.blocks import ASTC, FLAG_OF, INT2, INT4, MOST, TCA, gap_to
from ingot.formats.squizd.carry import Form, forms_of
from ingot.formats.squizd.layout import MAX_LAYERS, SCALE_ENTRY, TABLE_HEADER, tensor_id
from ingot.model.checkpoint import group_by_layer
from ingot.model.features import Flags
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.spec import ManySpecs, TensorSpec, kinds_of, names_of

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
    ranked, _ = _ranked(names_of(specs))
    return sorted(range(len(ranked)), key=ranked.__getitem__)


def in_order(specs: Sequence[TensorSpec], name: str) -> tuple[list[int], int]:
    """Return what ``layers_of`` gives of tensors that come in the format's order; errors as of ``order``.

    Raises ``UsageError`` ``writer.order`` where they do not.
    """
    _check_together(specs)
    ranked, count = _ranked(names_of(specs))
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
    firsts, _ = kinds_of(specs)
    blocks = {BlocksLayout.of(spec).block for spec in firsts.values() if spec.codec == BlocksLayout.codec}
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
    if any(spec.codec == BlocksLayout.codec for spec in kinds_of(specs)[0].values()):
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


class PlacedTensors:
    """Tensors in file order, each made when it is asked for: there may be very many that are alike."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self._forms: list[Form] = []
        self._form, self.layers = array("I"), array("I")
        self._scaled: dict[int, tuple[int, int, int, int]] = {}

    def add(self, form: Form, layer: int, scaled: tuple[int, int, int, int] | None) -> None:
        """Place the next tensor; ``scaled`` are id and entries of one that has scales."""
        if scaled is not None:
            self._scaled[len(self)] = scaled
        if not self._forms or self._forms[-1] is not form:
            self._forms.append(form)
        self._form.append(len(self._forms) - 1)
        self.layers.append(layer)

    def __len__(self) -> int:
        return len(self._form)

    def __getitem__(self, at: int) -> Placed:
        form, layer = self._forms[self._form[at]], self.layers[at]
        return Placed(self.specs[at], form, layer, *self._scaled.get(at, ()))

    def __iter__(self) -> Iterator[Placed]:
        return map(self.__getitem__, range(len(self)))

    def form(self, at: int) -> Form:
        """Return how one lies in the file."""
        return self._forms[self._form[at]]

    def like(self, at: int) -> TensorSpec:
        """Return the spec of one, or of another that differs in its name alone."""
        specs = self.specs
        return specs.of_kind(specs.numbers[at]) if isinstance(specs, ManySpecs) else specs[at]

    def forms(self) -> Iterator[Form]:
        """Yield how each tensor lies in the file."""
        return map(self._forms.__getitem__, self._form)


@dataclass(frozen=True, slots=True)
class Placement:
    """Tensors in file order with their layers and scale entries; where blocks begin follows from a ``Cursor``."""

    tensors: PlacedTensors
    layer_count: int
    tables: Tables = field(default_factory=Tables)


def place(specs: Sequence[TensorSpec], layers: Sequence[int], layer_count: int) -> Placement:
    """Give every tensor its layer, id and scale entries; ``UnsupportedError`` ``squizd.id-collision``."""
    placed = PlacedTensors(specs)
    first, second = 0, [0]
    ids: dict[int, str] = {}
    for name, form, layer in zip(names_of(specs), forms_of(specs), layers, strict=True):
        more = form.second or 0
        if second[-1] + more > MOST:
            second.append(0)
        scaled = None
        if form.first:
            id = tensor_id(layer, name)
            if ids.setdefault(id, name) != name:
                raise UnsupportedError(
                    f"{name!r} and {ids[id]!r} have one tensor id; rename one", rule="squizd.id-collision"
                )
            scaled = id, first, len(second) - 1, second[-1]
        placed.add(form, layer, scaled)
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
    cursor, offsets, tensors = Cursor(start, placement.layer_count), [], placement.tensors
    for at, (form, layer) in enumerate(zip(tensors.forms(), tensors.layers, strict=True)):
        offsets.append(cursor.block(layer, form.block.lead)[1])
        length = form.block.length
        cursor.tail += most_bytes(tensors[at]) if length is None else length
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
