"""The header of a GGUF file: bytes to checked metadata and a checked table of tensors.

Layout (``docs/gguf.md`` of ggml): ``GGUF``, u32 version, u64 tensors, u64 metadata pairs; pairs of key, type and value;
for each tensor its name, u32 dimensions, u64 sizes with the fastest first, u32 type, u64 offset from the data's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.core.checked import element_count
from ingot.core.dtypes import DTYPES
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.foreign import CUT_OFF
from ingot.formats.gguf.carry import MAX_RANK
from ingot.formats.gguf.cursor import Cursor
from ingot.formats.gguf.infos import Entry, read_infos
from ingot.formats.gguf.metadata import ALIGNMENT, DEFAULT_ALIGNMENT, NUMPY, STRUCT
from ingot.formats.gguf.types import BLOCKED, DENSE, VALUES
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.ggml import TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_LEAST_PAIR, _LEAST_TENSOR = 14, 24  # bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    ``types`` are the types of the metadata by key, ``array:T`` for arrays; ``start`` is where the data begins, ``end``
    where the last tensor does; ``raw`` are the header's bytes; ``stated`` is false where the alignment that the
    metadata state is not the one that tensors lie by. ``raw_strings`` are the bytes of strings that are not UTF-8, by
    key and index in an array (0 for a single string).
    """

    version: int
    big_endian: bool
    metadata: Mapping[str, Any]
    types: Mapping[str, str]
    entries: Mapping[str, Entry]
    start: int
    end: int
    raw: bytes
    stated: bool
    raw_strings: Mapping[str, Mapping[int, bytes]]


def parse(source: ByteSource, name: str) -> Header:
    """Read and check the header of a file.

    Raises
    ------
    FormatError
        With the rules of ``spec/gguf.md``.
    UnsupportedError
        ``gguf.version``, ``gguf.type``: an older version, a type of tensor that no llama.cpp of today reads.
    """
    cursor = Cursor(source, name)
    version = _version(cursor)
    tensors = cursor.count(_LEAST_TENSOR, "gguf.count", "tensors")
    pairs = cursor.count(_LEAST_PAIR, "gguf.count", "metadata pairs")
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    raw_strings: dict[str, dict[int, bytes]] = {}
    for _ in range(pairs):
        key = cursor.string()
        if not key or key in metadata or "\0" in key:
            what = "it twice" if key in metadata else "an empty one or one with a NUL"
            raise FormatError("gguf.key", f"expected each key once, found {what}", where=f"{name}: {key[:80]!r}")
        types[key], metadata[key], raw = _value(cursor, f"{name}: {key[:80]}")
        if raw:
            raw_strings[key] = raw
    alignment = _alignment(metadata, types, name)
    infos = read_infos(cursor, tensors, (alignment, DEFAULT_ALIGNMENT))
    if infos is not None:
        entries: Mapping[str, Entry] = infos.entries()
        start, end, stated = infos.start, infos.end, infos.alignment == alignment
    else:
        entries = _entries(cursor, tensors, name)
        start, end, stated = _places(entries, alignment, cursor, name)
    return Header(
        version, cursor.order == ">", metadata, types, entries, start, end, cursor.consumed(), stated, raw_strings
    )


def _entries(cursor: Cursor, count: int, name: str) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for _ in range(count):
        tensor, entry = _entry(cursor, name)
        if tensor in entries:
            raise FormatError("gguf.name", "expected each tensor once, found it twice", where=f"{name}: {tensor}")
        entries[tensor] = entry
    return entries


def _version(cursor: Cursor) -> int:
    if cursor.size < 4 or bytes(cursor.take(4)) != MAGIC:
        raise FormatError("gguf.magic", "expected a file that begins with GGUF", where=cursor.name)
    version = int(cursor.number("I"))
    if version & 0xFFFF == 0 and version:
        cursor.big_endian()
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"expected version {' or '.join(map(str, VERSIONS))}, found {version}; llama.cpp's gguf tools rewrite "
            "older files",
            rule="gguf.version",
            where=cursor.name,
        )
    return version


def _type(cursor: Cursor, where: str) -> str:
    number = cursor.number("I")
    if number not in VALUES:
        raise FormatError("gguf.value-type", f"expected a type from 0 to 12, found {number}", where=where)
    return VALUES[number]


def _value(cursor: Cursor, where: str) -> tuple[str, Any, dict[int, bytes]]:
    """Return a value's type, the value (text, a number, true or false, or a list of these), and strings as bytes.

    The bytes are those of strings that are not UTF-8, by their index.
    """
    kind = _type(cursor, where)
    if kind == "string":
        texts, raw = _strings(cursor, 1, where)
        return kind, texts[0], raw
    if kind != "array":
        return kind, _truth(cursor.number("B"), where) if kind == "bool" else cursor.number(STRUCT[kind]), {}
    kind = _type(cursor, where)
    if kind == "array":
        raise FormatError("gguf.value-type", "expected an array of numbers or strings, found arrays", where=where)
    form = NUMPY.get(kind, "")
    count = cursor.elements(int(form[1:]) if form else 8, kind, where)
    if kind == "string":
        utf8 = cursor.strings(count)
        return "array:string", *(_strings(cursor, count, where) if utf8 is None else (utf8, {}))
    values = cursor.numbers(form, count)
    return f"array:{kind}", [_truth(value, where) for value in values] if kind == "bool" else values, {}


def _strings(cursor: Cursor, count: int, where: str) -> tuple[list[str], dict[int, bytes]]:
    """Return the next strings, and the bytes of those that are not UTF-8 by their index."""
    texts: list[str] = []
    raw: dict[int, bytes] = {}
    for index in range(count):
        text, data = cursor.text(where)
        texts.append(text)
        if data is not None:
            raw[index] = data
    return texts, raw


def _truth(value: int, where: str) -> bool:
    if value > 1:
        raise FormatError("gguf.bool", f"expected 0 or 1, found {value}", where=where)
    return bool(value)


def _alignment(metadata: Mapping[str, Any], types: Mapping[str, str], name: str) -> int:
    value = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if types.get(ALIGNMENT, "u32") != "u32" or value < 1 or value & (value - 1):
        raise FormatError(
            "gguf.alignment",
            f"expected {ALIGNMENT} to be a power of two in u32, found {str(value)[:40]} in {types[ALIGNMENT]}",
            where=name,
        )
    return int(value)


def _entry(cursor: Cursor, name: str) -> tuple[str, Entry]:
    tensor = cursor.string()
    where = f"{name}: {tensor[:80]}"
    if "\0" in tensor:
        raise FormatError("gguf.name", f"expected a name without NUL, found {tensor[:80]!r}", where=name)
    rank = cursor.number("I")
    if rank > MAX_RANK:
        raise FormatError("gguf.rank", f"expected at most {MAX_RANK} dimensions, found {rank}", where=where)
    *sizes, number, offset = cursor.fields(f"{rank}QIQ")
    shape = tuple(reversed(sizes))
    count = element_count(shape, "gguf.shape", where)
    if number in DENSE:
        return tensor, Entry(shape, DENSE[number], offset, DTYPES[DENSE[number]].nbytes(count))
    if number not in BLOCKED:
        raise UnsupportedError(
            f"expected a type of tensor that llama.cpp reads, found number {number}", rule="gguf.type", where=where
        )
    block = TYPES[BLOCKED[number]]
    columns = shape[-1] if shape else 1
    if columns % block.elements:
        raise FormatError(
            "gguf.columns",
            f"expected rows of whole blocks of {block.elements} for {BLOCKED[number]}, found {columns} columns",
            where=where,
        )
    return tensor, Entry(shape, BLOCKED[number], offset, count // block.elements * block.nbytes)


def _places(entries: Mapping[str, Entry], alignment: int, cursor: Cursor, name: str) -> tuple[int, int, bool]:
    """Return where the data begins and ends, and whether they lie by the alignment that is stated.

    ``llama-quantize`` keeps the key of another alignment and pads to 32: tried where the stated one does not fit.
    """
    try:
        return (*_laid(entries, alignment, cursor.position, cursor.size, name), True)
    except FormatError:
        if alignment == DEFAULT_ALIGNMENT:
            raise
        try:
            return (*_laid(entries, DEFAULT_ALIGNMENT, cursor.position, cursor.size, name), False)
        except FormatError:
            pass
        raise


def _laid(entries: Mapping[str, Entry], alignment: int, header: int, size: int, name: str) -> tuple[int, int]:
    """Check that every tensor lies where the ones before it and their padding end, and in the file."""
    start = -(-header // alignment) * alignment
    expected, end = 0, 0
    for tensor, entry in entries.items():
        if entry.offset != expected:
            raise FormatError(
                "gguf.offset",
                f"expected the tensor at {expected}, right after the one before, found {entry.offset}",
                where=f"{name}: {tensor}",
            )
        end = expected + entry.nbytes
        expected = -(-end // alignment) * alignment
    if entries and start + end > size:
        raise FormatError(
            "gguf.data", f"expected {start + end} bytes for all tensors, found a file of {size}; {CUT_OFF}", where=name
        )
    return start, start + end
