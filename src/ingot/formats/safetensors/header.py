"""The header of a safetensors file: parsing and checks, and encoding.

Layout (safetensors README, "Format"): 8 bytes N as unsigned little-endian; N bytes of JSON that begin with ``{``; the
data buffer. The JSON maps names to ``{"dtype", "shape", "data_offsets": [begin, end]}``, with offsets from the buffer's
start; ``__metadata__`` maps strings to strings. Tensors cover the buffer completely, without holes or overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from ingot.core.numeric.dtypes import BY_SAFETENSORS, MAX_RANK, element_count
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import preload, strict_json, utf8_fault
from ingot.core.runtime.memory import gc_paused
from ingot.errors import FormatError
from ingot.formats.base import Catalog
from ingot.formats.detect import TRUNCATED_HINT
from ingot.formats.shared.single import ReadHeader, header_of, headers_of
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Store
from ingot.model.tensor import Tensor

MAX_HEADER = 100_000_000
PREFIX = 8
METADATA = "__metadata__"

_Natural = Annotated[int, msgspec.Meta(ge=0)]
# beginnings of escapes of a colon, of a minus, and of surrogates, which may be half a pair
_HIDING = (b"\\u003", b"\\u002", b"\\ud", b"\\uD")
_BITS = {spelling: row.bits for spelling, row in BY_SAFETENSORS.items()}


@preload
class Entry(msgspec.Struct, gc=False):
    """The header fields of a tensor.

    The defaults are invalid, so that a missing field fails the checks.
    """

    dtype: str = ""
    shape: tuple[_Natural, ...] = (0,) * (MAX_RANK + 1)
    data_offsets: tuple[_Natural, _Natural] = (1, 0)


@preload
class Header(msgspec.Struct, gc=False):
    """A checked header: tensors in the order of their bytes, and the file's metadata."""

    entries: Mapping[str, Entry]
    metadata: dict[str, str]


@preload
class _MetadataOnly(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)


_ENTRIES = msgspec.json.Decoder(dict[str, Entry])
_TYPED = msgspec.json.Decoder(dict[str, dict[str, str | list[_Natural]]])
_METADATA_ONLY = msgspec.json.Decoder(_MetadataOnly)


def parse(data: bytes, buffer_length: int, location: str) -> Header:
    """Parse and check the header of a file whose data buffer has ``buffer_length`` bytes.

    If ``_decode`` cannot prove that a header is valid, it is checked rule by rule, so that the error names the broken
    rule.

    Raises ``FormatError`` with the rules of spec/safetensors.md.
    """
    header = _decode(data)
    if header is not None and _fills(header.entries, buffer_length):
        return header
    return _strict(data, buffer_length, location)


def _decode(data: bytes) -> Header | None:
    """Return the header if no key is repeated, missing or unknown; None if this function cannot prove that.

    The decoder drops a repeated key, but its colon stays in the bytes. If no colon is escaped, the number of colons
    must equal the number of decoded keys plus the colons in names and metadata. ``-0`` is detected in a similar way.
    """
    if data[:1] != b"{" or (b"\\" in data and any(escape in data for escape in _HIDING)):
        return None
    try:
        metadata = _METADATA_ONLY.decode(data).metadata
        with gc_paused():
            entries = _ENTRIES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    keys = 0 if entries.pop(METADATA, None) is None else 1 + len(metadata)
    keys += (1 + len(Entry.__struct_fields__)) * len(entries)
    texts = "".join((*entries, *metadata, *metadata.values()))
    proven = data.count(b":") == keys + texts.count(":") and data.count(b"-") == texts.count("-")
    return Header(entries, metadata) if proven else None


def _fills(entries: Mapping[str, Entry], buffer_length: int) -> bool:
    """Return whether ``entries``, in this order, fill a buffer of ``buffer_length`` bytes without gaps or overlaps.

    Also return False for an unknown type, or a size that contradicts shape and type.
    """
    sizes: dict[tuple[str, tuple[int, ...]], int | None] = {}  # there are few distinct pairs
    position = 0
    for entry in entries.values():
        dtype_and_shape = entry.dtype, entry.shape
        size = sizes.get(dtype_and_shape)
        if size is None:
            size = sizes[dtype_and_shape] = _nbytes(entry)
        begin, end = entry.data_offsets
        if begin != position or end - begin != size:
            return False
        position = end
    return position == buffer_length


def _nbytes(entry: Entry) -> int | None:
    """Return the number of bytes of a tensor; None if its type is unknown or its shape breaks a rule."""
    try:
        bits = element_count(entry.shape, "safetensors.shape", "") * _BITS[entry.dtype]
    except (FormatError, KeyError):
        return None
    return None if bits % 8 else bits // 8


def _strict(data: bytes, buffer_length: int, location: str) -> Header:
    """Return the header after all checks in the order of the spec page, so that the first broken rule is reported."""
    if data[:1] != b"{":
        beginning = f"{data[:1]!r}" if data else f"an empty header; {TRUNCATED_HINT}"
        raise FormatError(
            "safetensors.header-start", f"expected a header that begins with '{{', found {beginning}", where=location
        )
    _check_types(data, location)
    root = strict_json(data, "safetensors.json", "safetensors.duplicate-key", location)
    metadata = root.pop(METADATA, {})
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise FormatError("safetensors.metadata", f"expected text for {key[:200]!r}, found a list", where=location)
    entries = {name: _entry(fields, f"{location}: {name}") for name, fields in root.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    _check_layout(ordered, buffer_length, location)
    return Header(ordered, metadata)


def _check_types(data: bytes, location: str) -> None:
    """Raise an error if a header is not UTF-8 JSON whose values are objects, strings and lists of integers.

    The check needs limited memory, whatever the header.
    """
    try:
        _METADATA_ONLY.decode(data)
        _TYPED.decode(data)
    except msgspec.ValidationError as error:
        rule = "safetensors.metadata" if METADATA in str(error) else "safetensors.fields"
        raise FormatError(rule, f"a field of the header has a wrong type: {error}", where=location) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = utf8_fault(data, error)
        if fault is not None:
            raise FormatError("safetensors.utf8", f"the header is not UTF-8: {fault}", where=location) from error
        raise FormatError("safetensors.json", f"the header is not JSON: {error}", where=location) from error


def _entry(fields: Any, location: str) -> Entry:
    if sorted(fields) != ["data_offsets", "dtype", "shape"]:
        keys = ", ".join(fields)[:200]
        raise FormatError(
            "safetensors.fields", f"expected dtype, shape and data_offsets, found {keys or 'nothing'}", where=location
        )
    dtype = fields["dtype"]
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise FormatError("safetensors.fields", "expected a name, a list of sizes and two offsets", where=location)
    if dtype not in _BITS:
        raise FormatError(
            "safetensors.dtype", f"expected one of {', '.join(_BITS)}; found {dtype[:80]!r}", where=location
        )
    return Entry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _check_layout(entries: Mapping[str, Entry], buffer_length: int, location: str) -> None:
    position = 0
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        entry_location = f"{location}: {name}"
        bits = element_count(entry.shape, "safetensors.shape", entry_location) * _BITS[entry.dtype]
        if bits % 8:
            raise FormatError(
                "safetensors.partial-byte",
                f"expected whole bytes, found {bits} bits of {entry.dtype}",
                where=entry_location,
            )
        if begin != position:
            problem = "a gap" if begin > position else "an overlap"
            raise FormatError(
                "safetensors.offsets",
                f"expected the tensor to begin at {position}, found {problem}: {begin}",
                where=entry_location,
            )
        if end - begin != bits // 8:
            raise FormatError(
                "safetensors.size",
                f"expected {bits // 8} bytes for {entry.dtype} of shape {list(entry.shape)}, found {end - begin}",
                where=entry_location,
            )
        position = end
    if position != buffer_length:
        reason = TRUNCATED_HINT if position > buffer_length else "bytes follow the last tensor"
        raise FormatError(
            "safetensors.data-length",
            f"expected {position} bytes of data, found {buffer_length}; {reason}",
            where=location,
        )


def encode(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytearray:
    """Return prefix and header, padded with spaces so that the data buffer begins at a multiple of 8.

    Keys, escapes and their order are those of the package ``safetensors``: metadata first, if any. ``entries`` is
    iterated once and may build entries on access.
    """
    header = bytearray(PREFIX) + b"{"
    encode_json = msgspec.json.Encoder().encode
    if metadata:
        header += b"%b:%b" % (encode_json(METADATA), encode_json(dict(metadata)))
    for key, entry in entries.items():
        header += b"%b%b:%b" % (b"," if len(header) > PREFIX + 1 else b"", encode_json(key), encode_json(entry))
    header += b"}"
    header += b" " * (-len(header) % 8)
    header[:PREFIX] = (len(header) - PREFIX).to_bytes(PREFIX, "little")
    return header


class File(NamedTuple):
    """An open file with a checked header. Its data buffer begins at ``start``; ``raw`` returns the header's bytes."""

    name: str
    source: ByteSource
    header: Header
    start: int
    raw: ReadHeader


def tensors_of(files: Sequence[File]) -> LazyMap[Tensor]:
    """Return the tensors of one or more files, in order."""
    if len(files) == 1:
        names: Mapping[str, Any] = files[0].header.entries
        homes: Mapping[str, File] = {}
    else:
        names = homes = {name: file for file in files for name in file.header.entries}

    def build(name: str) -> Tensor:
        file = homes[name] if homes else files[0]
        entry = file.header.entries[name]
        row = BY_SAFETENSORS[entry.dtype]
        begin, end = entry.data_offsets
        part = Part(
            dtype=row.storage,
            length=end - begin,
            source=file.source,
            offset=file.start + begin,
            type=None if row.is_storage else row.name,
            where=f"{file.name}: {name}: data",
        )
        return Tensor(name, entry.shape, row.name, DenseLayout.codec, {DATA: part})

    return LazyMap(names, build)


def open_file(store: Store, name: str, *, verify: bool = True) -> File:
    """Open a safetensors file; check its header against the file's size, and against its digest if there is one.

    Raises ``FormatError``; ``IntegrityError`` ``manifest.digest``.
    """
    source = store.open(name)
    try:
        length = _header_length(source, name)
        raw = read_bytes(source, PREFIX, length)
        start = PREFIX + length
        header = parse(raw, source.size - start, name)
        digest = header.metadata.get(manifest_digest.KEY)
        if digest is not None and verify:
            manifest_digest.check_json(raw, digest, name)
        return File(name, source, header, start, header_of(raw, source, PREFIX))
    except BaseException:
        source.close()
        raise


def _header_length(source: ByteSource, name: str) -> int:
    if source.size < PREFIX:
        raise FormatError(
            "safetensors.too-short",
            f"expected at least {PREFIX} bytes, found {source.size}; {TRUNCATED_HINT}",
            where=name,
        )
    length = int.from_bytes(read_bytes(source, 0, PREFIX), "little")
    limit = min(MAX_HEADER, source.size - PREFIX)
    if length > limit:
        raise FormatError(
            "safetensors.header-length",
            f"expected a header of at most {limit} bytes, found {length}: this is no safetensors file, or "
            f"only part of one; {TRUNCATED_HINT}",
            where=name,
        )
    return length


def read_single(store: Store, name: str, *, verify: bool = True) -> Catalog:
    """Read a single file as a checkpoint; raises the errors of ``open_file``."""
    file = open_file(store, name, verify=verify)
    headers = headers_of({name: file.raw})
    return Catalog(tensors_of([file]), metadata=file.header.metadata, headers=headers, sources=(file.source,))
