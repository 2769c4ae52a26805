"""Decide whether a ``.squizd`` file can store a tensor, and in which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.core.numeric.dtypes import DTYPES, MAX_RANK
from ingot.errors import CodecError, UnsupportedError
from ingot.ext.squizd.blocks import (
    ASTC,
    INT2,
    INT4,
    INTEGER_BITS,
    MAX_U32,
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
from ingot.model.layouts.dense import DenseLayout, TcaLayout
from ingot.model.layouts.sparse import MASK, NONZEROS, WORD, BlocksLayout, MaskLayout
from ingot.model.layouts.table import layout_of
from ingot.model.layouts.texture import AstcLayout
from ingot.model.spec import PartSpec, TensorSpec

SCALE_ROLES = (SCALES, ZEROS)


@dataclass(frozen=True, slots=True)
class StorageForm:
    """The storage of a tensor in the file: a block, scale entries, and optionally a mask.

    ``first`` and ``second`` are the tensor's numbers of entries in the first and second round of scale tables.
    ``second`` is None if the tensor has no scales of groups, and 0 if it has no elements.
    """

    block: Block
    scale_dtype: str | None = None
    first: int = 0
    second: int | None = None
    mask_bytes: int | None = None


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why ``.squizd`` cannot store the tensor; None if it can."""
    try:
        storage_form(spec)
    except UnsupportedError as error:
        return error.message
    return None


def why_compact_unsupported(spec: TensorSpec) -> str | None:
    """Return why readers that follow only the SQUIZD document could not use a pruned tensor; None if they could."""
    if spec.codec != BlocksLayout.codec or BlocksLayout.from_tensor(spec).full_size:
        return None
    return (
        "its pruned matrices have their full size, because the document defines no other: `ingot convert` restores it, "
        "or with --prune-compact stores only the remaining blocks, for Ingot to read"
    )


def why_undescribed(spec: TensorSpec) -> str | None:
    """Return why the SQUIZD document alone does not define the values of a tensor in its block; None if it does.

    The directory contains the missing information, so Ingot can read such a block. But the writer refuses it.
    """
    layout = layout_of(spec)
    shape = matrix_shape(spec.shape)
    if isinstance(layout, BlocksLayout):
        shape = layout.inner_shape(spec.shape)
        if layout.full_size and isinstance(layout.inner, AstcLayout):
            return (
                "an ASTC texture has no exact zeros, so that a reader of the document cannot determine which blocks "
                "are "
                "dropped; use another recipe, or store only the remaining blocks, for Ingot to read, with "
                "--prune-compact"
            )
        layout = layout.inner
    if isinstance(layout, AffineLayout) and layout.group_size is not None and shape[0]:
        group = layout.group_size
        cols = shape[1]
        if cols > group and cols % group:
            return (
                f"readers of the document divide a row into equal groups, and {group} does not divide {cols} columns; "
                "choose a group that does, or a scale per row"
            )
    return None


def storage_form(spec: TensorSpec) -> StorageForm:
    """Return the block and scale entries of a tensor.

    Raises ``UnsupportedError`` ``squizd.carry`` with the reason.
    """
    _check_common(spec)
    try:
        layout = layout_of(spec)
    except CodecError as error:
        raise _refuse(error.message) from error
    mask = None
    shape = matrix_shape(spec.shape)
    if isinstance(layout, BlocksLayout):
        mask = _part(spec, MASK).length
        shape = layout.inner_shape(spec.shape)
        layout = layout.inner
        if not mask:
            raise _refuse("a pruned tensor has channels and a mask, but the mask is missing or empty")
    sizes = spec.shape if spec.codec == DenseLayout.codec else shape
    if any(size > MAX_U32 for size in sizes):
        raise _refuse(f"its sizes are limited to 32 bits, found shape {list(sizes)}")
    block = _block(spec, layout, sizes)
    _check_lengths(spec, block)
    return _with_scales(spec, layout, block, mask)


def storage_forms(specs: Sequence[TensorSpec]) -> list[StorageForm]:
    """Return the storage of each tensor; raises the errors of ``storage_form``."""
    return [storage_form(spec) for spec in specs]


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
    layouts = (DenseLayout, AffineLayout, AstcLayout, TcaLayout, MaskLayout, BlocksLayout)
    codecs = ", ".join(cls.codec for cls in layouts)
    raise _refuse(f"it has blocks for {codecs}, found {layout.codec[:80]}; use .zt")


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
            raise _refuse(f"its parts are uncompressed, found {part.encoding} in part {part.role!r}")


def _integers(layout: AffineLayout, rows: int, cols: int) -> Block:
    bits = layout.bits
    magics = [magic for magic, bits_of_magic in INTEGER_BITS.items() if bits_of_magic == bits]
    if not magics or not layout.stream:
        raise _refuse(f"its integers have 2 or 4 bits and Ingot's parameters, found bits={bits}")
    if not layout.signed:
        raise _refuse("its integers are signed two's complement; quantize with signed = true")
    if layout.zero not in (NO_ZERO, POINTS):
        raise _refuse(f"its integers decode as s * (q - z), with an optional part z; found {layout.zero}")
    if isinstance(layout.grid, Blocks):
        raise _refuse(f"its scales are for groups along rows, found blocks of {list(layout.grid.shape)}")
    if layout.matrix is not None:
        raise _refuse(f"its integers are packed by the rows of the tensor, found a matrix of {list(layout.matrix)}")
    if not layout.is_flat((rows, cols)):
        raise _refuse(
            f"its codes are packed low bits first without padding between rows, found padded rows of {cols} codes; "
            f"choose columns by the recipe's cols_multiple_of = {8 // bits}"
        )
    return integers(magics[0], rows, cols, sub_block(layout, cols))


def sub_block(layout: AffineLayout, cols: int) -> int:
    """Return the number of columns that share a scale, for an INT2 header; 0 if the matrix has one scale."""
    return 0 if layout.per_tensor else min(layout.group_columns(cols), MAX_U32)


def _astc(layout: AstcLayout, rows: int, cols: int) -> Block:
    try:
        return astc(rows, cols, layout.footprint)
    except KeyError as error:
        raise _refuse(f"it has no ASTC footprint {layout.footprint!r:.80}") from error


def _tca(spec: TensorSpec, layout: TcaLayout, rows: int, cols: int) -> Block:
    start = layout.start or 0  # determined by a fit pass, so that it is unknown during planning
    high = _part(spec, "high").length
    fallback = _part(spec, "fallback").length
    is_known = high is not None and fallback is not None
    return tca(rows, cols, start, high if is_known else None, fallback // 2 if is_known and fallback else fallback)


def _bitmap(spec: TensorSpec, layout: MaskLayout, rows: int, cols: int) -> Block:
    if not isinstance(layout.inner, DenseLayout) or spec.dtype != TCA_DTYPE or spec.codec != MaskLayout.codec:
        raise _refuse(
            f"its bitmaps contain only {TCA_DTYPE} values, in matrices that are not pruned by blocks; found "
            f"{layout.inner.codec} of {spec.dtype} in {spec.codec}"
        )
    if not layout.aligned:
        raise _refuse(f"its bitmaps have rows of complete words; encode with the option row_alignment = {WORD}")
    length = _part(spec, NONZEROS).length
    return bitmap(rows, cols, None if length is None else length * 8 // DTYPES[TCA_DTYPE].bits)


def _check_lengths(spec: TensorSpec, block: Block) -> None:
    """Raise an error if a part of the tensor and the block's part differ in role, type or number of bytes.

    Scales, and the mask of a pruned tensor, are not compared.
    """
    ignored = (*SCALE_ROLES, MASK) if spec.codec == BlocksLayout.codec else SCALE_ROLES
    counted = [part for part in spec.parts if part.role not in ignored]
    if [part.role for part in counted] != [block_part.role for block_part in block.parts]:
        raise _refuse(
            f"expected parts {[block_part.role for block_part in block.parts]}, found {[part.role for part in counted]}"
        )
    for part, block_part in zip(counted, block.parts, strict=True):
        if (part.dtype, part.type) != (block_part.dtype, block_part.type) or part.length != block_part.length:
            raise _refuse(
                f"expected part {part.role!r} of {block_part.length} bytes of {block_part.type or block_part.dtype}, "
                "found "
                f"{part.length} bytes of {part.type or part.dtype}"
            )


def _with_scales(spec: TensorSpec, layout: Layout, block: Block, mask: int | None) -> StorageForm:
    roles = [part.role for part in spec.parts]
    present = [role for role in SCALE_ROLES if role in roles]
    if block.magic not in (INT4, INT2, ASTC):
        if present:
            raise _refuse(f"expected no part {present[0]!r} with a {block.magic.decode()} block")
        return StorageForm(block, mask_bytes=mask)
    scales = _part(spec, SCALES)
    if scales.dtype not in SCALE_DTYPES or scales.length is None:
        raise _refuse(f"expected scales of {', '.join(SCALE_DTYPES)}, found {scales.dtype}")
    if any((_part(spec, role).dtype, _part(spec, role).length) != (scales.dtype, scales.length) for role in present):
        raise _refuse("expected one zero point per scale, of the same type")
    count = scales.length * 8 // DTYPES[scales.dtype].bits
    per_matrix = not isinstance(layout, AffineLayout) or layout.per_tensor
    if per_matrix and count != 1:
        raise _refuse(f"expected one scale for the matrix, found {count}")
    if count > MAX_U32:
        raise _refuse(f"a scale table has at most {MAX_U32} entries, found {count} scales")
    return StorageForm(block, scales.dtype, 1, None if per_matrix else count, mask)


def _part(spec: TensorSpec, role: str) -> PartSpec:
    try:
        return spec.part(role)
    except KeyError as error:
        raise _refuse(f"expected a part {role!r}, found {[part.role for part in spec.parts]}") from error


def _refuse(message: str) -> UnsupportedError:
    return UnsupportedError(message, rule="squizd.carry")
