"""Which tensors a ``.squizd`` can carry, and as which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.core.checked import MAX_RANK
from ingot.core.dtypes import DTYPES
from ingot.errors import CodecError, UnsupportedError
from ingot.formats.squizd.blocks import (
    ASTC,
    INT2,
    INT4,
    INTEGER_BITS,
    MOST,
    TCA_DTYPE,
    Block,
    astc,
    bitmap,
    integers,
    npcl,
    tca,
)
from ingot.model.layouts.affine import NO_ZERO, POINTS, SCALE_DTYPES, SCALES, ZEROS, AffineLayout, Blocks
from ingot.model.layouts.base import Layout, matrix_shape
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.lossless import TcaLayout
from ingot.model.layouts.sparse import MASK, NONZEROS, WORD, BlocksLayout, MaskLayout
from ingot.model.layouts.table import layout_of
from ingot.model.layouts.texture import AstcLayout
from ingot.model.spec import PartSpec, TensorSpec

SCALE_ROLES = (SCALES, ZEROS)


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor lies in the file: a block, its scale entries, perhaps a mask.

    ``first`` and ``second`` count entries of the two rounds of scale tables; ``second`` is None where the matrix has
    one scale, 0 where it has no elements.
    """

    block: Block
    scale_dtype: str | None = None
    first: int = 0
    second: int | None = None
    mask_bytes: int | None = None


def refusal(spec: TensorSpec) -> str | None:
    """Return why ``.squizd`` cannot carry the tensor; None if it can."""
    try:
        form_of(spec)
    except UnsupportedError as error:
        return error.message
    return None


def compacted(spec: TensorSpec) -> str | None:
    """Return why a reader of the SQUIZD document could not use a tensor that can be carried; None if it could."""
    if spec.codec != BlocksLayout.codec or BlocksLayout.of(spec).whole:
        return None
    return (
        "its pruned matrices have their full size, which the document has no other place for: `ingot convert` makes it "
        "so, or stores what is left of them alone, for Ingot to read, with --prune-compact"
    )


def undescribed(spec: TensorSpec) -> str | None:
    """Return why a block of the SQUIZD document does not state the values of a tensor; None if it does.

    The directory states what such a block lacks, so that files that hold one are read. Only the writer refuses it.
    """
    layout, shape = layout_of(spec), matrix_shape(spec.shape)
    if isinstance(layout, BlocksLayout):
        shape = layout.inner_shape(spec.shape)
        if layout.whole and isinstance(layout.inner, AstcLayout):
            return (
                "an ASTC texture holds no exact zeros, so that a reader of the document does not find which blocks are "
                "dropped; use another recipe, or store what is left of pruned matrices, for Ingot to read, with "
                "--prune-compact"
            )
        layout = layout.inner
    if isinstance(layout, AffineLayout) and layout.group_size is not None and shape[0]:
        group, cols = layout.group_size, shape[1]
        if cols > group and cols % group:
            return (
                f"readers of the document divide a row into equal groups, and {group} does not divide {cols} columns; "
                "choose a group that does, or a scale per row"
            )
    return None


def form_of(spec: TensorSpec) -> Form:
    """Return the block and scale entries of a tensor.

    Raises ``UnsupportedError`` ``squizd.carry`` with the reason.
    """
    _check_common(spec)
    try:
        layout = layout_of(spec)
    except CodecError as error:
        raise _refuse(error.message) from error
    mask, shape = None, matrix_shape(spec.shape)
    if isinstance(layout, BlocksLayout):
        mask, shape = _part(spec, MASK).length, layout.inner_shape(spec.shape)
        layout = layout.inner
        if not mask:
            raise _refuse("a pruned tensor has channels and a mask of them, found none")
    sizes = spec.shape if spec.codec == DenseLayout.codec else shape
    if any(size > MOST for size in sizes):
        raise _refuse(f"its sizes have 32 bits, found shape {list(sizes)}")
    block = _block(spec, layout, sizes)
    _check_lengths(spec, block)
    return _with_scales(spec, layout, block, mask)


def forms_of(specs: Sequence[TensorSpec]) -> list[Form]:
    """Return the form of each tensor; errors as of ``form_of``."""
    return [form_of(spec) for spec in specs]


def _block(spec: TensorSpec, layout: Layout, shape: tuple[int, ...]) -> Block:
    if isinstance(layout, DenseLayout):
        return npcl(spec.dtype, shape)
    if isinstance(layout, AffineLayout):
        return _integers(layout, *shape)
    if isinstance(layout, AstcLayout):
        return _astc(layout, *shape)
    if isinstance(layout, TcaLayout):
        return _tca(spec, layout, *shape)
    if isinstance(layout, MaskLayout):
        return _bitmap(spec, layout, *shape)
    kinds = (DenseLayout, AffineLayout, AstcLayout, TcaLayout, MaskLayout, BlocksLayout)
    known = ", ".join(kind.codec for kind in kinds)
    raise _refuse(f"it has blocks for {known}, this tensor is {layout.codec[:80]}; use .zt")


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _refuse(f"a name is UTF-8 text, found {name!r}") from error


def _check_common(spec: TensorSpec) -> None:
    _check_name(spec.name)
    if len(spec.shape) > MAX_RANK:
        raise _refuse(f"it has at most {MAX_RANK} dimensions, found {len(spec.shape)}")
    if spec.dtype not in DTYPES:
        raise _refuse(f"it has no element type {spec.dtype[:80]}")
    for part in spec.parts:
        if part.encoding != "raw":
            raise _refuse(f"it holds uncompressed parts, part {part.role!r} is {part.encoding}")


def _integers(layout: AffineLayout, rows: int, cols: int) -> Block:
    bits = layout.bits
    magics = [magic for magic, wanted in INTEGER_BITS.items() if wanted == bits]
    if not magics or not layout.stream:
        raise _refuse(f"its integers have 2 or 4 bits and Ingot's parameters, found bits={bits}")
    if not layout.signed:
        raise _refuse("its integers are signed two's complement; quantize with signed = true")
    if layout.zero not in (NO_ZERO, POINTS):
        raise _refuse(f"its integers decode as s * (q - z), z a part or none; found {layout.zero}")
    if isinstance(layout.grid, Blocks):
        raise _refuse(f"its scales are those of groups along rows, found blocks of {list(layout.grid.shape)}")
    if layout.matrix is not None:
        raise _refuse(f"its integers are packed by the tensor's own rows, found a matrix of {list(layout.matrix)}")
    if not layout.is_flat((rows, cols)):
        raise _refuse(
            f"its codes are packed low bits first without padding between rows, these rows of {cols} codes are not; "
            f"choose columns by the recipe's cols_multiple_of = {8 // bits}"
        )
    return integers(magics[0], rows, cols, sub_block(layout, cols))


def sub_block(layout: AffineLayout, cols: int) -> int:
    """Return the columns that share a scale, as an INT2 header states them; 0 for one scale for the matrix."""
    return 0 if layout.per_tensor else min(layout.group_columns(cols), MOST)


def _astc(layout: AstcLayout, rows: int, cols: int) -> Block:
    try:
        return astc(rows, cols, layout.footprint)
    except KeyError as error:
        raise _refuse(f"it has no ASTC footprint {layout.footprint!r:.80}") from error


def _tca(spec: TensorSpec, layout: TcaLayout, rows: int, cols: int) -> Block:
    start = layout.start or 0  # learnt by a fit pass, so a plan does not have it yet
    high, fallback = _part(spec, "high").length, _part(spec, "fallback").length
    known = high is not None and fallback is not None
    return tca(rows, cols, start, high if known else None, fallback // 2 if known and fallback else fallback)


def _bitmap(spec: TensorSpec, layout: MaskLayout, rows: int, cols: int) -> Block:
    if not isinstance(layout.inner, DenseLayout) or spec.dtype != TCA_DTYPE or spec.codec != MaskLayout.codec:
        raise _refuse(
            f"its bitmaps are of {TCA_DTYPE} values alone, in matrices that are not pruned by blocks; found "
            f"{layout.inner.codec} of {spec.dtype} in {spec.codec}"
        )
    if not layout.aligned:
        raise _refuse(f"its bitmaps have rows of whole words; encode with the option row_alignment = {WORD}")
    length = _part(spec, NONZEROS).length
    return bitmap(rows, cols, None if length is None else length * 8 // DTYPES[TCA_DTYPE].bits)


def _check_lengths(spec: TensorSpec, block: Block) -> None:
    """The block's parts and the tensor's are the same, scales and the mask of a pruned tensor aside."""
    aside = (*SCALE_ROLES, MASK) if spec.codec == BlocksLayout.codec else SCALE_ROLES
    counted = [part for part in spec.parts if part.role not in aside]
    if [part.role for part in counted] != [piece.role for piece in block.pieces]:
        raise _refuse(
            f"expected parts {[piece.role for piece in block.pieces]}, found {[part.role for part in counted]}"
        )
    for part, piece in zip(counted, block.pieces, strict=True):
        if (part.dtype, part.type) != (piece.dtype, piece.type) or part.length != piece.length:
            raise _refuse(
                f"expected part {part.role!r} of {piece.length} bytes of {piece.type or piece.dtype}, found "
                f"{part.length} bytes of {part.type or part.dtype}"
            )


def _with_scales(spec: TensorSpec, layout: Layout, block: Block, mask: int | None) -> Form:
    roles = [part.role for part in spec.parts]
    wanted = [role for role in SCALE_ROLES if role in roles]
    if block.magic not in (INT4, INT2, ASTC):
        if wanted:
            raise _refuse(f"expected no part {wanted[0]!r} beside a {block.magic.decode()} block")
        return Form(block, mask_bytes=mask)
    scales = _part(spec, SCALES)
    if scales.dtype not in SCALE_DTYPES or scales.length is None:
        raise _refuse(f"expected scales of {', '.join(SCALE_DTYPES)}, found {scales.dtype}")
    if any((_part(spec, role).dtype, _part(spec, role).length) != (scales.dtype, scales.length) for role in wanted):
        raise _refuse("expected one zero point per scale, of the same type")
    count = scales.length * 8 // DTYPES[scales.dtype].bits
    per_matrix = not isinstance(layout, AffineLayout) or layout.per_tensor
    if per_matrix and count != 1:
        raise _refuse(f"expected one scale for the matrix, found {count}")
    if count > MOST:
        raise _refuse(f"a scale table counts with 32 bits, found {count} scales")
    return Form(block, scales.dtype, 1, None if per_matrix else count, mask)


def _part(spec: TensorSpec, role: str) -> PartSpec:
    try:
        return spec.part(role)
    except KeyError as error:
        raise _refuse(f"expected a part {role!r}, found {[part.role for part in spec.parts]}") from error


def _refuse(message: str) -> UnsupportedError:
    return UnsupportedError(message, rule="squizd.carry")
