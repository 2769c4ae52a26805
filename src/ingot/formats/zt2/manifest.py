"""The manifest (section 3) and its typed schema. Unknown fields are ignored, as the document requires."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ingot.core.parsing import cbor
from ingot.core.parsing.strictjson import preload
from ingot.formats.shared.manifests import Schema

MAX_NAME = 1024
"""Maximum bytes of a name."""
_MAP = 5 << 5  # CBOR's major type, in a head's first byte
_ENTRIES_PER_CHUNK = 1 << 12  # entries that are written in one chunk
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@preload
class Blob(msgspec.Struct, frozen=True, gc=False):
    """The manifest's entry for a part: its byte range, types and digest.

    ``shard`` names a file of the table; without it the part is in the same file. Lengths and offsets fit 63 bits, like
    file offsets.
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
        """The number of bytes after decoding."""
        return self.blob[1] if self.decoded_length is msgspec.UNSET else self.decoded_length


@preload
class Object(msgspec.Struct, frozen=True, gc=False):
    """The manifest's entry for a tensor; ``layout`` is the profile that defines values in terms of parts."""

    shape: tuple[Unsigned, ...]
    layout: str
    parts: dict[str, Blob]
    attributes: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


@preload
class Shard(msgspec.Struct, frozen=True, gc=False):
    """The manifest's entry for another file with parts: its exact size, and the digest of the complete file."""

    size: Unsigned
    digest: str


@preload
class Manifest(msgspec.Struct, frozen=True, gc=False):
    """The root map of a decoded manifest."""

    objects: Mapping[str, Object]
    attributes: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    shards: dict[str, Shard] | msgspec.UnsetType = msgspec.UNSET


def optional_value(value: Any) -> Any:
    """Return the value of an optional field; None if it is absent."""
    return None if value is msgspec.UNSET else value


_SCHEMA = Schema(Object, "parts", Blob, "zt2.field-missing", "zt2.field-type", "zt2.field-range")


def parse(data: bytes | bytearray | memoryview, file: str, *, max_items: int = cbor.MAX_ITEMS) -> Manifest:
    """Return a decoded and type-checked manifest.

    Raises
    ------
    FormatError
        ``cbor.*``, ``zt2.field-missing``, ``zt2.field-type``, ``zt2.field-range``.
    """
    root = cbor.loads(data, location=f"{file}: manifest", max_items=max_items, deterministic=True)
    try:
        return msgspec.convert(root, Manifest)
    except msgspec.ValidationError as error:
        raise _SCHEMA.blame(root, error, file) from None


class Entries:
    """Entries of a manifest in encoded form, in any order; as objects they would take far more memory."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._starts = array("q", (0,))
        self._data = bytearray()

    def add(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add the entry of a tensor; each name may occur once. Raises the errors of ``cbor.dumps``."""
        self._data += cbor.dumps([{name: entry}], sort=True)[
            2:
        ]  # wrapped, to check the nesting depth that it has in the root
        self._names.append(name)
        self._starts.append(len(self._data))

    def update(self, entries: Entries) -> None:
        """Add the entries of another object, which must have other names."""
        end = len(self._data)
        self._names += entries._names
        self._starts.extend(end + start for start in entries._starts[1:])
        self._data += entries._data

    def manifest(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the encoded manifest in chunks; its bytes do not depend on the order in which entries were added."""
        before, after = frame(len(self._names), metadata, shards)
        yield before
        view, starts = memoryview(self._data), self._starts
        order = self._in_order()
        for first in range(0, len(order), _ENTRIES_PER_CHUNK):
            yield b"".join(
                view[starts[index] : starts[index + 1]] for index in order[first : first + _ENTRIES_PER_CHUNK]
            )
        yield after

    def size(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> int:
        """Return the number of bytes of a manifest with these entries."""
        return len(self._data) + sum(map(len, frame(len(self._names), metadata, shards)))

    def _in_order(self) -> list[int]:
        """Return the indices of entries in the order of the deterministic encoding: by length, then bytes of the name.

        Names compare like their bytes in UTF-8.
        """
        by_length: dict[int, list[int]] = {}
        for index, name in enumerate(self._names):
            by_length.setdefault(len(name.encode()), []).append(index)
        return [index for size in sorted(by_length) for index in sorted(by_length[size], key=self._names.__getitem__)]


def frame(count: int, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the bytes before and after ``count`` entries in a manifest."""
    entries = bytearray(cbor.dumps(count))
    entries[0] |= _MAP  # the head of a map differs from its count only in the major type
    head = bytes([_MAP | 1 + bool(shards) + bool(metadata)])
    before = head + (_pair("shards", shards) if shards else b"") + cbor.dumps("objects") + entries
    return before, _pair("attributes", metadata) if metadata else b""


def _pair(key: str, value: Any) -> bytes:
    return cbor.dumps({key: value}, sort=True)[1:]
