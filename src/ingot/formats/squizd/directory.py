"""The directory block (``TDIR``): names, shapes, types, parameters and digests, which the document has no place for.

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

from ingot.core import cbor, checksums, manifest_digest
from ingot.core.chunk_digests import StatedChunks
from ingot.core.columns import Column, Rows, cbor_table, field, mapping, numbers, record, spelled
from ingot.core.structs import warm
from ingot.errors import FormatError
from ingot.formats.squizd.layout import DIRECTORY_HEADER, DIRECTORY_MAGIC
from ingot.model.bytesource import Buffer

VERSION = 1
MAX_DIRECTORY = 1 << 30

Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@warm
class Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor.

    ``offset`` is the byte of its block's magic. ``scales`` and ``zeros`` name the type in which the codec has them;
    ``first`` and ``second`` are the offset of the tensor's first entry in that round of the scale tables and the number
    of its entries. ``mask`` is the offset of its mask and its bytes. ``chunks`` are digests of large parts' chunks.
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
    chunks: dict[str, StatedChunks] = {}


@warm
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
_MAP, _FALSE, _TRUE = 5, 0xF4, 0xF5  # CBOR's major type, and two values


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """What a directory says of its tensors, of the right types."""

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
        """Return one entry."""
        params, chunks, zeros = (each.span(row) for each in (self.params, self.chunks, self.zeros))
        roles, texts = self.digests, self.digests.inner[0]
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
            {roles.texts[roles.second[at]]: _text(texts, at, self.data) for at in roles.children(row)},
            {} if chunks is None else msgspec.convert(cbor.loads(self.data[chunks]), dict[str, StatedChunks]),
        )

    def sound(self) -> bool:
        """Whether no value is of a type that it may not have; some that have these are not told so."""
        memory = np.frombuffer(self.data, np.uint8)
        for column, good in ((self.params, _is_map), (self.chunks, _is_map), (self.zeros, _is_truth)):
            starts = numbers(column.first)
            if not good(memory[starts[starts >= 0]]):
                return False
        for pair in (self.first, self.second, self.mask):
            if (np.diff(numbers(pair.second)) != np.where(numbers(pair.third) < 0, 0, 2)).any():
                return False
        if (numbers(self.layer.first) > _LAYERS).any() or not spelled(self.digests.inner[0], self.data).all():
            return False
        # A map of one byte has no keys. Few parts are large.
        stated = np.flatnonzero((numbers(self.chunks.first) >= 0) & (numbers(self.chunks.second) > 1)).tolist()
        return all(_are_chunks(self.data[span]) for row in stated if (span := self.chunks.span(row)))


class Entries(Rows[Entry]):
    """The entries of a directory, in file order; made when they are asked for."""

    __slots__ = ("columns",)

    def __init__(self, rows: Mapping[str, int], columns: EntryColumns) -> None:
        super().__init__(rows, columns.entry)
        self.columns = columns


def _entries(data: Buffer) -> tuple[Entries, bytes] | None:
    """Return the entries of a directory and the rest of it, which is still to be parsed; None for a closer look."""
    table = cbor_table(data, _ROW, "tensors", max_depth=cbor.MAX_DEPTH, max_items=cbor.MAX_ITEMS)
    if table is None:
        return None
    columns = EntryColumns(data, *table.columns)
    return (Entries(table.rows, columns), table.rest) if columns.sound() else None


def _pair(column: Column, row: int) -> tuple[int, int] | None:
    return None if column.third[row] < 0 else (column.first[column.second[row]], column.first[column.second[row] + 1])


def _text(column: Column, row: int, data: Buffer) -> str:
    return bytes(data[column.first[row] : column.first[row] + column.second[row]]).decode()


def _is_map(heads: NDArray[np.uint8]) -> bool:
    return bool((heads >> 5 == _MAP).all())


def _is_truth(heads: NDArray[np.uint8]) -> bool:
    return bool(((heads == _FALSE) | (heads == _TRUE)).all())


def _are_chunks(value: Buffer) -> bool:
    try:
        msgspec.convert(cbor.loads(value), dict[str, StatedChunks])
    except msgspec.ValidationError:
        return False
    return True


class Written:
    """Entries of a directory as they will be written, in file order: what they say takes far more memory.

    ``count`` are counted before any is added: what is built then lacks their bytes, and is as long otherwise.
    """

    def __init__(self, count: int = 0) -> None:
        self.count, self._data = count, bytearray()
        self._late: dict[str, tuple[int, Entry]] = {}

    def add(self, name: str, entry: Entry, *, late: bool = False) -> None:
        """Add an entry, each name once; to a ``late`` one a mask will come, as soon as its place is known."""
        self.count += 1
        if late:
            self._late[name] = len(self._data), entry
        else:
            self._data += _spelled_out(name, entry)

    def mask(self, name: str, mask: tuple[int, int]) -> None:
        """Say where a late entry's mask is, and its bytes."""
        at, entry = self._late[name]
        self._late[name] = at, with_mask(entry, mask)

    def pieces(self) -> list[Buffer]:
        """Return the bytes of all entries, in order."""
        found: list[Buffer] = []
        view, done = memoryview(self._data), 0
        for name, (at, entry) in self._late.items():
            found += [view[done:at], _spelled_out(name, entry)]
            done = at
        return [*found, view[done:]]


def with_mask(entry: Entry, mask: tuple[int, int]) -> Entry:
    """Return the entry with offset and bytes of its mask."""
    return msgspec.structs.replace(entry, mask=mask)


def encoded(entry: Entry) -> bytes:
    """Return an entry as it will be written, less its name."""
    return _spelled_out("", entry)[1:]


def _spelled_out(name: str, entry: Entry) -> bytes:
    """Return a name and its entry, as deep as they lie in the root."""
    return cbor.dumps([{name: _plain(entry)}])[2:]


def _plain(value: msgspec.Struct) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def build(directory: Directory, entries: Written, digest: str | None = None, head: bytes = b"") -> list[Buffer]:
    """Return the whole block in pieces: ``directory``, which has no tensors, with these.

    With a digest of it and of ``head``, the file's header and layer index.
    """
    if digest is not None:
        directory = msgspec.structs.replace(directory, ingot_digest=manifest_digest.stand_in(digest))
    data = cbor.dumps(_plain(directory))
    at = len(cbor.dumps({"version": directory.version, "tensors": {}}))  # the last byte is the map's
    count = bytearray(cbor.dumps(entries.count))
    count[0] |= _MAP << 5  # the head of a map of so many is spelled as the number is
    pieces = [data[: at - 1] + count, *entries.pieces()]
    behind = data[at:]
    if digest is not None:
        behind = manifest_digest.fill_cbor(behind, digest, [head], before=pieces)
    pieces.append(behind)
    return [DIRECTORY_MAGIC + struct.pack("<Q", size_of(pieces)), *pieces]


def size_of(pieces: Iterable[Buffer]) -> int:
    """Return the bytes of pieces."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def check(directory: Directory, block: Buffer, head: Buffer, where: str) -> None:
    """Check the digest that a directory states of itself and of ``head``, if it states one.

    Raises ``IntegrityError`` ``manifest.digest``.
    """
    if directory.ingot_digest is not None:
        manifest_digest.check_cbor(block[DIRECTORY_HEADER:], directory.ingot_digest, f"{where}: directory", [head])


def parse(data: Buffer, where: str) -> Directory:
    """Decode and type-check the map. What writers make is decoded into columns, anything else is looked at closely.

    Raises
    ------
    FormatError
        ``cbor.*``, ``squizd.directory-schema``, ``squizd.directory-version``, ``squizd.digest``.
    """
    found = _entries(data)
    if found is not None:
        try:
            return msgspec.structs.replace(_parsed(found[1], where, cbor.MAX_ITEMS // 8), tensors=found[0])
        except FormatError:
            pass  # said below, of the whole
    return _parsed(data, where, cbor.MAX_ITEMS)


def _parsed(data: Buffer, where: str, max_items: int) -> Directory:
    root = cbor.loads(data, where=f"{where}: directory", max_items=max_items)
    try:
        directory = msgspec.convert(root, Directory)
    except msgspec.ValidationError as error:
        raise FormatError("squizd.directory-schema", str(error), where=f"{where}: directory") from error
    if directory.version != VERSION:
        raise FormatError(
            "squizd.directory-version", f"expected directory version {VERSION}, found {directory.version}", where=where
        )
    if directory.ingot_digest is None and (unknown := root.keys() - Directory.__struct_fields__):
        # Damage makes such a key of that of the digest, or of what lies before it: nothing would be checked.
        raise FormatError(
            "squizd.directory-schema",
            f"expected known keys where there is no digest of the directory, found {sorted(map(str, unknown))[:3]}",
            where=f"{where}: directory",
        )
    for text in _digests(directory):
        checksums.known(text, "squizd.digest", where)
    return directory


def _digests(directory: Directory) -> Sequence[str]:
    own = [text for text in (directory.draft_digest, directory.coreml_digest) if text is not None]
    return own + [text for entry in directory.tensors.values() for text in entry.digests.values()]
