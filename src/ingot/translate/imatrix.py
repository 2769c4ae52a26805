"""Importance matrices of llama.cpp: mean squares of the inputs of each matrix, under llama.cpp's names.

There are two file formats (llama.cpp, tools/imatrix). The GGUF format has ``general.type`` = ``imatrix`` and, per
matrix, ``NAME.in_sum2`` f32 [experts, cols] with sums of squares and ``NAME.counts`` f32 [experts, 1] with numbers of
tokens. The older binary format is little-endian: i32 number of entries; per entry i32 length and bytes of the name, i32
calls, i32 number of values, f32 values. These values are means times calls, expert after expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any

import numpy as np

from ingot.artifacts.save import save
from ingot.errors import FormatError, UsageError
from ingot.formats.gguf.header import MAGIC
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import COUNT, SQUARES, VERSION, VERSION_KEY, ArrayEntry, Statistics
from ingot.model.tensor import Array
from ingot.naming.config import CONFIG
from ingot.stores.location import AnyPath, Location
from ingot.translate import companions
from ingot.translate.families import FAMILIES
from ingot.translate.names import Names

HEAD = 64
"""Bytes at the beginning that identify a binary file."""
TYPE_KEY = "general.type"
DATASETS = "imatrix.datasets"
CHUNKS = "imatrix.chunk_count"
CHUNK_SIZE = "imatrix.chunk_size"
SUMS = ".in_sum2"
COUNTS = ".counts"
_RULE = "statistics.imatrix"
_INT = Struct("<i")
_MAX_NAME = 512
_MAX_ENTRIES = 1 << 20
_MAX_VALUES = 1 << 28
_MAX_TOKENS = 1 << 53  # counted exactly


def is_binary(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is an importance matrix in the binary format."""
    if len(head) < 9 or head.startswith(MAGIC):
        return False
    entries = _INT.unpack_from(head)[0]
    length = _INT.unpack_from(head, 4)[0]
    name = head[8 : 8 + max(0, length)]
    named = 0 < entries <= _MAX_ENTRIES and 0 < length <= _MAX_NAME and name.isascii()
    return named and name.decode().isprintable() and (b".weight"[: len(name)] in name or len(name) < length)


def from_binary(location: Location) -> Statistics:
    """Read a file of the binary format; raise ``FormatError`` ``statistics.imatrix`` if it is malformed."""
    return _to_statistics(dict(_binary_entries(location.read(), location.display)), location.display)


def from_gguf(checkpoint: Checkpoint) -> Statistics:
    """Read an opened GGUF file and close it; raise ``FormatError`` ``statistics.imatrix`` if it is malformed."""
    with checkpoint:
        if checkpoint.metadata.get(TYPE_KEY) != "imatrix":
            raise FormatError(
                _RULE,
                f"expected {TYPE_KEY} = imatrix, found {checkpoint.metadata.get(TYPE_KEY)!r:.40}",
                where=checkpoint.location,
            )
        return _to_statistics(dict(_gguf_entries(checkpoint)), checkpoint.location)


def _gguf_entries(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[Array, Array]]]:
    """Yield names with mean squares [experts, cols] and counts [experts]."""
    for key, tensor in checkpoint.items():
        if not key.endswith(SUMS):
            continue
        name = key.removesuffix(SUMS)
        count_tensor = checkpoint.get(name + COUNTS)
        cols = tensor.shape[-1] if tensor.shape else 0
        sums = tensor.numpy("f32").reshape(-1, cols) if cols else None
        counts = None if count_tensor is None else count_tensor.numpy("f32").reshape(-1)
        if sums is None or counts is None or len(counts) != len(sums):
            raise FormatError(
                _RULE, f"expected {COUNTS} for each row of {SUMS}", where=f"{checkpoint.location}: {name}"
            )
        if not ((counts >= 0) & (counts <= _MAX_TOKENS)).all():
            raise FormatError(_RULE, "expected numbers of tokens", where=f"{checkpoint.location}: {name}")
        yield name, (sums / np.maximum(counts, 1)[:, None], counts)


def _binary_entries(data: bytes, location: str) -> Iterator[tuple[str, tuple[Array, Array]]]:
    position = 0

    def read_int() -> int:
        nonlocal position
        position += 4
        if position > len(data):
            raise FormatError(_RULE, f"expected more than {len(data)} bytes: the file is truncated", where=location)
        return int(_INT.unpack_from(data, position - 4)[0])

    def read_bytes(count: int, limit: int, size: int = 1) -> bytes:
        nonlocal position
        if not 0 < count <= limit or position + count * size > len(data):
            raise FormatError(_RULE, f"expected lengths within the file, found {count} at {position}", where=location)
        position += count * size
        return data[position - count * size : position]

    for _ in range(read_int()):
        raw = read_bytes(read_int(), _MAX_NAME)
        calls = read_int()
        count = read_int()
        values = np.frombuffer(read_bytes(count, _MAX_VALUES, 4), "<f4")
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise FormatError(_RULE, f"expected a name in UTF-8, found {raw!r:.80}", where=location) from None
        yield name, (values[None] / max(calls, 1), np.array([max(calls, 0)], np.float32))


def _to_statistics(matrices: Mapping[str, tuple[Array, Array]], location: str) -> Statistics:
    entries: dict[str, ArrayEntry] = {}
    for name, (squares, counts) in matrices.items():
        for expert, (row, count) in enumerate(zip(squares, counts, strict=True)):
            key = name if len(squares) == 1 else f"{name}:expert.{expert}"
            entries[f"{key}:{SQUARES}"] = ArrayEntry(np.ascontiguousarray(row))
            entries[f"{key}:{COUNT}"] = ArrayEntry(np.array([int(count)], np.int64))
    return Statistics(entries, {VERSION_KEY: VERSION}, location)


def names_of(model: Checkpoint) -> dict[str, str]:
    """Return the model's tensor names, keyed by llama.cpp's names; empty if the architecture is unsupported.

    Raises ``MissingExtraError`` if the package gguf is not installed, and the errors of reading ``config.json``.
    """
    files = companions.read_files(model.companions) if CONFIG in model.companions else {}
    family = FAMILIES.get(str(companions.parse_file(files, CONFIG).get("model_type")))
    if family is None:
        return {}
    names = Names(family)
    by_gguf_name = dict[str, str]()
    for name in model:
        expert = names.expert(name)
        gguf_name = names.to_gguf(name) if expert is None else f"{expert.stacked}:expert.{expert.expert}"
        if gguf_name is not None:
            by_gguf_name[gguf_name] = name
    return by_gguf_name


def write_imatrix(path: AnyPath, statistics: Statistics, model: Checkpoint, *, overwrite: bool = False) -> list[str]:
    """Write the mean squares of all matrices as a GGUF importance matrix under llama.cpp's names.

    Returns the names of the matrices without a name in llama.cpp.

    Raises
    ------
    UnsupportedError, ResourceError
        The errors of ``ingot.save``.
    UsageError
        ``statistics.names``: the model's architecture is unsupported.
    """
    gguf_names = {model_name: gguf_name for gguf_name, model_name in names_of(model).items()}
    if not gguf_names:
        raise UsageError(
            "llama.cpp's names are unknown for this architecture; write only the safetensors file",
            rule="statistics.names",
            where=model.location,
        )
    rows: dict[str, dict[int, tuple[Array, int]]] = {}
    for name in statistics.names:
        matrix = statistics.for_matrix(name)
        if matrix is not None and name in gguf_names:
            stacked, _, expert_index = gguf_names[name].partition(":expert.")
            rows.setdefault(stacked, {})[int(expert_index or 0)] = matrix.diagonal, matrix.count
    arrays: dict[str, Array] = {}
    for stacked, members in rows.items():
        width = len(next(iter(members.values()))[0])
        sums = np.zeros((max(members) + 1, width), np.float32)
        counts = np.zeros((max(members) + 1, 1), np.float32)
        for expert, (squares, count) in members.items():
            sums[expert] = squares * np.float32(count)
            counts[expert] = count
        arrays[stacked + SUMS] = sums
        arrays[stacked + COUNTS] = counts
    save(path, arrays, _imatrix_metadata(statistics), format="gguf", overwrite=overwrite)
    return [name for name in statistics.names if name not in gguf_names]


def _imatrix_metadata(statistics: Statistics) -> dict[str, Any]:
    def read_count(key: str) -> int:
        text = statistics.metadata.get(key, "1")
        return int(text) if text.isdecimal() else 1

    source = statistics.metadata.get("source", "ingot")
    return {TYPE_KEY: "imatrix", DATASETS: [source], CHUNKS: read_count("samples"), CHUNK_SIZE: read_count("length")}
