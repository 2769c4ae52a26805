"""The manifest of a ``.zt`` as columns: native code decodes each field of all tensors into one array.

Checks run on the arrays of all tensors together. An ``Object`` is built only for a tensor that is accessed. Manifests
that the native code does not support are parsed by ``formats.zt.manifest``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from ingot.core.bytes.chunk_digests import DeclaredChunks
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing import cbor
from ingot.core.parsing.columns import (
    Array,
    Column,
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
from ingot.formats.zt.manifest import Component, Manifest, Object, parse
from ingot.formats.zt.rules import ITEM_BYTES, REQUIRED_PARTS
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.sparse import CooLayout, CsrLayout

_COMPONENT = record(
    field("dtype", "text"),
    field("type", "text", optional=True),
    field("offset", "number"),
    field("length", "number"),
    field("uncompressed_length", "number", optional=True),
    field("encoding", "text", optional=True),
    field("digest", "place", optional=True),
    field("ingot_chunks", "any", optional=True),
)
_OBJECT = record(
    field("shape", "sizes"),
    field("format", "text"),
    field("attributes", "any", optional=True),
    field("components", mapping(_COMPONENT)),
)
_MAX_ELEMENTS = 1 << 55
_BITS = {name: row.bits for name, row in DTYPES.items()}
_SPARSE = (CsrLayout.codec, CooLayout.codec)


@dataclass(frozen=True, slots=True)
class Parts:
    """The fields of all parts of a manifest, one column per field, in the order of tensors; -1 for an absent value."""

    dtype: Column
    type: Column
    offset: Column
    length: Column
    uncompressed: Column
    encoding: Column
    digest: Column
    chunks: Column

    @property
    def offsets(self) -> Array:
        """The offset of each part's stored bytes in the file."""
        return numbers(self.offset.first)

    @property
    def lengths(self) -> Array:
        """Number of stored bytes of each part."""
        return numbers(self.length.first)


@dataclass(frozen=True, slots=True)
class Columns:
    """The fields of all tensors of a manifest, one column per field; their types were checked."""

    data: bytes
    rows: Mapping[str, int]
    shape: Column
    format: Column
    attributes: Column
    components: Column
    parts: Parts

    def objects(self) -> Rows[Object]:
        """Return the manifest's objects by name, which are built on access."""
        return Rows(self.rows, self._object)

    def dense(self) -> DenseColumns:
        """Return the dense tensors that have one raw part and no fields besides an optional digest."""
        parts = self.parts
        starts = self.components.first
        absent = parts.type, parts.uncompressed, parts.encoding, parts.chunks
        simple = plain_dense(self.format, self.attributes, starts, *absent)
        columns = parts.dtype, parts.offset.first, parts.length.first, parts.digest
        return DenseColumns.of_parts((self.data, self.rows, self.shape), starts, simple, columns)

    def suspects(self) -> list[str]:
        """Return the names of the tensors that ``check_object`` must check; the columns prove that all others are
        valid.
        """
        names = [*self.rows]
        return [names[row] for row in np.flatnonzero(self._suspect_objects())]

    def _object(self, row: int) -> Object:
        attributes = self.attributes.span(row)
        roles = self.components
        return Object(
            self.shape.sizes(row),
            self.format.text(row) or "",
            {roles.texts[roles.second[part]]: self._part(part) for part in roles.children(row)},
            None if attributes is None else cbor.loads(self.data[attributes]),
        )

    def _part(self, part: int) -> Component:
        parts = self.parts
        uncompressed = parts.uncompressed.first[part]
        digest = parts.digest.span(part)
        chunks = parts.chunks.span(part)
        return Component(
            parts.dtype.text(part) or "",
            parts.offset.first[part],
            parts.length.first[part],
            parts.type.text(part),
            None if uncompressed < 0 else uncompressed,
            parts.encoding.text(part) or "raw",
            None if digest is None else self.data[digest].decode(),
            None if chunks is None else msgspec.convert(cbor.loads(self.data[chunks]), DeclaredChunks),
        )

    def _suspect_objects(self) -> Flags:
        """Return for each tensor whether ``check_object`` must check it."""
        counts = numbers(self.shape.third)
        starts = numbers(self.components.first)
        suspects = (counts <= 0) | (counts > _MAX_ELEMENTS)
        if self.parts.offsets.size:
            home = np.repeat(np.arange(counts.size), np.diff(starts))
            suspects[home[self._suspect_parts(home)]] = True
        for code, name in enumerate(self.format.texts):
            has_format = numbers(self.format.first) == code
            if name in _SPARSE:
                suspects |= has_format
            for role in REQUIRED_PARTS.get(name, ()):
                suspects |= has_format & ~self._has(role, starts, counts.size)
        return suspects

    def _has(self, role: str, starts: Array, count: int) -> Flags:
        """Return for each of ``count`` tensors whether it has a part with the role ``role``.

        ``starts`` are the indices of the tensors' first parts.
        """
        has = np.zeros(count, bool)
        if role in self.components.texts:
            code = self.components.texts.index(role)
            parts = np.flatnonzero(numbers(self.components.second) == code)
            has[np.searchsorted(starts, parts, "right") - 1] = True
        return has

    def _suspect_parts(self, home: Array) -> Flags:
        """Return for each part whether ``check_object`` must check its tensor.

        ``home`` has, for each part, the row of its tensor.
        """
        parts = self.parts
        lengths = self.parts.lengths
        items = map_texts(parts.dtype, ITEM_BYTES, 0)
        types = numbers(parts.type.first)
        encodings = map_texts(parts.encoding, {"raw": 1})
        raw = (encodings == 1) | (numbers(parts.encoding.first) < 0)
        suspects = (items == 0) | (lengths % np.maximum(items, 1) != 0) | (types >= 0) & ~self._has_valid_type()
        suspects |= ~raw | (numbers(parts.uncompressed.first) >= 0) | (numbers(parts.chunks.first) >= 0)
        dense = map_texts(self.format, {DenseLayout.codec: 1})[home] == 1
        bits = np.where(types < 0, items * 8, map_texts(parts.type, _BITS, 0))
        data = numbers(self.components.second) == (
            self.components.texts.index(DATA) if DATA in self.components.texts else -1
        )
        sizes = np.minimum(numbers(self.shape.third), _MAX_ELEMENTS)[home]
        suspects |= dense & data & ((bits == 0) | (sizes * bits % 8 != 0) | (sizes * bits // 8 != lengths))
        result: Flags = suspects | ~are_digests(parts.digest, self.data)
        return result

    def _has_valid_type(self) -> Flags:
        """Return for each part whether its logical type exists and has the part's storage type."""
        types, dtypes = self.parts.type, self.parts.dtype
        fits = np.array(
            [[text in DTYPES and DTYPES[text].storage == stored for stored in dtypes.texts] for text in types.texts]
            or [[False] * len(dtypes.texts)],
            bool,
        )
        result: Flags = fits[numbers(types.first), numbers(dtypes.first)]
        return result


def decode(data: bytes, file: str) -> tuple[Manifest, Columns] | None:
    """Return a manifest without its tensors, and the columns of its tensors.

    Returns None if the native code does not support the manifest; then the caller uses ``formats.zt.manifest.parse``.
    """
    table = cbor_table(data, _OBJECT, "objects", max_depth=cbor.MAX_DEPTH, max_items=cbor.MAX_ITEMS)
    if table is None:
        return None
    shape, format, attributes, components = table.columns
    columns = Columns(data, table.rows, shape, format, attributes, components, Parts(*components.inner[0].inner))
    if not has_maps(attributes, data) or not all(_is_chunks(value) for value in _values(columns.parts.chunks, data)):
        return None
    try:
        return parse(table.remainder, file, max_items=cbor.MAX_ITEMS // 8), columns
    except FormatError:
        return None


def _values(column: Column, data: bytes) -> Iterator[bytes]:
    rows = np.flatnonzero(numbers(column.first) >= 0).tolist()  # few parts have chunk digests
    return (data[span] for row in rows if (span := column.span(row)) is not None)


def _is_chunks(value: bytes) -> bool:
    try:
        msgspec.convert(cbor.loads(value), DeclaredChunks)
    except msgspec.ValidationError:
        return False
    return True
