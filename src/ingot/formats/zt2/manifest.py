"""The manifest (section 3): its schema, typed. Fields that the document does not name are ignored, as it asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from ingot.core import cbor
from ingot.core.structs import warm
from ingot.errors import FormatError

Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@warm
class Blob(msgspec.Struct, frozen=True, gc=False):
    """One part: where its bytes lie, and what they are. ``shard`` names a file of the table, none the file itself.

    Lengths and offsets fit 63 bits, as file offsets do.
    """

    dtype: str
    blob: tuple[Unsigned, Unsigned]
    type: str | msgspec.UnsetType = msgspec.UNSET
    shard: str | msgspec.UnsetType = msgspec.UNSET
    encoding: str | msgspec.UnsetType = msgspec.UNSET
    decoded_length: Unsigned | msgspec.UnsetType = msgspec.UNSET
    digest: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def nbytes(self) -> int:
        """Bytes after decoding the encoding."""
        return self.blob[1] if self.decoded_length is msgspec.UNSET else self.decoded_length


@warm
class Object(msgspec.Struct, frozen=True, gc=False):
    """One tensor; ``layout`` says how its parts make values."""

    shape: tuple[Unsigned, ...]
    layout: str
    parts: dict[str, Blob]
    attributes: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


@warm
class Shard(msgspec.Struct, frozen=True, gc=False):
    """Another file that parts lie in: its exact size, and the digest of all of it."""

    size: Unsigned
    digest: str


@warm
class Manifest(msgspec.Struct, frozen=True, gc=False):
    """The root."""

    objects: dict[str, Object]
    attributes: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    shards: dict[str, Shard] | msgspec.UnsetType = msgspec.UNSET


def stated(value: Any) -> Any:
    """Return an optional field, None where it is absent."""
    return None if value is msgspec.UNSET else value


def label(file: str, name: str, role: str | None = None) -> str:
    """Return how messages name a tensor or part; hostile names are cut."""
    text = f"{file}: tensor {name[:200]!r}"
    return text if role is None else f"{text} part {role[:80]!r}"


def parse(data: bytes | bytearray | memoryview, file: str) -> Manifest:
    """Decode and type-check a manifest.

    Raises
    ------
    FormatError
        ``cbor.*``, ``zt2.field-missing``, ``zt2.field-type``, ``zt2.field-range``.
    """
    root = cbor.loads(data, where=f"{file}: manifest", deterministic=True)
    try:
        return msgspec.convert(root, Manifest)
    except msgspec.ValidationError as error:
        raise _blame(root, error, file) from None


def _blame(root: Any, error: msgspec.ValidationError, file: str) -> FormatError:
    """Find the tensor and part that broke the schema; the message of a whole-manifest check does not name them."""
    where = f"{file}: manifest"
    for where_found, value, kind in _pieces(root, file):
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as found:
            error, where = found, where_found
            break
    return FormatError(_rule(str(error)), str(error), where=where)


def _pieces(root: Any, file: str) -> Iterable[tuple[str, Any, type]]:
    objects = root.get("objects") if isinstance(root, dict) else None
    for name, value in objects.items() if isinstance(objects, dict) else ():
        parts = value.get("parts") if isinstance(value, dict) else None
        for role, part in parts.items() if isinstance(parts, dict) else ():
            yield label(file, name, role), part, Blob
        yield label(file, name), value, Object


def _rule(message: str) -> str:
    if "missing required field" in message:
        return "zt2.field-missing"
    return "zt2.field-range" if "`int` >=" in message or "`int` <=" in message else "zt2.field-type"
