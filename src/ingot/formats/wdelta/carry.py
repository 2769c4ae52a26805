"""What a ``.wdelta`` can hold: tensors of three codecs, all of them differences to a tensor of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.core.checked import element_count
from ingot.core.dtypes import DTYPES
from ingot.errors import CodecError, FormatError
from ingot.formats.wdelta.entries import scale_rows
from ingot.formats.wdelta.header import HASH, is_hash
from ingot.formats.wdelta.layout import BY_CODEC, ITEM, SPELLING, Strategy
from ingot.model.delta import Change, DeltaInfo
from ingot.model.layouts.delta import Int4DeltaLayout, SignDeltaLayout, SparseDeltaLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec


def refusal(spec: TensorSpec) -> str | None:
    """Why a ``.wdelta`` cannot hold this tensor; None if it can."""
    strategy = BY_CODEC.get(spec.codec)
    if strategy is None:
        return f"a .wdelta holds differences of the codecs {', '.join(BY_CODEC)}, this tensor is {spec.codec}"
    if spec.dtype != "f32":
        return f"a .wdelta holds differences in f32, found {spec.dtype}"
    if not _is_text(spec.name):
        return f"a .wdelta cannot name a tensor {spec.name!r}"
    try:
        layout_of(spec)
    except CodecError as error:
        return error.message
    return _refuses_parts(spec, strategy) or _refuses_sizes(spec)


def change_refusal(info: DeltaInfo, stored: Sequence[str]) -> str | None:
    """Why a ``.wdelta`` cannot say this of a delta that stores the tensors ``stored``; None if it can."""
    for name, change in info.tensors.items():
        reason = _refuses_change(change)
        if reason is not None:
            return f"tensor {name[:200]!r} {reason}"
    if info.removed:
        return f"tensor {info.removed[0][:200]!r} is removed"
    other = len(info.tensors) != len(stored) or any(name not in info.tensors for name in stored)
    if info.tensors and other and (odd := set(info.tensors) ^ set(stored)):
        wrong = min(odd)
        return f"tensor {wrong[:200]!r} is either stored or described, not both"
    parent = info.base.hashes.get(HASH)
    if parent is not None and not is_hash(parent):
        return f"expected 64 hexadecimal digits as parent hash, found {parent[:80]!r}"
    return None


def _refuses_change(change: Change) -> str | None:
    if change.op != "apply":
        return f"is not stored as a difference ({change.op})"
    if change.base_shape is not None:
        return "has another number of rows in the base"
    return None if change.dtype in DTYPES else f"is of the element type {change.dtype[:80]!r}"


def _refuses_parts(spec: TensorSpec, strategy: Strategy) -> str | None:
    if sorted(part.role for part in spec.parts) != sorted(strategy.fields):
        return f"expected the parts {', '.join(strategy.fields)}, found {', '.join(part.role for part in spec.parts)}"
    for part in spec.parts:
        if part.encoding != "raw" or part.length is None:
            return f"a .wdelta holds uncompressed parts of known length, part {part.role!r} is none"
        if SPELLING.get(part.dtype) not in strategy.fields[part.role]:
            return f"part {part.role!r} is of {part.dtype}, expected {' or '.join(strategy.fields[part.role])}"
    return None


def _refuses_sizes(spec: TensorSpec) -> str | None:
    try:
        size = element_count(spec.shape, "wdelta.shape", spec.name)
    except FormatError as error:
        return error.message
    counts = {part.role: divmod(part.length or 0, ITEM[SPELLING[part.dtype]][1]) for part in spec.parts}
    if any(rest for _, rest in counts.values()):
        return "a part is no whole number of elements"
    sizes = {role: count for role, (count, _) in counts.items()}
    if sizes != _expected(spec, size, sizes):
        return f"parts of {sizes} elements do not fit shape {list(spec.shape)}"
    return None


def _expected(spec: TensorSpec, size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    if spec.codec == SparseDeltaLayout.codec:
        kept = min(sizes["indices"], size)
        return {"indices": kept, "values": kept}
    if spec.codec == SignDeltaLayout.codec:
        return {"scales": scale_rows(spec.shape), "packed_signs": -(-size // 8)}
    apart = min(sizes["outlier_idx"], size)
    codes = size - (apart if Int4DeltaLayout.of(spec).layout == 1 else 0)
    single = {"scale": 1, "zero_point": 1}
    return {"outlier_idx": apart, "outlier_vals": apart, **single, "packed": -(-codes // 2)}


def _is_text(text: str) -> bool:
    """Whether ``text`` has a UTF-8 form: a lone surrogate has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
