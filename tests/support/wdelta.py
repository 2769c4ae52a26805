"""``.wdelta`` files made by hand, by no writer of Ingot: for tests of the reader, the corpus and the fuzzer."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

PARENT = "0123456789abcdef" * 4


def _item(dtype: str) -> int:
    """Return the bytes of an element; 1 for a type that is none of a number."""
    try:
        return np.dtype(dtype).itemsize
    except (TypeError, SyntaxError):
        return 1


@dataclass(frozen=True)
class Record:
    """One array of the payload as it lies in the file; ``shape`` and ``length`` may lie about ``data``."""

    tensor: str
    field: str
    dtype: str
    data: bytes
    shape: Sequence[int] | None = None
    length: int | None = None

    def pack(self) -> bytes:
        """The record's bytes."""
        shape = [len(self.data) // _item(self.dtype)] if self.shape is None else self.shape
        texts = [text.encode("utf-8", "surrogateescape") for text in (self.tensor, self.field, self.dtype)]
        head = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        head += struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
        return head + struct.pack("<Q", len(self.data) if self.length is None else self.length) + self.data


def wdelta_file(
    header: Mapping[str, Any] | bytes,
    records: Sequence[Record] = (),
    *,
    version: int = 1,
    magic: bytes = b"wdelta\0",
    length: int | None = None,
    digest: bytes | None = None,
) -> bytes:
    """Put a file together; ``length`` lies about the header's, ``digest`` about the content."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    data = magic + struct.pack("<II", version, len(text) if length is None else length) + text
    data += b"".join(record.pack() for record in records)
    return data + (hashlib.sha256(data).digest() if digest is None else digest)


@dataclass
class Made:
    """A header's entries and the records that they refer to."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    strategy: str = "sparse"

    @property
    def header(self) -> dict[str, Any]:
        """The header as deltatensors writes it."""
        return {"parent_hash": PARENT, "strategy": self.strategy, "tensors": self.tensors}

    def file(self, version: int = 1) -> bytes:
        """The file's bytes."""
        return wdelta_file(self.header, self.records, version=version)

    def add(self, name: str, entry: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Made:
        """Add a tensor: its entry without references, and its arrays by field."""
        self.strategy = entry["strategy"]
        self.tensors[name] = {**entry, **{key: {"_ref": key} for key in arrays}}
        self.records += [Record(name, key, str(array.dtype), array.tobytes()) for key, array in arrays.items()]
        return self


def sparse(made: Made, name: str = "x", shape: Sequence[int] = (3, 4), indices: Sequence[int] = (1, 5, 10)) -> Made:
    """Add a tensor of strategy ``sparse``."""
    entry: dict[str, Any] = {"strategy": "sparse", "shape": list(shape), "dtype": "float32", "sparsity": 0.75}
    values = np.arange(1, len(indices) + 1, dtype=np.float32) / 8
    return made.add(name, entry, {"indices": np.array(indices, np.int64), "values": values})


def quantized(made: Made, name: str = "x", shape: Sequence[int] = (3, 5)) -> Made:
    """Add a tensor of strategy ``quantized``."""
    size, rows = prod(shape), shape[0] if len(shape) > 1 else 1
    entry: dict[str, Any] = {"strategy": "quantized", "shape": list(shape), "dtype": "float32"}
    entry |= {"n_elements": size, "n_cols": size // rows}
    signs = np.packbits(np.arange(size) % 3 == 0)
    return made.add(name, entry, {"scales": np.arange(1, rows + 1).astype(np.float16), "packed_signs": signs})


def int4(made: Made, name: str = "x", shape: Sequence[int] = (4, 5), layout: int = 1, index: str = "int64") -> Made:
    """Add a tensor of strategy ``int4`` with two outliers."""
    size = prod(shape)
    outliers = [0, size - 1]
    entry: dict[str, Any] = {"strategy": "int4", "shape": list(shape), "dtype": "float32"}
    if layout == 2:
        entry["base_dtype"] = "bfloat16"
    entry |= {"outlier_fraction": 0.1, "n_elements": size, "n_outliers": 2}
    if layout == 2:
        entry["int4_layout"] = 2
    codes = (size - (2 if layout == 1 else 0) + 1) // 2
    arrays = {
        "outlier_idx": np.array(outliers, index),
        "outlier_vals": np.array([7, -9], np.float16),
        "scale": np.array([0.25], np.float16),
        "zero_point": np.array([-2], np.float16),
        "packed": (np.arange(codes) * 37 % 256).astype(np.uint8),
    }
    return made.add(name, entry, arrays)
