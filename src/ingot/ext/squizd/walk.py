"""Reading a file without a directory, as the document alone describes it: blocks in order, names as far as they tell.

Names are ``layers.{i}.{j}`` for block j of layer i; where an entry's ``tensor_id`` is that of a name usual for such
models, that name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ingot.errors import FormatError
from ingot.ext.squizd.bitmaps import Bitmaps
from ingot.ext.squizd.blocks import ASTC, INT2, INT4, INTEGER_BITS, TCA, TCA_DTYPE, Block, parse
from ingot.ext.squizd.carry import SCALE_ROLES, form_of
from ingot.ext.squizd.entries import assigned, base_id, rounds_of
from ingot.ext.squizd.layout import tensor_id
from ingot.ext.squizd.masks import Placed
from ingot.ext.squizd.scales import Run, TablePlaces, read_entries
from ingot.ext.squizd.section_reader import Span, skip_zeros
from ingot.ext.squizd.tensors import Located
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.affine import FLAT_LSB, POINTS, ROWS_LSB, WHOLE, AffineLayout, Grid, Group
from ingot.model.layouts.base import Layout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.lossless import TcaLayout
from ingot.model.layouts.sparse import MASK, BlocksLayout, MaskLayout
from ingot.model.layouts.table import layout_of
from ingot.model.layouts.texture import AstcLayout
from ingot.model.reading.ranges import read_bytes
from ingot.model.spec import PartSpec, TensorSpec

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
class Walked:
    """A block as met: its layer, its number there, its offset."""

    layer: int
    number: int
    offset: int
    block: Block


def walk(source: ByteSource, layers: Sequence[Span], where: str, stops: tuple[bytes, ...] = ()) -> list[Walked]:
    """Return all blocks of all layers. Fewer than 64 zero bytes may lie before a block and behind the last.

    Raises ``FormatError``: the rules of blocks and of bitmaps (``Bitmaps``), and ``squizd.too-many-blocks``.
    """
    walked: list[Walked] = []
    read, bitmaps = partial(read_bytes, source), Bitmaps(source, stops)
    for layer, (start, end) in enumerate(layers):
        at, number = start, 0
        while (at := skip_zeros(source, at, end)) < end:
            magic, location = read(at, min(4, end - at)), f"{where}: layer {layer}"
            if magic in stops:
                break
            block = bitmaps.block(at, end, location) if magic == TCA else parse(read, at, end, location)
            walked.append(Walked(layer, number, at, block))
            at, number = at + (block.length or 0), number + 1
            if len(walked) > MAX_BLOCKS:
                raise FormatError(
                    "squizd.too-many-blocks", f"expected at most {MAX_BLOCKS} blocks without a directory", where=where
                )
    return walked


def end_of(blocks: Sequence[Walked], start: int) -> int:
    """Return where the last block ends."""
    return max((walked.offset + (walked.block.length or 0) for walked in blocks), default=start)


def matrices_of(blocks: Sequence[Walked]) -> defaultdict[int, dict[int, tuple[int, int]]]:
    """Return rows and columns of the blocks with two dimensions, by layer and number there."""
    matrices: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for walked in blocks:
        if len(walked.block.shape) == 2:
            rows, cols = walked.block.shape
            matrices[walked.layer][walked.number] = rows, cols
    return matrices


def name_blocks(
    source: ByteSource,
    blocks: Sequence[Walked],
    tables: TablePlaces,
    where: str,
    stem: str = "layers",
    share: tuple[int, int] = (0, 0),
) -> dict[str, Located]:
    """Give every block a name and its scale entries, in the order of the blocks.

    ``share`` are the entries of the tables' first round that are for other blocks, before and behind those of these.

    Raises
    ------
    FormatError
        ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-id``, ``squizd.scale-rounds``,
        ``squizd.sub-blocks``.
    """
    scaled = [walked for walked in blocks if walked.block.magic in SCALED]
    firsts, seconds = rounds_of(source, tables, share[0] + len(scaled) + share[1], where)
    firsts = firsts[share[0] : share[0] + len(scaled)]
    entries = assigned(firsts, [walked.layer for walked in scaled], _usual_names, where)
    by_offset = {walked.offset: entry for walked, entry in zip(scaled, entries, strict=True)}
    names: dict[str, Located] = {}
    for walked in blocks:
        first, usual = by_offset.get(walked.offset, (None, None))
        name = usual if usual is not None and usual not in names else f"{stem}.{walked.layer}.{walked.number}"
        second = None if first is None else seconds.get(base_id(first))
        names[name] = _located(source, name, walked, first, second, where)
    return names


def _usual_names(layer: int) -> dict[int, str]:
    """Return usual names by the ids that they have in a layer."""
    names = [stack.format(layer) + name + ".weight" for stack in _STACKS for name in _IN_LAYER]
    return {tensor_id(layer, name): name for name in (*names, *_OUTSIDE)}


def _located(
    source: ByteSource, name: str, walked: Walked, first: Run | None, second: Run | None, where: str
) -> Located:
    """Make the tensor that a block stands for; whatever the document leaves open is refused, not guessed."""
    block = walked.block
    parts = [PartSpec(piece.role, piece.dtype, piece.length, piece.type) for piece in block.pieces]
    run = second or first
    if run is not None:
        parts += [PartSpec(role, _SCALE, 4 * run.count) for role in SCALE_ROLES]
    if block.magic in INTEGER_BITS:
        assert first is not None
        grid = _grid(source, block, first, second, f"{where}: {name}")
        packing = ROWS_LSB if block.shape[1] * INTEGER_BITS[block.magic] % 8 == 0 else FLAT_LSB
        layout: Layout = AffineLayout(INTEGER_BITS[block.magic], grid, packing, True, POINTS, _SCALE)
    else:
        layout = _layout(block)
    spec = TensorSpec(name, block.shape, block.dtype or _SCALE, layout.codec, tuple(parts), layout.attributes())
    return Located(spec, form_of(spec), walked.offset, run)


def with_mask(located: Located, placed: Placed) -> Located:
    """Return a matrix with the mask that it lies under.

    A bitmap of full size stays as it is: it has a mask of its own, and holds zeros where this one drops blocks.
    """
    if placed.whole and located.spec.codec == MaskLayout.codec:
        return located
    spec, blocks = located.spec, placed.blocks
    shape = list(spec.shape)
    shape[placed.axis] = blocks.channels
    layout = BlocksLayout(
        spec.dtype, placed.axis, blocks.block, blocks.channels, blocks.kept, layout_of(spec), placed.whole
    )
    parts = (PartSpec(MASK, "u8", len(blocks.mask)), *spec.parts)
    spec = TensorSpec(spec.name, tuple(shape), spec.dtype, BlocksLayout.codec, parts, layout.attributes())
    mask = blocks.mask if placed.offset is None else None
    return Located(spec, form_of(spec), located.offset, located.run, placed.offset, mask_bytes=mask)


def _layout(block: Block) -> Layout:
    """Return the layout of a block whose header tells all of it."""
    if "footprint" in block.says:
        return AstcLayout(block.says["footprint"], _SCALE)
    if "start" in block.says:
        return TcaLayout(block.says["start"])
    if "kept" in block.says:
        return MaskLayout(TCA_DTYPE, block.says["kept"], DenseLayout(TCA_DTYPE), aligned=True)
    return DenseLayout(block.dtype or _SCALE)


def _grid(source: ByteSource, block: Block, first: Run, second: Run | None, where: str) -> Grid:
    """Return what shares a scale, by the number of sub-block scales."""
    rows, cols = block.shape
    if second is None:
        return WHOLE
    neutral = read_entries(source, first.offset, 1)[0]
    if (neutral["scale"], neutral["zero"]) != (1.0, 0.0):
        raise FormatError(
            "squizd.scale-rounds",
            "expected scale 1 and zero 0 in the first round beside sub-block scales: the document does not say how the "
            f"two would be combined; found {neutral['scale']:g} and {neutral['zero']:g}",
            where=where,
        )
    stated = int(block.says.get("sub_block", 0))
    if second.count == 1 and rows > 1 and (not stated or stated >= rows * cols):
        return WHOLE
    groups = second.count // rows if rows else 0
    group = stated or (cols // groups if groups and cols % groups == 0 else 0)
    if not group or rows * -(-cols // group) != second.count:
        raise FormatError(
            "squizd.sub-blocks",
            f"expected sub-blocks that divide {rows} rows of {cols} columns, found {second.count} scales"
            + (f" and sub_block_len {stated}" if stated else ""),
            where=where,
        )
    if rows > 1 and cols > group and cols % group and -(-rows * cols // group) == second.count:
        raise FormatError(
            "squizd.sub-blocks",
            f"expected sub-blocks of {group} columns that divide a row, found rows of {cols} columns and "
            f"{second.count} scales, which fit sub-blocks that end with a row and sub-blocks that cross rows",
            where=where,
        )
    return Group(group)
