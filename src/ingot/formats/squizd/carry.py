"""Which tensors a ``.squizd`` can carry, and as which block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ingot.core.checked import MAX_RANK
from ingot.core.dtypes import DTYPES
from ingot.errors import UnsupportedError
from ingot.formats.squizd.blocks import (
    ASTC,
    INT2,
    INT4,
    INTEGER_BITS,
    MOST,
    Block,
    astc,
    integers,
    npcl,
    tca,
)
from ingot.model.spec import PartSpec, TensorSpec

SPARSE = "sparse_blocks"
SCALE_ROLES = ("scales", "zeros")
_NOT_CARRIED = ("zero_kind", "zero_point", "matrix", "block")
SCALE_DTYPES = ("f32", "f16", "bf16")


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


def form_of(spec: TensorSpec) -> Form:
    """Return the block and scale entries of a tensor.

    Raises ``UnsupportedError`` ``squizd.carry`` with the reason.
    """
    _check_common(spec)
    codec, params, mask = spec.codec, spec.params, None
    shape: tuple[int, ...] = _matrix(spec.shape)
    if spec.codec == SPARSE:
        codec, params, shape = _reduced(spec)
        mask = _part(spec, "mask").length
        if not mask:
            raise _refuse("a pruned tensor has channels and a mask of them, found none")
    maker = _MAKERS.get(codec)
    if maker is None:
        raise _refuse(f"it has blocks for {', '.join(_MAKERS)} and {SPARSE}, this tensor is {codec[:80]}; use .zt")
    if codec == "dense" and spec.codec == "dense":
        shape = spec.shape
    if any(size > MOST for size in shape):
        raise _refuse(f"its sizes have 32 bits, found shape {list(shape)}")
    block = maker(spec, params, shape)
    _check_lengths(spec, block)
    return _with_scales(spec, params, block, mask)


def _check_common(spec: TensorSpec) -> None:
    try:
        spec.name.encode()
    except UnicodeEncodeError as error:
        raise _refuse(f"a name is UTF-8 text, found {spec.name!r}") from error
    if len(spec.shape) > MAX_RANK:
        raise _refuse(f"it has at most {MAX_RANK} dimensions, found {len(spec.shape)}")
    if spec.dtype not in DTYPES:
        raise _refuse(f"it has no element type {spec.dtype[:80]}")
    for part in spec.parts:
        if part.encoding != "raw":
            raise _refuse(f"it holds uncompressed parts, part {part.role!r} is {part.encoding}")


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _reduced(spec: TensorSpec) -> tuple[str, Mapping[str, Any], tuple[int, int]]:
    """Return the inner codec, its parameters and the matrix of kept rows or columns of a pruned tensor."""
    params = spec.params
    kept, axis, inner = params.get("kept"), params.get("axis"), params.get("inner_params")
    if not isinstance(kept, int) or axis not in (0, 1) or not isinstance(inner, Mapping) or kept < 0:
        raise _refuse("a pruned tensor has the parameters kept, axis and inner_params")
    rows, cols = _matrix(spec.shape)
    return str(params.get("inner")), inner, (kept, cols) if axis == 0 else (rows, kept)


def _dense(spec: TensorSpec, _: Mapping[str, Any], shape: Sequence[int]) -> Block:
    return npcl(spec.dtype, tuple(shape))


def _integers(_: TensorSpec, params: Mapping[str, Any], shape: Sequence[int]) -> Block:
    rows, cols = shape
    bits = params.get("bits")
    magics = [magic for magic, wanted in INTEGER_BITS.items() if wanted == bits]
    if not isinstance(bits, int) or not magics or params.get("codec_version") != 1:
        raise _refuse(f"its integers have 2 or 4 bits and Ingot's parameters, found bits={bits!r:.80}")
    if params.get("signed") is not True:
        raise _refuse("its integers are signed two's complement; quantize with signed = true")
    stranger = next(
        (key for key in _NOT_CARRIED if key in params and (key, params[key]) != ("zero_kind", "point")), None
    )
    if stranger is not None:
        raise _refuse(f"its integers decode as s * (q - z), groups along its rows; found the attribute {stranger}")
    if params.get("packing") != "flat_lsb" and (params.get("packing") != "rows_lsb" or cols * bits % 8):
        raise _refuse(
            f"its codes are packed low bits first without padding between rows, these rows of {cols} codes are not; "
            f"choose columns by the recipe's cols_multiple_of = {8 // bits}"
        )
    return integers(magics[0], rows, cols, sub_block(params, cols))


def sub_block(params: Mapping[str, Any], cols: int) -> int:
    """Return the columns that share a scale, as an INT2 header states them; 0 for one scale for the matrix."""
    granularity = params.get("granularity")
    if granularity == "tensor":
        return 0
    if granularity == "row":
        return max(cols, 1)
    group = params.get("group_size")
    if granularity != "group" or not isinstance(group, int) or group < 1:
        raise _refuse(f"its scales are per group, row or tensor, found {granularity!r:.80} of {group!r:.80}")
    return min(group, MOST)


def _astc(_: TensorSpec, params: Mapping[str, Any], shape: Sequence[int]) -> Block:
    try:
        return astc(shape[0], shape[1], str(params.get("footprint")))
    except KeyError as error:
        raise _refuse(f"it has no ASTC footprint {params.get('footprint')!r:.80}") from error


def _tca(spec: TensorSpec, params: Mapping[str, Any], shape: Sequence[int]) -> Block:
    start = params.get("start", 0)  # learnt by a fit pass, so a plan does not have it yet
    if not isinstance(start, int) or not -(2**31) <= start < 2**31:
        raise _refuse(f"expected a start exponent, found {start!r:.80}")
    high, fallback = _part(spec, "high").length, _part(spec, "fallback").length
    known = high is not None and fallback is not None
    return tca(shape[0], shape[1], start, high if known else None, fallback // 2 if known and fallback else fallback)


_MAKERS = {"dense": _dense, "quantized_group": _integers, "astc": _astc, "tca_tbe": _tca}


def _check_lengths(spec: TensorSpec, block: Block) -> None:
    """The block's parts and the tensor's are the same, scales and mask aside."""
    found = [part for part in spec.parts if part.role not in SCALE_ROLES and part.role != "mask"]
    if [part.role for part in found] != [piece.role for piece in block.pieces]:
        raise _refuse(f"expected parts {[piece.role for piece in block.pieces]}, found {[part.role for part in found]}")
    for part, piece in zip(found, block.pieces, strict=True):
        if (part.dtype, part.type) != (piece.dtype, piece.type) or part.length != piece.length:
            raise _refuse(
                f"expected part {part.role!r} of {piece.length} bytes of {piece.type or piece.dtype}, found "
                f"{part.length} bytes of {part.type or part.dtype}"
            )


def _with_scales(spec: TensorSpec, params: Mapping[str, Any], block: Block, mask: int | None) -> Form:
    roles = [part.role for part in spec.parts]
    wanted = [role for role in SCALE_ROLES if role in roles]
    if block.magic not in (INT4, INT2, ASTC):
        if wanted:
            raise _refuse(f"expected no part {wanted[0]!r} beside a {block.magic.decode()} block")
        return Form(block, mask_bytes=mask)
    scales = _part(spec, "scales")
    if scales.dtype not in SCALE_DTYPES or scales.length is None:
        raise _refuse(f"expected scales of {', '.join(SCALE_DTYPES)}, found {scales.dtype}")
    if any((_part(spec, role).dtype, _part(spec, role).length) != (scales.dtype, scales.length) for role in wanted):
        raise _refuse("expected one zero point per scale, of the same type")
    count = scales.length // (4 if scales.dtype == "f32" else 2)
    per_matrix = block.magic == ASTC or params.get("granularity") == "tensor"
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
