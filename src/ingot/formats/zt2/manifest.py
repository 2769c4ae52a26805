"""The manifest (section 3): its schema, typed. Fields that the document does not name are ignored, as it asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ingot.core import cbor
from ingot.core.structs import warm
from ingot.formats.manifests import Schema

MAX_NAME = 1024
"""Bytes of a name."""
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

    objects: Mapping[str, Object]
    attributes: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    shards: dict[str, Shard] | msgspec.UnsetType = msgspec.UNSET


def stated(value: Any) -> Any:
    """Return an optional field, None where it is absent."""
    return None if value is msgspec.UNSET else value


_SCHEMA = Schema("zt2", Object, "parts", Blob)


def parse(data: bytes | bytearray | memoryview, file: str, *, max_items: int = cbor.MAX_ITEMS) -> Manifest:
    """Decode and type-check a manifest.

    Raises
    ------
    FormatError
        ``cbor.*``, ``zt2.field-missing``, ``zt2.field-type``, ``zt2.field-range``.
    """
    root = cbor.loads(data, where=f"{file}: manifest", max_items=max_items, deterministic=True)
    try:
        return msgspec.convert(root, Manifest)
    except msgspec.ValidationError as error:
        raise _SCHEMA.blame(root, error, file) from None
