"""A manifest in columns: decoded and checked at once in native code, objects made of them when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ingot.core.bytes.checked import MAX_RANK
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing import cbor
from ingot.core.parsing.columns import (
    Array,
    Column,
    Rows,
    Spelling,
    cbor_table,
    chosen,
    field,
    mapping,
    numbers,
    record,
    spelled,
)
from ingot.errors import FormatError
from ingot.formats.shared.dense_columns import DenseColumns, Flags, plain_dense
from ingot.formats.shared.manifests import has_maps
from ingot.formats.zt2.manifest import MAX_NAME, Blob, Manifest, Object, parse
from ingot.formats.zt2.types import ITEM_BYTES, KNOWN, storage_of
from ingot.model.layouts.dense import DATA

# In the order of the deterministic encoding.
_PART = record(
    field("blob", "pair"),
    field("type", "text", optional=True),
    field("dtype", "text"),
    field("shard", "text", optional=True),
    field("digest", "place", optional=True),
    field("encoding", "text", optional=True),
    field("decoded_length", "number", optional=True),
)
_OBJECT = record(
    field("parts", mapping(_PART)),
    field("shape", "sizes"),
    field("layout", "text"),
    field("attributes", "any", optional=True),
)
DIGESTS = Spelling(((b"xxh3:", 16), (b"sha256:", 64)), b"0123456789abcdef")
_MANY = 1 << 55  # elements, of up to 128 bits; nothing so large is told without a closer look
_BITS = {stored: DTYPES[name].bits for stored, name in KNOWN.items()}


class PartColumns(NamedTuple):
    """Columns of all parts, those of an object after each other; -1 for what is absent."""

    blob: Column
    type: Column
    dtype: Column
    shard: Column
    digest: Column
    encoding: Column
    decoded: Column


@dataclass(frozen=True, slots=True)
class Columns:
    """Everything that a manifest says of its tensors, of the right types."""

    data: bytes
    rows: Mapping[str, int]
    roles: Column
    shape: Column
    layout: Column
    attributes: Column
    parts: PartColumns

    def dense(self) -> DenseColumns:
        """Return the dense tensors in one raw part of the manifest's file that states nothing more than its digest."""
        parts, starts = self.parts, self.roles.first
        absent = parts.type, parts.shard, parts.encoding, parts.decoded
        simple = plain_dense(self.layout, self.attributes, starts, *absent)
        columns = parts.dtype, parts.blob.first, parts.blob.second, parts.digest
        return DenseColumns.of_parts((self.data, self.rows, self.shape), starts, simple, columns)

    def suspects(self) -> list[str]:
        """Return the names of the objects that may break a rule of ``check_object``; no other does."""
        names = [*self.rows]
        return [names[row] for row in np.flatnonzero(self._odd(names))]

    def object(self, row: int) -> Object:
        """Return one object."""
        attributes, roles = self.attributes.span(row), self.roles
        return Object(
            self.shape.sizes(row),
            self.layout.text(row) or "",
            {roles.texts[roles.second[part]]: self._part(part) for part in roles.children(row)},
            msgspec.UNSET if attributes is None else cbor.loads(self.data[attributes]),
        )

    def _part(self, part: int) -> Blob:
        columns = self.parts
        digest, decoded = columns.digest.span(part), columns.decoded.first[part]
        return Blob(
            columns.dtype.text(part) or "",
            (columns.blob.first[part], columns.blob.second[part]),
            _unset(columns.type.text(part)),
            _unset(columns.shard.text(part)),
            _unset(columns.encoding.text(part)),
            msgspec.UNSET if decoded < 0 else decoded,
            msgspec.UNSET if digest is None else self.data[digest].decode(),
        )

    def _odd(self, names: list[str]) -> Flags:
        """Return which objects are not plainly fine: dense ones in one raw part of the right size, as most are."""
        starts, parts, counts = numbers(self.roles.first), self.parts, numbers(self.shape.third)
        fine = plain_dense(self.layout, self.attributes, self.roles.first, parts.encoding, parts.decoded)
        fine &= (counts <= _MANY) & (np.diff(numbers(self.shape.second)) <= MAX_RANK)
        if not all(0 < 4 * size <= MAX_NAME for size in set(map(len, names))) or "\0" in "".join(names):
            fine &= np.array([0 < 4 * len(name) <= MAX_NAME and "\0" not in name for name in names], bool)
        rows = np.flatnonzero(fine)
        at = starts[rows]
        good = _is_data(self.roles) & spelled(parts.digest, self.data, DIGESTS)
        good[at] &= numbers(parts.blob.second)[at] == self._bytes(counts[rows], at)
        odd: Flags = np.ones(counts.size, bool)
        odd[rows] = ~good[at]
        return odd

    def _bytes(self, counts: Array, at: Array) -> Array:
        """Return the bytes of so many elements of the types of these parts; -1 where that has to be looked at."""
        parts = self.parts
        items, types = chosen(parts.dtype, ITEM_BYTES, 0)[at] * 8, numbers(parts.type.first)[at]
        storage = [storage_of(text) for text in parts.type.texts]
        fits = np.array([[kind == stored for stored in parts.dtype.texts] for kind in storage], bool)
        bits = np.where(types < 0, items, chosen(parts.type, _BITS, 0)[at])
        typed = types >= 0
        bits[typed] *= fits[types[typed], numbers(parts.dtype.first)[at][typed]] if typed.any() else 1
        found: Array = np.where((bits > 0) & (bits % 8 == 0) & (items > 0), counts * (bits // 8), -1)
        return found


def _is_data(roles: Column) -> Flags:
    """Return which parts are called ``data``."""
    number = roles.texts.index(DATA) if DATA in roles.texts else -1
    own: Flags = numbers(roles.second) == number
    return own


def _unset(text: str | None) -> str | msgspec.UnsetType:
    return msgspec.UNSET if text is None else text


class Objects(Rows[Object]):
    """The objects of a manifest, in file order; made when they are asked for."""

    __slots__ = ("columns",)

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns.rows, columns.object)
        self.columns = columns


def decode(data: bytes, file: str) -> Manifest:
    """Decode and type-check a manifest. What writers make is decoded into columns, anything else is looked at closely.

    Raises
    ------
    FormatError
        As of ``parse``.
    """
    limits: Mapping[str, Any] = {"max_depth": cbor.MAX_DEPTH, "max_items": cbor.MAX_ITEMS, "deterministic": True}
    table = cbor_table(data, _OBJECT, "objects", **limits)
    if table is not None:
        roles, shape, layout, attributes = table.columns
        columns = Columns(data, table.rows, roles, shape, layout, attributes, PartColumns(*roles.inner[0].inner))
        if has_maps(attributes, data):
            try:
                rest = parse(table.rest, file, max_items=cbor.MAX_ITEMS // 8)
                return msgspec.structs.replace(rest, objects=Objects(columns))
            except FormatError:
                pass  # said below, of the whole
    return parse(data, file)
