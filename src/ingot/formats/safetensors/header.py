"""The header of a safetensors file: bytes to a checked table of tensors, and back.

Layout (safetensors README, "Format"): 8 bytes N as unsigned little-endian, N bytes of JSON that begin with ``{``, then
the data buffer. The JSON maps names to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the
buffer's start; ``__metadata__`` maps strings to strings. The buffer is covered completely, without holes or overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from ingot.core.checked import MAX_RANK, element_count
from ingot.core.columns import Column, Rows, chosen, field, json_table, numbers, record
from ingot.core.dtypes import BY_SAFETENSORS
from ingot.core.strictjson import strict_json
from ingot.core.structs import warm
from ingot.errors import FormatError
from ingot.formats.foreign import CUT_OFF

MAX_HEADER = 100_000_000
PREFIX = 8
METADATA = "__metadata__"

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_MANY = 1 << 55  # elements, of up to 128 bits; nothing so large is told without a closer look
_BITS = {spelling: row.bits for spelling, row in BY_SAFETENSORS.items()}


@warm
class Entry(msgspec.Struct, gc=False):
    """What the header says of one tensor. The defaults are impossible: a field left out cannot pass the checks."""

    dtype: str = ""
    shape: tuple[_Natural, ...] = (0,) * (MAX_RANK + 1)
    data_offsets: tuple[_Natural, _Natural] = (1, 0)


@warm
class Header(msgspec.Struct, gc=False):
    """A checked header: tensors in the order of their bytes, and the file's own metadata."""

    entries: Mapping[str, Entry]
    metadata: dict[str, str]


@warm
class _MetadataOnly(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)


class Entries(Rows[Entry]):
    """The entries of a header in the order of their bytes, made when they are asked for; columns of all."""

    __slots__ = ("dtypes", "offsets", "shapes")

    def __init__(self, rows: Mapping[str, int], dtypes: Column, shapes: Column, offsets: Column) -> None:
        super().__init__(rows, self._entry)
        self.dtypes, self.shapes, self.offsets = dtypes, shapes, offsets

    def _entry(self, row: int) -> Entry:
        offsets = self.offsets
        return Entry(self.dtypes.text(row) or "", self.shapes.sizes(row), (offsets.first[row], offsets.second[row]))


_ROW = record(field("dtype", "text"), field("shape", "sizes"), field("data_offsets", "pair"))
_TYPED = msgspec.json.Decoder(dict[str, dict[str, str | list[_Natural]]])
_METADATA_ONLY = msgspec.json.Decoder(_MetadataOnly)


def parse(data: bytes, buffer_length: int, where: str) -> Header:
    """Check a header of a file whose data buffer has ``buffer_length`` bytes.

    Raises ``FormatError`` with the rules of spec/safetensors.md.

    A header as writers make it is decoded into columns; entries are made of them when they are asked for. Anything else
    is parsed slowly and strictly, which says what is wrong, or that it is only unusual. Both accept the same headers.
    """
    return _quick(data, buffer_length) or _strict(data, buffer_length, where)


def _quick(data: bytes, buffer_length: int) -> Header | None:
    """Return the header if it is beyond doubt, None if a closer look is needed."""
    if data[:1] != b"{":
        return None
    table = json_table(data, _ROW, aside=METADATA)
    if table is None or not _covers(table.columns, buffer_length):
        return None
    try:
        metadata = _strict(table.rest, 0, "").metadata
    except FormatError:
        return None
    return Header(Entries(table.rows, *table.columns), metadata)


def _covers(columns: Sequence[Column], buffer_length: int) -> bool:
    """Whether the entries, in this order, are of known types and right sizes and fill the buffer without a gap."""
    dtypes, shapes, offsets = columns
    begins, ends, counts = numbers(offsets.first), numbers(offsets.second), numbers(shapes.third)
    bits = chosen(dtypes, _BITS)
    if (begins != np.append(0, ends[:-1])[: begins.size]).any() or (bits < 0).any() or (counts > _MANY).any():
        return False
    # Numbers have 18 digits at most, so that eight times their differences are no overflow.
    return (ends[-1] if ends.size else 0) == buffer_length and bool((counts * bits == (ends - begins) * 8).all())


def _strict(data: bytes, buffer_length: int, where: str) -> Header:
    """Check everything in the order of the spec page, and say what is wrong."""
    if data[:1] != b"{":
        found = f"{data[:1]!r}" if data else f"one of no bytes; {CUT_OFF}"
        raise FormatError(
            "safetensors.header-start", f"expected a header that begins with '{{', found {found}", where=where
        )
    _check_types(data, where)
    root = strict_json(data, "safetensors.json", "safetensors.duplicate-key", where)
    metadata = root.pop(METADATA, {})
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise FormatError("safetensors.metadata", f"expected text for {key[:200]!r}, found a list", where=where)
    entries = {name: _entry(fields, f"{where}: {name}") for name, fields in root.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    _check_layout(ordered, buffer_length, where)
    return Header(ordered, metadata)


def _check_types(data: bytes, where: str) -> None:
    """Refuse all but UTF-8 JSON of objects of strings and lists of whole numbers, in memory bounded by its length."""
    try:
        _METADATA_ONLY.decode(data)
        _TYPED.decode(data)
    except UnicodeDecodeError as error:
        raise FormatError("safetensors.utf8", f"the header is not UTF-8: {error.reason}", where=where) from error
    except msgspec.ValidationError as error:
        rule = "safetensors.metadata" if METADATA in str(error) else "safetensors.fields"
        raise FormatError(rule, f"a field of the header has a wrong type: {error}", where=where) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError("safetensors.json", f"the header is not JSON: {error}", where=where) from error


def _entry(fields: Any, where: str) -> Entry:
    if sorted(fields) != ["data_offsets", "dtype", "shape"]:
        keys = ", ".join(fields)[:200]
        raise FormatError(
            "safetensors.fields", f"expected dtype, shape and data_offsets, found {keys or 'nothing'}", where=where
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise FormatError("safetensors.fields", "expected a name, a list of sizes and two offsets", where=where)
    if dtype not in _BITS:
        raise FormatError("safetensors.dtype", f"expected one of {', '.join(_BITS)}; found {dtype[:80]!r}", where=where)
    return Entry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _check_layout(entries: Mapping[str, Entry], buffer_length: int, where: str) -> None:
    position = 0
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        location = f"{where}: {name}"
        bits = element_count(entry.shape, "safetensors.shape", location) * _BITS[entry.dtype]
        if bits % 8:
            raise FormatError(
                "safetensors.partial-byte", f"expected whole bytes, found {bits} bits of {entry.dtype}", where=location
            )
        if begin != position:
            what = "a gap" if begin > position else "an overlap"
            raise FormatError(
                "safetensors.offsets",
                f"expected the tensor to begin at {position}, found {what}: {begin}",
                where=location,
            )
        if end - begin != bits // 8:
            raise FormatError(
                "safetensors.size",
                f"expected {bits // 8} bytes for {entry.dtype} of shape {list(entry.shape)}, found {end - begin}",
                where=location,
            )
        position = end
    if position != buffer_length:
        reason = CUT_OFF if position > buffer_length else "bytes follow the last tensor"
        raise FormatError(
            "safetensors.data-length",
            f"expected {position} bytes of data, found {buffer_length}; {reason}",
            where=where,
        )


def encode(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytearray:
    """Return prefix and header, padded with spaces to a multiple of 8 so that the data buffer is aligned.

    Keys, escapes and their order are those of the package ``safetensors``: metadata first if there is any. Entries are
    asked for one after the other.
    """
    found, encoded = bytearray(PREFIX) + b"{", msgspec.json.Encoder().encode
    if metadata:
        found += b"%b:%b" % (encoded(METADATA), encoded(dict(metadata)))
    for key, entry in entries.items():
        found += b"%b%b:%b" % (b"," if len(found) > PREFIX + 1 else b"", encoded(key), encoded(entry))
    found += b"}"
    found += b" " * (-len(found) % 8)
    found[:PREFIX] = (len(found) - PREFIX).to_bytes(PREFIX, "little")
    return found
