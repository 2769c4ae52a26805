"""The byte layout of a ``.wdelta``: the prefix, and the heads of the records after the header (spec/wdelta.md)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ingot.model.layouts.delta import Int4DeltaLayout, SignDeltaLayout, SparseDeltaLayout

MAGIC = b"wdelta\0"
VERSIONS = (1, 2)
PREFIX = 15
DIGEST = 32
MAX_HEADER = 32 << 20

_PREFIX = struct.Struct("<7sII")

# NumPy names of element types in the payload, with Ingot's names and sizes.
ITEM = {"float32": ("f32", 4), "float16": ("f16", 2), "uint8": ("u8", 1), "int64": ("i64", 8), "int32": ("i32", 4)}
SPELLING = {storage: name for name, (storage, _) in ITEM.items()}

# The longest field name and the longest spelling of an element type that a record can have.
LONGEST_FIELD = 12
LONGEST_DTYPE = 7


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy of the header: its codec, and its parts in the order in which they are written."""

    name: str
    codec: str
    fields: Mapping[str, tuple[str, ...]]


STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy("sparse", SparseDeltaLayout.codec, {"indices": ("int64",), "values": ("float32",)}),
        Strategy("quantized", SignDeltaLayout.codec, {"scales": ("float16",), "packed_signs": ("uint8",)}),
        Strategy(
            "int4",
            Int4DeltaLayout.codec,
            {
                "outlier_idx": ("int64", "int32"),
                "outlier_vals": ("float16",),
                "scale": ("float16",),
                "zero_point": ("float16",),
                "packed": ("uint8",),
            },
        ),
    )
}
FIELDS = tuple(field for row in STRATEGIES.values() for field in row.fields)
"""All arrays of all strategies; each belongs to one strategy."""
BY_CODEC = {row.codec: row for row in STRATEGIES.values()}


@dataclass(frozen=True, slots=True)
class Span:
    """The location of an array in the file.

    ``dtype`` is the type of the array's part. ``stored`` is the NumPy type in the file if it differs from ``dtype``.
    """

    dtype: str
    count: int
    offset: int
    length: int
    stored: str | None = None


class Head(NamedTuple):
    """The fields that precede an array's data in a record."""

    tensor: str
    field: str
    dtype: str
    elements: int
    length: int


def pack_prefix(version: int, header: int) -> bytes:
    """Return the first 15 bytes of a file with ``header`` bytes of JSON."""
    return _PREFIX.pack(MAGIC, version, header)


def unpack_prefix(data: bytes) -> tuple[bytes, int, int]:
    """Return magic, version and the header's length."""
    magic, version, header = _PREFIX.unpack(data)
    return magic, version, header


def pack_head(tensor: str, field: str, dtype: str, count: int) -> bytes:
    """Return the head of a one-dimensional record with ``count`` elements."""
    fields = [struct.pack("<I", len(text)) + text for text in (tensor.encode(), field.encode(), dtype.encode())]
    return b"".join(fields) + struct.pack("<IQQ", 1, count, count * ITEM[dtype][1])


def head_size(tensor: str, field: str, dtype: str) -> int:
    """Return the number of bytes of a record's head."""
    return 12 + sum(len(text.encode("utf-8", "surrogatepass")) for text in (tensor, field, dtype)) + 20
