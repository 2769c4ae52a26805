"""Checks before writing: the reader's rules, applied to a tensor before its bytes exist, and again at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ingot.core.bytes.encodings import SEEKABLE, SEEKABLE_LEAST
from ingot.core.parsing import cbor
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.formats.zt.rules import logical_dtype
from ingot.formats.zt.specs import is_plain
from ingot.formats.zt2.layout import CANONICAL
from ingot.formats.zt2.manifest import MAX_NAME, Object
from ingot.formats.zt2.profiles import stored_form, written_forms
from ingot.formats.zt2.rules import check_names, check_object, utf8_bytes
from ingot.formats.zt2.types import ITEM_BYTES, WrittenForm, types_for_file, types_from_file
from ingot.model.spec import PartSpec, TensorSpec

_FILE_LABEL = "to be written"
ALGORITHMS = {None: None, "crc32c": "xxh3", "sha256": "sha256"}
"""The algorithm of written digests by the requested algorithm: for speed, CRC-32C is replaced by XXH3."""


class PartLocation(NamedTuple):
    """The byte range of a part, and its digest; ``shard`` names the part's file if it is not the manifest's file."""

    offset: int
    length: int
    digest: str | None = None
    shard: str | None = None


def canonical_parts(spec: TensorSpec, written: WrittenForm) -> list[PartSpec]:
    """Return a tensor's parts in the order of the canonical form: sorted by their roles in the file, as bytes."""
    return sorted(spec.parts, key=lambda part: written.roles.get(part.role, part.role).encode())


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why the container cannot store the tensor; None if it can."""
    if is_simple(spec):
        return None
    try:
        written_form(spec)
    except IngotError as error:
        return error.message
    return None


def breaks_no_rule(name: str) -> bool:
    """Return whether a tensor's name is certainly valid.

    False means that ``check_names`` must decide.
    """
    return 0 < 4 * len(name) <= MAX_NAME and "\0" not in name and (name.isascii() or utf8_bytes(name) > 0)


def is_simple(spec: TensorSpec) -> bool:
    """Return whether a tensor is certainly valid, because it is ``is_dense_raw``, like most tensors."""
    return breaks_no_rule(spec.name) and is_dense_raw(spec)


def is_dense_raw(spec: TensorSpec) -> bool:
    """Return whether ``spec`` is a dense tensor of a storage type in one raw part; it is valid if its name is valid."""
    return spec.dtype in ITEM_BYTES and is_plain(spec)


def written_form(spec: TensorSpec) -> WrittenForm:
    """Return the form in which a tensor is written, from which a reader reads the same tensor.

    Raises ``UnsupportedError`` with the reader's rule if the reader would refuse the tensor; ``zt2.encoding``,
    ``zt2.duplicate-role``, ``zt2.meaning``.
    """
    roles = [part.role for part in spec.parts]
    if len(set(roles)) != len(roles):
        raise UnsupportedError(f"expected every role once, found {roles}", rule="zt2.duplicate-role", where=spec.name)
    unsupported = [part.encoding for part in spec.parts if part.encoding not in ("raw", SEEKABLE)]
    if unsupported:
        raise UnsupportedError(
            f"expected encoding raw or {SEEKABLE}, found {unsupported[0][:80]!r}", rule="zt2.encoding", where=spec.name
        )
    try:
        for written in written_forms(spec):
            for candidate in (written, written._replace(attributes={**written.attributes, "dtype": spec.dtype})):
                if _reads_equal(spec, candidate):
                    return candidate
    except (FormatError, UsageError) as error:
        raise UnsupportedError(error.message, rule=error.rule, where=error.where or spec.name) from error
    raise UnsupportedError(
        f"expected a codec that a layout profile can express, found {spec.codec[:80]!r} of {spec.dtype}, which a "
        "reader "
        "would not read as the same tensor",
        rule="zt2.meaning",
        where=spec.name,
    )


def _reads_equal(spec: TensorSpec, written: WrittenForm) -> bool:
    """Return whether a reader would get the tensor ``spec`` back from ``written``; raises the reader's errors."""
    entry = describe(
        spec, written, {part.role: PartLocation(CANONICAL, _placeholder_length(part)) for part in spec.parts}
    )
    cbor.dumps(entry, sort=True)
    obj = _convert(entry)
    if all(part.nbytes is not None for part in spec.parts):
        check_object(_FILE_LABEL, spec.name, obj)
    else:  # sizes that depend on the bytes are checked when the tensor ends
        check_names(spec.name, (spec.name, *obj.parts, *written.attributes))
    stored = stored_form(obj)
    types = {
        stored.roles.get(role, role): types_from_file(part.dtype, None if part.type is msgspec.UNSET else part.type)
        for role, part in obj.parts.items()
    } | dict(stored.types)
    part_types = {part.role: (part.dtype, None if part.type == part.dtype else part.type) for part in spec.parts}
    if types != part_types or stored.codec != spec.codec or stored.converted:
        return False
    if logical_dtype(stored.codec, stored.attributes, part_types) != spec.dtype:
        return False
    return bool(_encoded_attributes(stored.attributes) == _encoded_attributes(spec.params))


def _encoded_attributes(attributes: Mapping[str, Any]) -> Any:
    """Return attributes after encoding and decoding them, without ``dtype``, which is compared separately."""
    compared = {key: value for key, value in attributes.items() if key != "dtype"}
    return cbor.loads(cbor.dumps(compared, sort=True))


def _placeholder_length(part: PartSpec) -> int:
    """Return the length of a part, or a placeholder if it is unknown."""
    if part.length is not None:
        return part.length
    return 0 if part.encoding == "raw" else SEEKABLE_LEAST


def _convert(entry: Mapping[str, Any]) -> Object:
    try:
        return msgspec.convert(entry, Object)
    except msgspec.ValidationError as error:
        raise FormatError("zt2.field-range", str(error)) from error


def check_written(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ``FormatError`` if the finished tensor breaks a rule; a wrong size is found here at the latest."""
    check_object(_FILE_LABEL, name, _convert(entry))


def describe(spec: TensorSpec, written: WrittenForm, locations: Mapping[str, PartLocation]) -> dict[str, Any]:
    """Return the manifest's entry for a tensor whose parts have these ``locations``, by role."""
    parts = {}
    for part in spec.parts:
        offset, length, digest, shard = locations[part.role]
        dtype, type_ = written.types.get(part.role) or types_for_file(part.dtype, part.type)
        optional = {
            "type": type_,
            "shard": shard,
            "encoding": None if part.encoding == "raw" else part.encoding,
            "decoded_length": None if part.encoding == "raw" else part.uncompressed_length,
            "digest": digest,
        }
        present = {key: value for key, value in optional.items() if value is not None}
        parts[written.roles.get(part.role, part.role)] = {"dtype": dtype, "blob": [offset, length], **present}
    entry: dict[str, Any] = {"shape": list(spec.shape), "layout": written.layout, "parts": parts}
    return {**entry, "attributes": dict(written.attributes)} if written.attributes else entry
