"""Find the blocks of a file without a directory, as the SQUIZD document defines it, and name their tensors.

The name of block j of layer i is ``layers.{i}.{j}``. But if the id of its scale entry is the ``tensor_id`` of a common
tensor name, it gets that name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squizd.blocks import (
    ASTC,
    INT2,
    INT4,
    INTEGER_BITS,
    MAGICS,
    TCA,
    TCA_DTYPE,
    TCA_WORD,
    Block,
    bitmap,
    bitmap_rows,
    is_sound,
    parse,
)
from ingot.ext.squizd.carry import SCALE_ROLES, storage_form
from ingot.ext.squizd.entries import assign_entries, base_id, rounds_of
from ingot.ext.squizd.layout import tensor_id
from ingot.ext.squizd.masks import PlacedMask
from ingot.ext.squizd.scales import Run, TableRanges, read_entries
from ingot.ext.squizd.section_reader import Span, skip_zeros
from ingot.ext.squizd.tensors import Located
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.affine import FLAT_LSB, PER_TENSOR, POINTS, ROWS_LSB, AffineLayout, Grid, Group
from ingot.model.layouts.base import Layout
from ingot.model.layouts.dense import DenseLayout, TcaLayout
from ingot.model.layouts.sparse import MASK, BlocksLayout, MaskLayout
from ingot.model.layouts.table import layout_of
from ingot.model.layouts.texture import AstcLayout
from ingot.model.reading.ranges import read_bytes
from ingot.model.spec import PartSpec, TensorSpec

MAX_COLUMNS = 1 << 20
_STEP = 4 << 20
_TRY = 64  # cost of one width in addition to the bytes that are read


class Bitmaps:
    """A search for the widths of a file's bitmaps, which their headers do not state.

    A bitmap is followed by one value for each set bit. So each width implies an end of the block. A width fits if this
    end is the end of the layer, or the start of another block.

    Parameters
    ----------
    stops : tuple of bytes
        Magics that may follow a block, in addition to the magics of blocks.
    """

    def __init__(self, source: ByteSource, stops: tuple[bytes, ...] = ()) -> None:
        self._read = partial(read_bytes, source)
        self._followers = {*MAGICS, *stops}
        self._budget = 16 * source.size + (
            1 << 20
        )  # bytes that may be read, a limit for hostile files with many blocks

    def block(self, offset: int, end: int, location: str) -> Block:
        """Return the ``TCAW`` block at ``offset``, with or without Ingot's header; it must end by ``end``.

        Raises
        ------
        FormatError
            ``squizd.tca-header``, ``squizd.tca-bitmap``, ``squizd.block-out-of-bounds``.
        UnsupportedError
            ``squizd.tca-ambiguous``: several widths fit.
        """
        rows, header = bitmap_rows(self._read, offset, end, location)
        with_header: Block | None = None
        with suppress(FormatError):  # then it has no header of Ingot
            with_header = parse(self._read, offset, end, location)
        if with_header is not None and is_sound(with_header):
            return with_header
        widths_and_ones = self._widths(rows, offset + header, end, location) if rows else []
        if len(widths_and_ones) > 1:
            widths = " or ".join(str(words * TCA_WORD) for words, _ in widths_and_ones[:4])
            raise _ambiguous(f"its bitmap can have rows of {widths} bits", location)
        if widths_and_ones:
            words, ones = widths_and_ones[0]
            self._require_last_column(rows, words, offset + header, location)
            return bitmap(rows, words * TCA_WORD, ones)
        if with_header is not None:
            return with_header
        raise FormatError(
            "squizd.tca-bitmap",
            "expected a TCAW block with columns in its header, or a bitmap followed by one value for each set bit "
            f"that ends at the layer's end, byte {end}, or at another block; found neither at byte {offset}",
            where=location,
        )

    def _widths(self, rows: int, start: int, end: int, location: str) -> list[tuple[int, int]]:
        """Return every width of the bitmap at ``start`` that fits; the class defines this.

        Each width is a pair: the number of 64-bit words in a row, and the number of set bits in a bitmap of this width.
        """
        fitting = []
        ones = 0
        stripe = rows * TCA_WORD // 8
        for words in range(1, MAX_COLUMNS // TCA_WORD + 1):
            values_start = start + words * stripe
            if values_start + 2 * ones > end:
                break
            ones += self._ones(values_start - stripe, stripe, location)
            last = values_start + 2 * ones
            if last == end or (last + 4 <= end and self._read(last, 4) in self._followers):
                fitting.append((words, ones))
        return fitting

    def _ones(self, offset: int, size: int, location: str) -> int:
        """Return the number of set bits in a range of bytes."""
        self._budget -= size + _TRY
        if self._budget < 0:
            raise _ambiguous("the file has too many blocks without columns to determine their widths", location)
        chunks = (self._read(offset + start, min(_STEP, size - start)) for start in range(0, size, _STEP))
        return sum(int.from_bytes(chunk, "little").bit_count() for chunk in chunks)

    def _require_last_column(self, rows: int, words: int, start: int, location: str) -> None:
        """Raise an error if the last bit of every row is clear, because the last columns may then be padding."""
        width = words * TCA_WORD // 8
        step = max(1, _STEP // width)
        for first in range(0, rows, step):
            data = self._read(start + first * width, min(step, rows - first) * width)
            if max(data[width - 1 :: width]) & 0x80:
                return
        max_columns = words * TCA_WORD
        raise _ambiguous(
            f"it can have {max_columns - TCA_WORD + 1} to {max_columns} columns, of which no row uses the last",
            location,
        )


def _ambiguous(reason: str, location: str) -> UnsupportedError:
    return UnsupportedError(
        f"the header of a TCAW block does not state its columns, and no directory does; {reason}",
        rule="squizd.tca-ambiguous",
        where=location,
    )


MAX_BLOCKS = 1 << 20
_SCALE = "f32"
SCALED = (INT4, INT2, ASTC)

_IN_LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj", "mlp.fc1", "mlp.fc2",
    "attention.wq", "attention.wk", "attention.wv", "attention.wo",
    "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "intermediate.dense", "output.dense", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj",
)  # fmt: skip
_STACKS = (
    "model.layers.{}.",
    "layers.{}.",
    "encoder.layer.{}.",
    "bert.encoder.layer.{}.",
    "transformer.h.{}.",
    "h.{}.",
)
_OUTSIDE = ("model.embed_tokens.weight", "tok_embeddings.weight", "lm_head.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class ScannedBlock:
    """A block of a file without a directory: its layer, its index in the layer, and its offset in the file."""

    layer: int
    number: int
    offset: int
    block: Block


def scan_blocks(
    source: ByteSource, layers: Sequence[Span], location: str, stops: tuple[bytes, ...] = ()
) -> list[ScannedBlock]:
    """Return all blocks of all layers. Up to 63 zero bytes may precede a block and follow the last block.

    Raises ``FormatError``: the rules of blocks and of bitmaps (``Bitmaps``), and ``squizd.too-many-blocks``.
    """
    scanned: list[ScannedBlock] = []
    read = partial(read_bytes, source)
    bitmaps = Bitmaps(source, stops)
    for layer, (start, end) in enumerate(layers):
        offset = start
        number = 0
        while (offset := skip_zeros(source, offset, end)) < end:
            magic = read(offset, min(4, end - offset))
            layer_location = f"{location}: layer {layer}"
            if magic in stops:
                break
            block = (
                bitmaps.block(offset, end, layer_location) if magic == TCA else parse(read, offset, end, layer_location)
            )
            scanned.append(ScannedBlock(layer, number, offset, block))
            offset = offset + (block.length or 0)
            number = number + 1
            if len(scanned) > MAX_BLOCKS:
                raise FormatError(
                    "squizd.too-many-blocks",
                    f"expected at most {MAX_BLOCKS} blocks without a directory",
                    where=location,
                )
    return scanned


def end_of(blocks: Sequence[ScannedBlock], start: int) -> int:
    """Return the end of the last of ``blocks``; ``start`` if there are none."""
    return max((scanned.offset + (scanned.block.length or 0) for scanned in blocks), default=start)


def matrices_of(blocks: Sequence[ScannedBlock]) -> defaultdict[int, dict[int, tuple[int, int]]]:
    """Return the rows and columns of each two-dimensional block, by its layer and by its index in the layer."""
    matrices: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for scanned in blocks:
        if len(scanned.block.shape) == 2:
            rows, cols = scanned.block.shape
            matrices[scanned.layer][scanned.number] = rows, cols
    return matrices


def name_blocks(
    source: ByteSource,
    blocks: Sequence[ScannedBlock],
    tables: TableRanges,
    location: str,
    stem: str = "layers",
    other_entries: tuple[int, int] = (0, 0),
) -> dict[str, Located]:
    """Return the blocks of a file without a directory by name, each with its scale entries, in the order of ``blocks``.

    The first round of the scale tables may have entries of other blocks. ``other_entries`` are their numbers before and
    after the entries of ``blocks``.

    Raises
    ------
    FormatError
        ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-id``, ``squizd.scale-rounds``,
        ``squizd.sub-blocks``.
    """
    scaled = [scanned for scanned in blocks if scanned.block.magic in SCALED]
    firsts, seconds = rounds_of(source, tables, other_entries[0] + len(scaled) + other_entries[1], location)
    firsts = firsts[other_entries[0] : other_entries[0] + len(scaled)]
    entries = assign_entries(firsts, [scanned.layer for scanned in scaled], _usual_names, location)
    by_offset = {scanned.offset: entry for scanned, entry in zip(scaled, entries, strict=True)}
    names: dict[str, Located] = {}
    for scanned in blocks:
        first, usual = by_offset.get(scanned.offset, (None, None))
        name = usual if usual is not None and usual not in names else f"{stem}.{scanned.layer}.{scanned.number}"
        second = None if first is None else seconds.get(base_id(first))
        names[name] = _located(source, name, scanned, first, second, location)
    return names


def _usual_names(layer: int) -> dict[int, str]:
    """Return common tensor names of a layer, keyed by their ids."""
    names = [stack.format(layer) + name + ".weight" for stack in _STACKS for name in _IN_LAYER]
    return {tensor_id(layer, name): name for name in (*names, *_OUTSIDE)}


def _located(
    source: ByteSource, name: str, scanned: ScannedBlock, first: Run | None, second: Run | None, location: str
) -> Located:
    """Return the tensor of a block; raises an error if the SQUIZD document leaves its values ambiguous."""
    block = scanned.block
    parts = [PartSpec(part.role, part.dtype, part.length, part.type) for part in block.parts]
    run = second or first
    if run is not None:
        parts += [PartSpec(role, _SCALE, 4 * run.count) for role in SCALE_ROLES]
    if block.magic in INTEGER_BITS:
        assert first is not None
        grid = _grid(source, block, first, second, f"{location}: {name}")
        packing = ROWS_LSB if block.shape[1] * INTEGER_BITS[block.magic] % 8 == 0 else FLAT_LSB
        layout: Layout = AffineLayout(INTEGER_BITS[block.magic], grid, packing, True, POINTS, _SCALE)
    else:
        layout = _layout(block)
    spec = TensorSpec(name, block.shape, block.dtype or _SCALE, layout.codec, tuple(parts), layout.attributes())
    return Located(spec, storage_form(spec), scanned.offset, run)


def with_mask(located: Located, placed: PlacedMask) -> Located:
    """Return a matrix of a file without a directory as a tensor of codec ``sparse_blocks`` with the mask ``placed``.

    A bitmap (section 5.2) of full size is returned unchanged, because its bits are already zero for the dropped blocks.
    """
    if placed.is_full_size and located.spec.codec == MaskLayout.codec:
        return located
    spec = located.spec
    blocks = placed.blocks
    shape = list(spec.shape)
    shape[placed.axis] = blocks.channels
    layout = BlocksLayout(
        spec.dtype,
        placed.axis,
        blocks.block,
        blocks.channels,
        blocks.kept_channels,
        layout_of(spec),
        placed.is_full_size,
    )
    parts = (PartSpec(MASK, "u8", len(blocks.mask)), *spec.parts)
    spec = TensorSpec(spec.name, tuple(shape), spec.dtype, BlocksLayout.codec, parts, layout.attributes())
    mask = blocks.mask if placed.offset is None else None
    return Located(spec, storage_form(spec), located.offset, located.run, placed.offset, mask_bytes=mask)


def _layout(block: Block) -> Layout:
    """Return the layout of a block that is fully described by its header."""
    if "footprint" in block.properties:
        return AstcLayout(block.properties["footprint"], _SCALE)
    if "start" in block.properties:
        return TcaLayout(block.properties["start"])
    if "kept" in block.properties:
        return MaskLayout(TCA_DTYPE, block.properties["kept"], DenseLayout(TCA_DTYPE), aligned=True)
    return DenseLayout(block.dtype or _SCALE)


def _grid(source: ByteSource, block: Block, first: Run, second: Run | None, location: str) -> Grid:
    """Return which elements share a scale: all elements of the matrix, or equal groups of columns in each row.

    ``first`` contains the scale of the matrix. ``second``, if present, contains the scales of its sub-blocks; their
    count determines the size of a group.
    """
    rows, cols = block.shape
    if second is None:
        return PER_TENSOR
    neutral = read_entries(source, first.offset, 1)[0]
    if (neutral["scale"], neutral["zero"]) != (1.0, 0.0):
        raise FormatError(
            "squizd.scale-rounds",
            "expected scale 1 and zero 0 in the first round of matrices with sub-block scales: the document does not "
            "define how the "
            f"two are combined; found {neutral['scale']:g} and {neutral['zero']:g}",
            where=location,
        )
    declared = int(block.properties.get("sub_block", 0))
    if second.count == 1 and rows > 1 and (not declared or declared >= rows * cols):
        return PER_TENSOR
    groups = second.count // rows if rows else 0
    group = declared or (cols // groups if groups and cols % groups == 0 else 0)
    if not group or rows * -(-cols // group) != second.count:
        raise FormatError(
            "squizd.sub-blocks",
            f"expected sub-blocks that divide {rows} rows of {cols} columns, found {second.count} scales"
            + (f" and sub_block_len {declared}" if declared else ""),
            where=location,
        )
    if rows > 1 and cols > group and cols % group and -(-rows * cols // group) == second.count:
        raise FormatError(
            "squizd.sub-blocks",
            f"expected sub-blocks of {group} columns that divide a row, found rows of {cols} columns and "
            f"{second.count} scales, which fit sub-blocks that end with a row and sub-blocks that cross rows",
            where=location,
        )
    return Group(group)
