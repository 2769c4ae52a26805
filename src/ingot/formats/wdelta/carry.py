"""Rules for tensors in a ``.wdelta``: three codecs, all of them differences to a tensor of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.core.numeric.dtypes import DTYPES, element_count
from ingot.errors import CodecError, FormatError
from ingot.formats.wdelta.entries import scale_rows
from ingot.formats.wdelta.header import HASH, is_hash
from ingot.formats.wdelta.layout import BY_CODEC, ITEM, SPELLING, Strategy
from ingot.model.delta import Change, DeltaInfo
from ingot.model.layouts.delta import Int4DeltaLayout, SignDeltaLayout, SparseDeltaLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why a ``.wdelta`` cannot store this tensor; None if it can."""
    strategy = BY_CODEC.get(spec.codec)
    if strategy is None:
        return f"a .wdelta stores differences of the codecs {', '.join(BY_CODEC)}, found {spec.codec}"
    if spec.dtype != "f32":
        return f"a .wdelta stores differences in f32, found {spec.dtype}"
    if not _is_text(spec.name):
        return f"a .wdelta cannot name a tensor {spec.name!r}"
    try:
        layout_of(spec)
    except CodecError as error:
        return error.message
    return _why_parts_unsupported(spec, strategy) or _why_sizes_unsupported(spec)


def why_change_unsupported(info: DeltaInfo, stored: Sequence[str]) -> str | None:
    """Return why a ``.wdelta`` cannot express the delta ``info``; None if it can.

    ``stored`` are the names of the tensors that the file would store.
    """
    for name, change in info.tensors.items():
        reason = _why_change_unsupported(change)
        if reason is not None:
            return f"tensor {name[:200]!r} {reason}"
    if info.removed:
        return f"tensor {info.removed[0][:200]!r} is removed"
    differs = len(info.tensors) != len(stored) or any(name not in info.tensors for name in stored)
    if info.tensors and differs and (unmatched := set(info.tensors) ^ set(stored)):
        first = min(unmatched)
        return f"tensor {first[:200]!r} is stored without a description, or described without being stored"
    parent = info.base.hashes.get(HASH)
    if parent is not None and not is_hash(parent):
        return f"expected 64 hexadecimal digits as parent hash, found {parent[:80]!r}"
    return None


def _why_change_unsupported(change: Change) -> str | None:
    if change.op != "apply":
        return f"is not stored as a difference ({change.op})"
    if change.base_shape is not None:
        return "has another number of rows in the base"
    return None if change.dtype in DTYPES else f"is of the element type {change.dtype[:80]!r}"


def _why_parts_unsupported(spec: TensorSpec, strategy: Strategy) -> str | None:
    if sorted(part.role for part in spec.parts) != sorted(strategy.fields):
        return f"expected the parts {', '.join(strategy.fields)}, found {', '.join(part.role for part in spec.parts)}"
    for part in spec.parts:
        if part.encoding != "raw" or part.length is None:
            return (
                f"a .wdelta stores uncompressed parts of known length, part {part.role!r} is compressed or of unknown "
                "length"
            )
        if SPELLING.get(part.dtype) not in strategy.fields[part.role]:
            return f"part {part.role!r} is of {part.dtype}, expected {' or '.join(strategy.fields[part.role])}"
    return None


def _why_sizes_unsupported(spec: TensorSpec) -> str | None:
    try:
        size = element_count(spec.shape, "wdelta.shape", spec.name)
    except FormatError as error:
        return error.message
    counts = {part.role: divmod(part.length or 0, ITEM[SPELLING[part.dtype]][1]) for part in spec.parts}
    if any(remainder for _, remainder in counts.values()):
        return "the bytes of a part are no multiple of its element size"
    sizes = {role: count for role, (count, _) in counts.items()}
    if sizes != _expected(spec, size, sizes):
        return f"parts of {sizes} elements do not fit shape {list(spec.shape)}"
    return None


def _expected(spec: TensorSpec, size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    if spec.codec == SparseDeltaLayout.codec:
        count = min(sizes["indices"], size)
        return {"indices": count, "values": count}
    if spec.codec == SignDeltaLayout.codec:
        return {"scales": scale_rows(spec.shape), "packed_signs": -(-size // 8)}
    outliers = min(sizes["outlier_idx"], size)
    codes = size - (outliers if Int4DeltaLayout.from_tensor(spec).layout == 1 else 0)
    single_values = {"scale": 1, "zero_point": 1}
    return {"outlier_idx": outliers, "outlier_vals": outliers, **single_values, "packed": -(-codes // 2)}


def _is_text(text: str) -> bool:
    """Return whether ``text`` can be encoded in UTF-8; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
