"""The manifest (section 3): its schema, typed. Fields that the document does not name are ignored, as it asks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ingot.core import cbor
from ingot.core.structs import warm
from ingot.formats.manifests import Schema

MAX_NAME = 1024
"""Bytes of a name."""
_MAP = 5 << 5  # CBOR's major type, in a head's first byte
_AT_ONCE = 1 << 12  # entries that are written together
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


_SCHEMA = Schema(Object, "parts", Blob, "zt2.field-missing", "zt2.field-type", "zt2.field-range")


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


class Entries:
    """Entries of a manifest as they will be written, in any order: what they say takes far more memory."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._starts, self._data = array("q", (0,)), bytearray()

    def add(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add the entry of a tensor, each name once; errors as ``cbor.dumps``."""
        self._data += cbor.dumps([{name: entry}], sort=True)[2:]  # as deep as it lies in the root
        self._names.append(name)
        self._starts.append(len(self._data))

    def update(self, others: Entries) -> None:
        """Add those of others, whose names are other ones."""
        end = len(self._data)
        self._names += others._names
        self._starts.extend(end + start for start in others._starts[1:])
        self._data += others._data

    def manifest(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the bytes of a manifest with these entries, in pieces; the same entries give the same, in any order."""
        before, behind = around(len(self._names), metadata, shards)
        yield before
        view, starts = memoryview(self._data), self._starts
        order = self._in_order()
        for first in range(0, len(order), _AT_ONCE):
            yield b"".join(view[starts[at] : starts[at + 1]] for at in order[first : first + _AT_ONCE])
        yield behind

    def size(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> int:
        """Return the bytes of a manifest with these entries."""
        return len(self._data) + sum(map(len, around(len(self._names), metadata, shards)))

    def _in_order(self) -> list[int]:
        """Return the entries as the deterministic encoding has them: by the bytes of names, whose number comes first.

        Names compare as their bytes do in UTF-8.
        """
        by_length: dict[int, list[int]] = {}
        for at, name in enumerate(self._names):
            by_length.setdefault(len(name.encode()), []).append(at)
        return [at for size in sorted(by_length) for at in sorted(by_length[size], key=self._names.__getitem__)]


def around(count: int, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return what comes before so many entries in a manifest, and behind them."""
    entries = bytearray(cbor.dumps(count))
    entries[0] |= _MAP  # the head of a map of so many is spelled as the number is
    head = bytes([_MAP | 1 + bool(shards) + bool(metadata)])
    before = head + (_pair("shards", shards) if shards else b"") + cbor.dumps("objects") + entries
    return before, _pair("attributes", metadata) if metadata else b""


def _pair(key: str, value: Any) -> bytes:
    return cbor.dumps({key: value}, sort=True)[1:]
