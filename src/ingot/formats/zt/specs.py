"""Checks before writing: the reader's rules, applied to a tensor before its bytes exist, and again at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import msgspec

from ingot.core.bytes import checksums, chunk_digests
from ingot.core.bytes.encodings import ENCODINGS
from ingot.core.numeric.dtypes import MAX_RANK
from ingot.core.parsing import cbor
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.formats.zt.manifest import FOOTER, MAGIC, Blob, Object, align, assign_offsets, describe, entry_size, frame
from ingot.formats.zt.rules import ITEM_BYTES, MAX_ZSTD_RATIO, REQUIRED_PARTS, check_object, check_part, logical_dtype
from ingot.model.layouts.base import file_id
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.spec import PartSpec, TensorSpec

_FILE_LABEL = "to be written"


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why ``.zt`` cannot store the tensor; None if it can."""
    try:
        check_spec(spec)
    except IngotError as error:
        return error.message
    return None


def check_spec(spec: TensorSpec) -> None:
    """Raise ``UnsupportedError`` with the reader's rule unless the reader would accept the tensor."""
    if is_plain(spec):
        return
    try:
        _check_parts(spec)
        cbor.dumps(attributes_of(spec))
    except (FormatError, UsageError) as error:
        raise UnsupportedError(error.message, rule=error.rule, where=error.where or spec.name) from error


def is_plain(spec: TensorSpec) -> bool:
    """Return whether ``spec`` is a valid dense tensor in one raw part: a fast check, which most tensors pass."""
    if len(spec.parts) != 1 or spec.codec != DenseLayout.codec or spec.params:
        return False
    part = spec.parts[0]
    shape = spec.shape
    return (
        part.role == DATA
        and part.dtype == spec.dtype
        and part.type is None
        and part.encoding == "raw"
        and part.uncompressed_length is None
        and part.length is not None
        and 0 < part.length == prod(shape) * ITEM_BYTES.get(part.dtype, 0) < 2**63
        and len(shape) <= MAX_RANK
        and min(shape, default=1) > 0
    )


def _check_parts(spec: TensorSpec) -> None:
    roles = [part.role for part in spec.parts]
    if len(set(roles)) != len(roles):
        raise FormatError("zt.duplicate-role", f"expected every role once, found {roles}")
    for part in spec.parts:
        if part.encoding not in ENCODINGS:
            raise FormatError(
                "zt.encoding-unknown", f"expected encoding {' or '.join(ENCODINGS)}, found {part.encoding!r}"
            )
    entry = _convert(describe(spec, {}, [Blob(64, _placeholder_length(part)) for part in spec.parts]))
    if all(part.nbytes is not None for part in spec.parts):
        check_object(_FILE_LABEL, spec.name, entry)
    else:  # sizes that depend on the bytes are checked when the tensor ends
        for role, component in entry.components.items():
            check_part(_FILE_LABEL, spec.name, role, component)
    missing = [role for role in REQUIRED_PARTS.get(file_id(spec.codec), ()) if role not in roles]
    if missing:
        raise FormatError(
            "zt.part-missing", f"expected a part {missing[0]!r} in a {spec.codec} tensor, but it is missing"
        )
    if spec.codec == DenseLayout.codec and _derived_dtype(spec) != spec.dtype:
        raise FormatError("zt.dtype-conflict", f"expected data of {spec.dtype}, found {_derived_dtype(spec)}")


def _placeholder_length(part: PartSpec) -> int:
    """Return a part's length; if it is unknown, the smallest length that the rules permit."""
    if part.length is not None:
        return part.length
    return 0 if part.encoding == "raw" else (part.uncompressed_length or 0) // MAX_ZSTD_RATIO + 1


def _convert(entry: Mapping[str, Any]) -> Object:
    try:
        return msgspec.convert(entry, Object)
    except msgspec.ValidationError as error:
        raise FormatError("zt.field-range", str(error)) from error


def check_written(spec: TensorSpec, entry: Mapping[str, Any]) -> None:
    """Raise ``FormatError`` if the finished tensor breaks a rule; a wrong size is found here at the latest."""
    if not (is_plain(spec) and entry["components"][DATA]["length"] == spec.parts[0].length):
        check_object(_FILE_LABEL, spec.name, _convert(entry))


def _derived_dtype(spec: TensorSpec) -> str:
    return logical_dtype(spec.codec, spec.params, {part.role: (part.dtype, part.type) for part in spec.parts})


def layout_order(parts: Sequence[PartSpec]) -> Sequence[int]:
    """Return the order of parts in the file: parts of known length first, then the others, each in the spec's order."""
    return sorted(range(len(parts)), key=lambda index: parts[index].length is None)


def attributes_of(spec: TensorSpec) -> dict[str, Any]:
    """Return the attributes of the object: the codec's parameters, and ``dtype`` if it does not follow from the
    parts."""
    attributes = dict(spec.params)
    if spec.codec != DenseLayout.codec and _derived_dtype(spec) != spec.dtype:
        attributes["dtype"] = spec.dtype
    return attributes


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digest: str | None) -> int:
    """Return the exact number of bytes of the file; an unknown length counts as its maximum."""
    placeholder = None if digest is None else checksums.digest(digest, b"")
    tail = len(MAGIC)
    entries_bytes = 0
    sizes: dict[tuple[Any, ...], int] = {}
    for spec in specs:
        entries_bytes += len(cbor.dumps(spec.name))
        if not is_plain(spec):
            size, tail = _entry_bytes(spec, tail, digest, placeholder)
            entries_bytes += size
            continue
        length = spec.parts[0].length or 0
        start = align(tail)
        key = spec.shape, spec.dtype, start.bit_length()  # the encoded size of an offset depends on its bits
        if key not in sizes:
            sizes[key] = _entry_bytes(spec, tail, digest, placeholder)[0]
        entries_bytes += sizes[key]
        tail = start + length
    return tail + entries_bytes + sum(map(len, frame(len(specs), metadata, digest))) + FOOTER


def _entry_bytes(spec: TensorSpec, tail: int, digest: str | None, placeholder: str | None) -> tuple[int, int]:
    """Return the bytes of a tensor's encoded entry without its name, and the end of its parts in the file."""
    parts, open_ended = spec.parts, any(part.length is None for part in spec.parts)
    ordered: Sequence[int] = range(len(parts))
    if open_ended:
        parts = tuple(replace(part, length=part.at_most) if part.length is None else part for part in parts)
        ordered = layout_order(spec.parts)
    offsets, tail = assign_offsets(tail, [parts[index].length or 0 for index in ordered])
    offset_by_part = dict(zip(ordered, offsets, strict=True))
    blobs = [
        Blob(offset_by_part[index], part.length or 0, placeholder, chunk_digests.stand_in(digest, part.length or 0))
        for index, part in enumerate(parts)
    ]
    complete_spec = replace(spec, parts=parts) if open_ended else spec
    return entry_size(describe(complete_spec, attributes_of(spec), blobs)), tail
