"""The manifest of a container of version 2 as columns: native code decodes each field of all tensors into one array.

Checks run on the arrays of all tensors together. An ``Object`` is built only for a tensor that is accessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ingot.core.numeric.dtypes import DTYPES, MAX_RANK
from ingot.core.parsing import cbor
from ingot.core.parsing.columns import (
    Array,
    Column,
    DigestSyntax,
    Rows,
    are_digests,
    cbor_table,
    field,
    map_texts,
    mapping,
    numbers,
    record,
)
from ingot.errors import FormatError
from ingot.formats.shared.dense_columns import DenseColumns, Flags, plain_dense
from ingot.formats.shared.manifests import has_maps
from ingot.formats.zt2.manifest import MAX_NAME, Blob, Manifest, Object, parse
from ingot.formats.zt2.types import ITEM_BYTES, LOGICAL_TYPES, storage_of
from ingot.model.layouts.dense import DATA

# The order of fields is that of the deterministic encoding.
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
DIGESTS = DigestSyntax(((b"xxh3:", 16), (b"sha256:", 64)), b"0123456789abcdef")
_MAX_ELEMENTS = 1 << 55  # elements of up to 128 bits; larger tensors need the detailed check
_BITS = {stored: DTYPES[name].bits for stored, name in LOGICAL_TYPES.items()}


class PartColumns(NamedTuple):
    """The fields of all parts of a manifest, one column per field, in the order of tensors; -1 for an absent value."""

    blob: Column
    type: Column
    dtype: Column
    shard: Column
    digest: Column
    encoding: Column
    decoded: Column


@dataclass(frozen=True, slots=True)
class Columns:
    """The fields of all tensors of a manifest, one column per field; their types were checked."""

    data: bytes
    rows: Mapping[str, int]
    roles: Column
    shape: Column
    layout: Column
    attributes: Column
    parts: PartColumns

    def dense(self) -> DenseColumns:
        """Return the dense tensors that have one raw part in the manifest's file and no fields besides an optional
        digest."""
        parts = self.parts
        starts = self.roles.first
        absent = parts.type, parts.shard, parts.encoding, parts.decoded
        simple = plain_dense(self.layout, self.attributes, starts, *absent)
        columns = parts.dtype, parts.blob.first, parts.blob.second, parts.digest
        return DenseColumns.of_parts((self.data, self.rows, self.shape), starts, simple, columns)

    def suspects(self) -> list[str]:
        """Return the names of the tensors that ``check_object`` must check; the columns prove that all others are
        valid.
        """
        names = [*self.rows]
        return [names[row] for row in np.flatnonzero(self._suspects(names))]

    def object(self, row: int) -> Object:
        """Return the manifest's object in row ``row``."""
        attributes = self.attributes.span(row)
        roles = self.roles
        return Object(
            self.shape.sizes(row),
            self.layout.text(row) or "",
            {roles.texts[roles.second[part]]: self._part(part) for part in roles.children(row)},
            msgspec.UNSET if attributes is None else cbor.loads(self.data[attributes]),
        )

    def _part(self, part: int) -> Blob:
        columns = self.parts
        digest = columns.digest.span(part)
        decoded = columns.decoded.first[part]
        return Blob(
            columns.dtype.text(part) or "",
            (columns.blob.first[part], columns.blob.second[part]),
            _unset(columns.type.text(part)),
            _unset(columns.shard.text(part)),
            _unset(columns.encoding.text(part)),
            msgspec.UNSET if decoded < 0 else decoded,
            msgspec.UNSET if digest is None else self.data[digest].decode(),
        )

    def _suspects(self, names: list[str]) -> Flags:
        """Return for each tensor whether ``check_object`` must check it.

        A valid dense tensor in one raw part of the right size needs no check.
        """
        starts = numbers(self.roles.first)
        parts = self.parts
        counts = numbers(self.shape.third)
        simple = plain_dense(self.layout, self.attributes, self.roles.first, parts.encoding, parts.decoded)
        simple &= (counts <= _MAX_ELEMENTS) & (np.diff(numbers(self.shape.second)) <= MAX_RANK)
        if not all(0 < 4 * size <= MAX_NAME for size in set(map(len, names))) or "\0" in "".join(names):
            simple &= np.array([0 < 4 * len(name) <= MAX_NAME and "\0" not in name for name in names], bool)
        rows = np.flatnonzero(simple)
        first_parts = starts[rows]
        is_valid = _is_data(self.roles) & are_digests(parts.digest, self.data, DIGESTS)
        is_valid[first_parts] &= numbers(parts.blob.second)[first_parts] == self._bytes(counts[rows], first_parts)
        suspects: Flags = np.ones(counts.size, bool)
        suspects[rows] = ~is_valid[first_parts]
        return suspects

    def _bytes(self, counts: Array, indices: Array) -> Array:
        """Return the sizes in bytes of the parts at ``indices``, which have ``counts`` elements.

        A size of -1 means that the part needs the detailed check.
        """
        parts = self.parts
        items = map_texts(parts.dtype, ITEM_BYTES, 0)[indices] * 8
        types = numbers(parts.type.first)[indices]
        storage = [storage_of(text) for text in parts.type.texts]
        fits = np.array([[expected == stored for stored in parts.dtype.texts] for expected in storage], bool)
        bits = np.where(types < 0, items, map_texts(parts.type, _BITS, 0)[indices])
        has_type = types >= 0
        bits[has_type] *= fits[types[has_type], numbers(parts.dtype.first)[indices][has_type]] if has_type.any() else 1
        nbytes: Array = np.where((bits > 0) & (bits % 8 == 0) & (items > 0), counts * (bits // 8), -1)
        return nbytes


def _is_data(roles: Column) -> Flags:
    """Return for each part whether it has the role ``data``."""
    code = roles.texts.index(DATA) if DATA in roles.texts else -1
    result: Flags = numbers(roles.second) == code
    return result


def _unset(text: str | None) -> str | msgspec.UnsetType:
    return msgspec.UNSET if text is None else text


class Objects(Rows[Object]):
    """The objects of a manifest, in file order; built on access."""

    __slots__ = ("columns",)

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns.rows, columns.object)
        self.columns = columns


def decode(data: bytes, file: str) -> Manifest:
    """Return a decoded and type-checked manifest.

    A typical manifest is decoded into columns, any other by the detailed parser.

    Raises
    ------
    FormatError
        The errors of ``parse``.
    """
    limits: Mapping[str, Any] = {"max_depth": cbor.MAX_DEPTH, "max_items": cbor.MAX_ITEMS, "deterministic": True}
    table = cbor_table(data, _OBJECT, "objects", **limits)
    if table is not None:
        roles, shape, layout, attributes = table.columns
        columns = Columns(data, table.rows, roles, shape, layout, attributes, PartColumns(*roles.inner[0].inner))
        if has_maps(attributes, data):
            try:
                root = parse(table.remainder, file, max_items=cbor.MAX_ITEMS // 8)
                return msgspec.structs.replace(root, objects=Objects(columns))
            except FormatError:
                pass  # the detailed parser reports the error
    return parse(data, file)
