"""Parser of the header of a GGUF file: checked metadata and a checked table of tensors.

Layout (``docs/gguf.md`` of ggml): ``GGUF``, u32 version, u64 tensors, u64 metadata pairs; pairs of key, type and value;
for each tensor its name, u32 dimensions, u64 sizes with the fastest first, u32 type, u64 offset from the data's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.core.bytes.checked import element_count
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.gguf.carry import MAX_RANK
from ingot.formats.gguf.cursor import Cursor
from ingot.formats.gguf.infos import Entry, read_infos
from ingot.formats.gguf.metadata import ALIGNMENT, DEFAULT_ALIGNMENT, NUMPY, STRUCT
from ingot.formats.gguf.types import BLOCKED, DENSE, VALUES
from ingot.formats.shared.foreign import TRUNCATED_HINT
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.ggml import TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 14, 24  # bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    ``types`` are the types of the metadata by key, ``array:T`` for arrays. The data begin at ``start``, and the last
    tensor ends at ``end``. ``raw`` are the bytes of the header. ``alignment_applies`` is false if the tensors have
    another alignment than the metadata state. ``raw_strings`` are the bytes of strings that are not UTF-8, by key and
    index in an array (0 for a single string).
    """

    version: int
    big_endian: bool
    metadata: Mapping[str, Any]
    types: Mapping[str, str]
    entries: Mapping[str, Entry]
    start: int
    end: int
    raw: bytes
    alignment_applies: bool
    raw_strings: Mapping[str, Mapping[int, bytes]]


def parse(source: ByteSource, name: str) -> Header:
    """Read and check the header of a file.

    Raises
    ------
    FormatError
        With the rules of ``spec/gguf.md``.
    UnsupportedError
        ``gguf.version``, ``gguf.type``: an older version, or a tensor type that current llama.cpp does not read.
    """
    cursor = Cursor(source, name)
    version = _version(cursor)
    tensors = cursor.count(_MIN_TENSOR_BYTES, "gguf.count", "tensors")
    pairs = cursor.count(_MIN_PAIR_BYTES, "gguf.count", "metadata pairs")
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    raw_strings: dict[str, dict[int, bytes]] = {}
    for _ in range(pairs):
        key = cursor.string()
        if not key or key in metadata or "\0" in key:
            problem = "it again" if key in metadata else "an empty key or a key with NUL"
            raise FormatError("gguf.key", f"expected each key once, found {problem}", where=f"{name}: {key[:80]!r}")
        types[key], metadata[key], raw = _value(cursor, f"{name}: {key[:80]}")
        if raw:
            raw_strings[key] = raw
    alignment = _alignment(metadata, types, name)
    infos = read_infos(cursor, tensors, (alignment, DEFAULT_ALIGNMENT))
    if infos is not None:
        entries: Mapping[str, Entry] = infos.entries()
        start, end, alignment_applies = infos.start, infos.end, infos.alignment == alignment
    else:
        entries = _entries(cursor, tensors, name)
        start, end, alignment_applies = _data_range(entries, alignment, cursor, name)
    return Header(
        version,
        cursor.order == ">",
        metadata,
        types,
        entries,
        start,
        end,
        cursor.consumed(),
        alignment_applies,
        raw_strings,
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
            f"expected version {' or '.join(map(str, VERSIONS))}, found {version}; convert the model "
            "again with llama.cpp",
            rule="gguf.version",
            where=cursor.name,
        )
    return version


def _type(cursor: Cursor, location: str) -> str:
    type_id = cursor.number("I")
    if type_id not in VALUES:
        raise FormatError("gguf.value-type", f"expected a type from 0 to 12, found {type_id}", where=location)
    return VALUES[type_id]


def _value(cursor: Cursor, location: str) -> tuple[str, Any, dict[int, bytes]]:
    """Return the type of a value, the value, and the bytes of its strings that are not UTF-8 by index.

    The value is text, a number, a bool, or a list of these.
    """
    type_name = _type(cursor, location)
    if type_name == "string":
        texts, raw = _strings(cursor, 1, location)
        return type_name, texts[0], raw
    if type_name != "array":
        return (
            type_name,
            _bool(cursor.number("B"), location) if type_name == "bool" else cursor.number(STRUCT[type_name]),
            {},
        )
    type_name = _type(cursor, location)
    if type_name == "array":
        raise FormatError("gguf.value-type", "expected an array of numbers or strings, found arrays", where=location)
    dtype = NUMPY.get(type_name, "")
    count = cursor.elements(int(dtype[1:]) if dtype else 8, type_name, location)
    if type_name == "string":
        utf8 = cursor.strings(count)
        return "array:string", *(_strings(cursor, count, location) if utf8 is None else (utf8, {}))
    values = cursor.numbers(dtype, count)
    return f"array:{type_name}", [_bool(value, location) for value in values] if type_name == "bool" else values, {}


def _strings(cursor: Cursor, count: int, location: str) -> tuple[list[str], dict[int, bytes]]:
    """Return the next strings, and by index the bytes of strings that are not UTF-8."""
    texts: list[str] = []
    raw: dict[int, bytes] = {}
    for index in range(count):
        text, data = cursor.text(location)
        texts.append(text)
        if data is not None:
            raw[index] = data
    return texts, raw


def _bool(value: int, location: str) -> bool:
    if value > 1:
        raise FormatError("gguf.bool", f"expected 0 or 1, found {value}", where=location)
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
    location = f"{name}: {tensor[:80]}"
    if "\0" in tensor:
        raise FormatError("gguf.name", f"expected a name without NUL, found {tensor[:80]!r}", where=name)
    rank = cursor.number("I")
    if rank > MAX_RANK:
        raise FormatError("gguf.rank", f"expected at most {MAX_RANK} dimensions, found {rank}", where=location)
    *sizes, number, offset = cursor.fields(f"{rank}QIQ")
    shape = tuple(reversed(sizes))
    count = element_count(shape, "gguf.shape", location)
    if number in DENSE:
        return tensor, Entry(shape, DENSE[number], offset, DTYPES[DENSE[number]].nbytes(count))
    if number not in BLOCKED:
        raise UnsupportedError(
            f"expected a tensor type that llama.cpp reads, found type number {number}", rule="gguf.type", where=location
        )
    block = TYPES[BLOCKED[number]]
    columns = shape[-1] if shape else 1
    if columns % block.elements:
        raise FormatError(
            "gguf.columns",
            f"expected a multiple of {block.elements} columns for {BLOCKED[number]}, found {columns}",
            where=location,
        )
    return tensor, Entry(shape, BLOCKED[number], offset, count // block.elements * block.nbytes)


def _data_range(entries: Mapping[str, Entry], alignment: int, cursor: Cursor, name: str) -> tuple[int, int, bool]:
    """Return where the data begin and end, and whether tensors have the alignment that the metadata state.

    ``llama-quantize`` keeps the key of another alignment but pads to 32. So 32 is tried if the declared alignment does
    not fit.
    """
    try:
        return (*_check_offsets(entries, alignment, cursor.position, cursor.size, name), True)
    except FormatError:
        if alignment == DEFAULT_ALIGNMENT:
            raise
        try:
            return (*_check_offsets(entries, DEFAULT_ALIGNMENT, cursor.position, cursor.size, name), False)
        except FormatError:
            pass
        raise


def _check_offsets(entries: Mapping[str, Entry], alignment: int, header: int, size: int, name: str) -> tuple[int, int]:
    """Return where the data begin and end, after a check that tensors follow each other, padded, within the file."""
    start = -(-header // alignment) * alignment
    expected, end = 0, 0
    for tensor, entry in entries.items():
        if entry.offset != expected:
            raise FormatError(
                "gguf.offset",
                f"expected the tensor at offset {expected}, right after the previous tensor, found {entry.offset}",
                where=f"{name}: {tensor}",
            )
        end = expected + entry.nbytes
        expected = -(-end // alignment) * alignment
    if entries and start + end > size:
        raise FormatError(
            "gguf.data",
            f"expected {start + end} bytes for all tensors, found a file of {size}; {TRUNCATED_HINT}",
            where=name,
        )
    return start, start + end
