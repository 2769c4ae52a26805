"""What may be written: the reader's own rules, applied to a tensor before its bytes exist, and again when they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ingot.core import cbor
from ingot.core.encodings import SEEKABLE, SEEKABLE_LEAST
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.formats.zt.rules import logical_dtype
from ingot.formats.zt.specs import is_plain
from ingot.formats.zt2.layout import CANONICAL
from ingot.formats.zt2.manifest import MAX_NAME, Object
from ingot.formats.zt2.meaning import Written
from ingot.formats.zt2.profiles import meaning, ways
from ingot.formats.zt2.rules import check_names, check_object, utf8_bytes
from ingot.formats.zt2.types import ITEM_BYTES, types_here, types_stored
from ingot.model.spec import PartSpec, TensorSpec

_HERE = "to be written"
ALGORITHMS = {None: None, "crc32c": "xxh3", "sha256": "sha256"}
"""The digest that is written, by the one that is asked for: the quick one here is XXH3."""


class Placed(NamedTuple):
    """Where a part lies and its digest; ``shard`` names another file than that of the manifest."""

    offset: int
    length: int
    digest: str | None = None
    shard: str | None = None


def in_order(spec: TensorSpec, written: Written) -> list[PartSpec]:
    """Return a tensor's parts in the order of the canonical form: by the bytes of their roles in the file."""
    return sorted(spec.parts, key=lambda part: written.roles.get(part.role, part.role).encode())


def refusal(spec: TensorSpec) -> str | None:
    """Return why the container cannot carry the tensor; None if it can."""
    if is_simple(spec):
        return None
    try:
        written_as(spec)
    except IngotError as error:
        return error.message
    return None


def breaks_no_rule(name: str) -> bool:
    """Whether it is plain that the container takes a tensor's name; False where that deserves a closer look."""
    return 0 < 4 * len(name) <= MAX_NAME and "\0" not in name and (name.isascii() or utf8_bytes(name) > 0)


def is_simple(spec: TensorSpec) -> bool:
    """Whether it is plain that a tensor breaks no rule: of many most are ``is_dense_raw``."""
    return breaks_no_rule(spec.name) and is_dense_raw(spec)


def is_dense_raw(spec: TensorSpec) -> bool:
    """Whether this is a dense tensor of a storage type in one raw part, which breaks no rule whatever its name."""
    return spec.dtype in ITEM_BYTES and is_plain(spec)


def written_as(spec: TensorSpec) -> Written:
    """Return how a tensor is written, so that a reader finds the same one.

    Raises ``UnsupportedError`` with the reader's rule unless it would accept the tensor; ``zt2.encoding``,
    ``zt2.duplicate-role``, ``zt2.meaning``.
    """
    roles = [part.role for part in spec.parts]
    if len(set(roles)) != len(roles):
        raise UnsupportedError(f"expected every role once, found {roles}", rule="zt2.duplicate-role", where=spec.name)
    strange = [part.encoding for part in spec.parts if part.encoding not in ("raw", SEEKABLE)]
    if strange:
        raise UnsupportedError(
            f"expected encoding raw or {SEEKABLE}, found {strange[0][:80]!r}", rule="zt2.encoding", where=spec.name
        )
    try:
        for written in ways(spec):
            for way in (written, written._replace(attributes={**written.attributes, "dtype": spec.dtype})):
                if _means_same(spec, way):
                    return way
    except (FormatError, UsageError) as error:
        raise UnsupportedError(error.message, rule=error.rule, where=error.where or spec.name) from error
    raise UnsupportedError(
        f"expected a layout that says what codec {spec.codec[:80]!r} of {spec.dtype} is, found none that a reader "
        "would take for the same",
        rule="zt2.meaning",
        where=spec.name,
    )


def _means_same(spec: TensorSpec, written: Written) -> bool:
    """Whether a reader finds the tensor in what is written of it; refuses, by its rules, what it would refuse."""
    entry = describe(spec, written, {part.role: Placed(CANONICAL, _stand_in(part)) for part in spec.parts})
    cbor.dumps(entry, sort=True)
    obj = _convert(entry)
    if all(part.nbytes is not None for part in spec.parts):
        check_object(_HERE, spec.name, obj)
    else:  # sizes that only the bytes tell are checked when the tensor ends
        check_names(spec.name, (spec.name, *obj.parts, *written.attributes))
    found = meaning(obj)
    types = {
        found.roles.get(role, role): types_here(part.dtype, None if part.type is msgspec.UNSET else part.type)
        for role, part in obj.parts.items()
    } | dict(found.types)
    own = {part.role: (part.dtype, None if part.type == part.dtype else part.type) for part in spec.parts}
    if types != own or found.codec != spec.codec or found.made:
        return False
    if logical_dtype(found.codec, found.attributes, own) != spec.dtype:
        return False
    return bool(_stored(found.attributes) == _stored(spec.params))


def _stored(attributes: Mapping[str, Any]) -> Any:
    """Return attributes as they are after they were written and read; the element type is compared by itself."""
    kept = {key: value for key, value in attributes.items() if key != "dtype"}
    return cbor.loads(cbor.dumps(kept, sort=True))


def _stand_in(part: PartSpec) -> int:
    """A stored length for one that is not known yet."""
    if part.length is not None:
        return part.length
    return 0 if part.encoding == "raw" else SEEKABLE_LEAST


def _convert(entry: Mapping[str, Any]) -> Object:
    try:
        return msgspec.convert(entry, Object)
    except msgspec.ValidationError as error:
        raise FormatError("zt2.field-range", str(error)) from error


def check_written(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ``FormatError`` unless the finished tensor keeps every rule: wrong sizes show here at the latest."""
    check_object(_HERE, name, _convert(entry))


def describe(spec: TensorSpec, written: Written, places: Mapping[str, Placed]) -> dict[str, Any]:
    """Return the manifest's entry for a tensor whose parts lie at ``places``, by role."""
    parts = {}
    for part in spec.parts:
        offset, length, digest, shard = places[part.role]
        dtype, kind = written.types.get(part.role) or types_stored(part.dtype, part.type)
        optional = {
            "type": kind,
            "shard": shard,
            "encoding": None if part.encoding == "raw" else part.encoding,
            "decoded_length": None if part.encoding == "raw" else part.uncompressed_length,
            "digest": digest,
        }
        stated = {key: value for key, value in optional.items() if value is not None}
        parts[written.roles.get(part.role, part.role)] = {"dtype": dtype, "blob": [offset, length], **stated}
    entry: dict[str, Any] = {"shape": list(spec.shape), "layout": written.layout, "parts": parts}
    return {**entry, "attributes": dict(written.attributes)} if written.attributes else entry
