"""The directory block (``TDIR``) with names, shapes, types, parameters and digests, which the document does not define.

``[4B "TDIR"][8B length][CBOR map]``; the map's fields are those of ``Directory``. Decision: ``spec/squizd.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import DeclaredChunks
from ingot.core.parsing import cbor, manifest_digest
from ingot.core.parsing.columns import Column, Rows, are_digests, cbor_table, field, mapping, numbers, record
from ingot.core.parsing.strictjson import preload
from ingot.errors import FormatError
from ingot.ext.squizd.layout import DIRECTORY_HEADER, DIRECTORY_MAGIC
from ingot.model.bytesource import Buffer

VERSION = 1
MAX_DIRECTORY = 1 << 30

Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@preload
class Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The directory's entry for a tensor.

    ``offset`` is the offset of its block's magic in the file. ``scales`` is the type of its scales, and ``zeros``
    states whether it has zero points.

    Scale tables have two rounds: the first has one entry for each quantized matrix, the second has the entries of
    sub-blocks. ``first`` and ``second`` describe the tensor's entries in these rounds: the offset of the first entry,
    and the number of entries. ``mask`` has the offset of its mask and the number of bytes of the mask. ``digests`` has
    the digests of parts, and ``chunks`` the digests of chunks of large parts, by role.
    """

    shape: tuple[Unsigned, ...]
    dtype: str
    codec: str
    layer: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    offset: Unsigned
    params: dict[str, Any] = {}
    scales: str | None = None
    zeros: bool = False
    first: tuple[Unsigned, Unsigned] | None = None
    second: tuple[Unsigned, Unsigned] | None = None
    mask: tuple[Unsigned, Unsigned] | None = None
    digests: dict[str, str] = {}
    chunks: dict[str, DeclaredChunks] = {}


@preload
class Directory(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All tensors in file order, the checkpoint's metadata, and digests of the appendices and of the directory."""

    version: int
    tensors: Mapping[str, Entry]
    metadata: dict[str, Any] = {}
    draft_digest: str | None = None
    coreml_digest: str | None = None
    ingot_digest: str | None = None


_ROW = record(
    field("shape", "sizes"),
    field("dtype", "text"),
    field("codec", "text"),
    field("layer", "number"),
    field("offset", "number"),
    field("params", "any", optional=True),
    field("scales", "text", optional=True),
    field("zeros", "any", optional=True),
    field("first", "sizes", optional=True),
    field("second", "sizes", optional=True),
    field("mask", "sizes", optional=True),
    field("digests", mapping("place"), optional=True),
    field("chunks", "any", optional=True),
)
_LAYERS = 0xFFFF
# CBOR's major type, and two values
_MAP = 5
_FALSE = 0xF4
_TRUE = 0xF5


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """The fields of all entries of a directory, one column per field. ``entry`` needs columns that are ``sound``."""

    data: Buffer
    shape: Column
    dtype: Column
    codec: Column
    layer: Column
    offset: Column
    params: Column
    scales: Column
    zeros: Column
    first: Column
    second: Column
    mask: Column
    digests: Column
    chunks: Column

    def entry(self, row: int) -> Entry:
        """Return the entry of a row."""
        params, chunks, zeros = (column.span(row) for column in (self.params, self.chunks, self.zeros))
        roles = self.digests
        texts = self.digests.inner[0]
        return Entry(
            self.shape.sizes(row),
            self.dtype.text(row) or "",
            self.codec.text(row) or "",
            self.layer.first[row],
            self.offset.first[row],
            {} if params is None else cbor.loads(self.data[params]),
            self.scales.text(row),
            zeros is not None and self.data[zeros.start] == _TRUE,
            _pair(self.first, row),
            _pair(self.second, row),
            _pair(self.mask, row),
            {roles.texts[roles.second[index]]: _text(texts, index, self.data) for index in roles.children(row)},
            {} if chunks is None else msgspec.convert(cbor.loads(self.data[chunks]), dict[str, DeclaredChunks]),
        )

    def sound(self) -> bool:
        """Return whether the values that the column parser did not check are valid.

        These are maps, booleans, pairs, layers, digests and digests of chunks. If the result is False, the caller uses
        the detailed parser, which reports the error.
        """
        memory = np.frombuffer(self.data, np.uint8)
        for column, is_valid in ((self.params, _is_map), (self.chunks, _is_map), (self.zeros, _is_bool)):
            starts = numbers(column.first)
            if not is_valid(memory[starts[starts >= 0]]):
                return False
        for pair in (self.first, self.second, self.mask):
            if (np.diff(numbers(pair.second)) != np.where(numbers(pair.third) < 0, 0, 2)).any():
                return False
        if (numbers(self.layer.first) > _LAYERS).any() or not are_digests(self.digests.inner[0], self.data).all():
            return False
        # A map of one byte has no keys. Few parts have chunk digests.
        rows = np.flatnonzero((numbers(self.chunks.first) >= 0) & (numbers(self.chunks.second) > 1)).tolist()
        return all(_are_chunks(self.data[span]) for row in rows if (span := self.chunks.span(row)))


class Entries(Rows[Entry]):
    """The entries of a directory, in file order; built on access."""

    __slots__ = ("columns",)

    def __init__(self, rows: Mapping[str, int], columns: EntryColumns) -> None:
        super().__init__(rows, columns.entry)
        self.columns = columns


def _entries(data: Buffer) -> tuple[Entries, bytes] | None:
    """Return the entries of a directory, and its bytes without the entries; None if the detailed parser is
    necessary.
    """
    table = cbor_table(data, _ROW, "tensors", max_depth=cbor.MAX_DEPTH, max_items=cbor.MAX_ITEMS)
    if table is None:
        return None
    columns = EntryColumns(data, *table.columns)
    return (Entries(table.rows, columns), table.remainder) if columns.sound() else None


def _pair(column: Column, row: int) -> tuple[int, int] | None:
    return None if column.third[row] < 0 else (column.first[column.second[row]], column.first[column.second[row] + 1])


def _text(column: Column, row: int, data: Buffer) -> str:
    return bytes(data[column.first[row] : column.first[row] + column.second[row]]).decode()


def _is_map(heads: NDArray[np.uint8]) -> bool:
    return bool((heads >> 5 == _MAP).all())


def _is_bool(heads: NDArray[np.uint8]) -> bool:
    return bool(((heads == _FALSE) | (heads == _TRUE)).all())


def _are_chunks(value: Buffer) -> bool:
    try:
        msgspec.convert(cbor.loads(value), dict[str, DeclaredChunks])
    except msgspec.ValidationError:
        return False
    return True


class EncodedEntries:
    """The encoded entries of a directory, which take far less memory than objects.

    ``count`` is the number of entries that the directory declares, and ``add`` increases it. A caller that needs only
    the size of a directory passes the number of entries, and adds none. It computes the size of the entries itself.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._data = bytearray()
        self._late: dict[str, tuple[int, Entry]] = {}

    def add(self, name: str, entry: Entry, *, late: bool = False) -> None:
        """Add an entry; each name may occur once. A ``late`` entry gets its mask later, when the mask's offset is
        known."""
        self.count += 1
        if late:
            self._late[name] = len(self._data), entry
        else:
            self._data += _encode_pair(name, entry)

    def mask(self, name: str, mask: tuple[int, int]) -> None:
        """Set the mask of a late entry: its offset and its number of bytes."""
        offset, entry = self._late[name]
        self._late[name] = offset, with_mask(entry, mask)

    def segments(self) -> list[Buffer]:
        """Return the bytes of all entries, in order."""
        segments: list[Buffer] = []
        view = memoryview(self._data)
        copied = 0
        for name, (offset, entry) in self._late.items():
            segments += [view[copied:offset], _encode_pair(name, entry)]
            copied = offset
        return [*segments, view[copied:]]


def with_mask(entry: Entry, mask: tuple[int, int]) -> Entry:
    """Return the entry with ``mask``, the offset and the number of bytes of its mask."""
    return msgspec.structs.replace(entry, mask=mask)


def encode_entry(entry: Entry) -> bytes:
    """Return the encoded entry without its name."""
    return _encode_pair("", entry)[1:]


def _encode_pair(name: str, entry: Entry) -> bytes:
    """Return the encoded name and entry of a tensor.

    They are encoded inside a list and a map, so that their nesting depth is that in a complete directory.
    """
    return cbor.dumps([{name: _to_builtins(entry)}])[2:]


def _to_builtins(value: msgspec.Struct) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def build(directory: Directory, entries: EncodedEntries, digest: str | None = None, head: bytes = b"") -> list[Buffer]:
    """Return the complete directory block in segments: the fields of ``directory``, and ``entries`` as its tensors.

    If ``digest`` names an algorithm, the block has a digest of itself and of ``head``, the header and layer index.
    """
    if digest is not None:
        directory = msgspec.structs.replace(directory, ingot_digest=manifest_digest.stand_in(digest))
    data = cbor.dumps(_to_builtins(directory))
    # The last of these bytes is the empty map.
    tensors_start = len(cbor.dumps({"version": directory.version, "tensors": {}}))
    count = bytearray(cbor.dumps(entries.count))
    count[0] |= _MAP << 5  # the head of a map differs from its count only in the major type
    segments = [data[: tensors_start - 1] + count, *entries.segments()]
    after = data[tensors_start:]
    if digest is not None:
        after = manifest_digest.fill_cbor(after, digest, [head], before=segments)
    segments.append(after)
    return [DIRECTORY_MAGIC + struct.pack("<Q", size_of(segments)), *segments]


def size_of(segments: Iterable[Buffer]) -> int:
    """Return the total number of bytes of segments."""
    return sum(memoryview(segment).nbytes for segment in segments)


def check(directory: Directory, block: Buffer, head: Buffer, location: str) -> None:
    """Verify the digest of the directory and of ``head``, if the directory states one.

    Raises ``IntegrityError`` ``manifest.digest``.
    """
    if directory.ingot_digest is not None:
        manifest_digest.check_cbor(block[DIRECTORY_HEADER:], directory.ingot_digest, f"{location}: directory", [head])


def parse(data: Buffer, location: str) -> Directory:
    """Return the decoded and type-checked directory.

    A typical directory is decoded into columns, any other by the detailed parser.

    Raises
    ------
    FormatError
        ``cbor.*``, ``squizd.directory-schema``, ``squizd.directory-version``, ``squizd.digest``.
    """
    entries_and_rest = _entries(data)
    if entries_and_rest is not None:
        try:
            return msgspec.structs.replace(
                _parse_in_detail(entries_and_rest[1], location, cbor.MAX_ITEMS // 8), tensors=entries_and_rest[0]
            )
        except FormatError:
            pass  # the detailed parser reports the error
    return _parse_in_detail(data, location, cbor.MAX_ITEMS)


def _parse_in_detail(data: Buffer, location: str, max_items: int) -> Directory:
    root = cbor.loads(data, location=f"{location}: directory", max_items=max_items)
    try:
        directory = msgspec.convert(root, Directory)
    except msgspec.ValidationError as error:
        raise FormatError("squizd.directory-schema", str(error), where=f"{location}: directory") from error
    if directory.version != VERSION:
        raise FormatError(
            "squizd.directory-version",
            f"expected directory version {VERSION}, found {directory.version}",
            where=location,
        )
    if directory.ingot_digest is None and (unknown := root.keys() - Directory.__struct_fields__):
        # Damage can turn the key of the digest, or bytes before it, into an unknown key; then nothing would be
        # verified.
        raise FormatError(
            "squizd.directory-schema",
            f"expected only known keys in a directory without a digest, found {sorted(map(str, unknown))[:3]}",
            where=f"{location}: directory",
        )
    for text in _digests(directory):
        checksums.algorithm_of(text, "squizd.digest", location)
    return directory


def _digests(directory: Directory) -> Sequence[str]:
    appendix_digests = [text for text in (directory.draft_digest, directory.coreml_digest) if text is not None]
    return appendix_digests + [text for entry in directory.tensors.values() for text in entry.digests.values()]
