"""Importance matrices of llama.cpp: mean squares of the inputs of each matrix, under llama.cpp's names.

Two kinds of file (llama.cpp, tools/imatrix). GGUF with ``general.type`` = ``imatrix``: per matrix ``NAME.in_sum2`` f32
[experts, cols], sums of squares, and ``NAME.counts`` f32 [experts, 1], tokens. The older binary one, little-endian:
i32 entries; per entry i32 length and bytes of the name, i32 calls, i32 values, f32 values, which are means times calls,
of all experts one after the other.
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
"""Bytes by which a binary file is known."""
KIND = "general.type"
DATASETS = "imatrix.datasets"
CHUNKS = "imatrix.chunk_count"
CHUNK_SIZE = "imatrix.chunk_size"
SUMS = ".in_sum2"
COUNTS = ".counts"
_RULE = "statistics.imatrix"
_INT = Struct("<i")
_MOST_NAME = 512
_MOST_ENTRIES = 1 << 20
_MOST_VALUES = 1 << 28
_MOST_TOKENS = 1 << 53  # counted exactly


def is_binary(head: bytes) -> bool:
    """Whether a file that begins with these bytes is an importance matrix of the older kind."""
    if len(head) < 9 or head.startswith(MAGIC):
        return False
    entries = _INT.unpack_from(head)[0]
    length = _INT.unpack_from(head, 4)[0]
    name = head[8 : 8 + max(0, length)]
    named = 0 < entries <= _MOST_ENTRIES and 0 < length <= _MOST_NAME and name.isascii()
    return named and name.decode().isprintable() and (b".weight"[: len(name)] in name or len(name) < length)


def from_binary(location: Location) -> Statistics:
    """Read a file of the older binary form; raise ``FormatError`` ``statistics.imatrix`` if it is malformed."""
    return _made(dict(_binary_entries(location.read(), location.display)), location.display)


def from_gguf(checkpoint: Checkpoint) -> Statistics:
    """Read an opened GGUF file, which is closed; ``FormatError`` ``statistics.imatrix``."""
    with checkpoint:
        if checkpoint.metadata.get(KIND) != "imatrix":
            raise FormatError(
                _RULE,
                f"expected {KIND} = imatrix, found {checkpoint.metadata.get(KIND)!r:.40}",
                where=checkpoint.location,
            )
        return _made(dict(_gguf_entries(checkpoint)), checkpoint.location)


def _gguf_entries(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[Array, Array]]]:
    """Yield names with mean squares [experts, cols] and counts [experts]."""
    for key, tensor in checkpoint.items():
        if not key.endswith(SUMS):
            continue
        name = key.removesuffix(SUMS)
        other = checkpoint.get(name + COUNTS)
        cols = tensor.shape[-1] if tensor.shape else 0
        sums = tensor.numpy("f32").reshape(-1, cols) if cols else None
        counts = None if other is None else other.numpy("f32").reshape(-1)
        if sums is None or counts is None or len(counts) != len(sums):
            raise FormatError(
                _RULE, f"expected {COUNTS} for each row of {SUMS}", where=f"{checkpoint.location}: {name}"
            )
        if not ((counts >= 0) & (counts <= _MOST_TOKENS)).all():
            raise FormatError(_RULE, "expected numbers of tokens", where=f"{checkpoint.location}: {name}")
        yield name, (sums / np.maximum(counts, 1)[:, None], counts)


def _binary_entries(data: bytes, where: str) -> Iterator[tuple[str, tuple[Array, Array]]]:
    position = 0

    def number() -> int:
        nonlocal position
        position += 4
        if position > len(data):
            raise FormatError(_RULE, f"expected more than {len(data)} bytes: the file is truncated", where=where)
        return int(_INT.unpack_from(data, position - 4)[0])

    def taken(count: int, most: int, size: int = 1) -> bytes:
        nonlocal position
        if not 0 < count <= most or position + count * size > len(data):
            raise FormatError(_RULE, f"expected lengths within the file, found {count} at {position}", where=where)
        position += count * size
        return data[position - count * size : position]

    for _ in range(number()):
        raw = taken(number(), _MOST_NAME)
        calls = number()
        count = number()
        values = np.frombuffer(taken(count, _MOST_VALUES, 4), "<f4")
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise FormatError(_RULE, f"expected a name in UTF-8, found {raw!r:.80}", where=where) from None
        yield name, (values[None] / max(calls, 1), np.array([max(calls, 0)], np.float32))


def _made(found: Mapping[str, tuple[Array, Array]], location: str) -> Statistics:
    entries: dict[str, ArrayEntry] = {}
    for name, (squares, counts) in found.items():
        for number, (row, count) in enumerate(zip(squares, counts, strict=True)):
            key = name if len(squares) == 1 else f"{name}:expert.{number}"
            entries[f"{key}:{SQUARES}"] = ArrayEntry(np.ascontiguousarray(row))
            entries[f"{key}:{COUNT}"] = ArrayEntry(np.array([int(count)], np.int64))
    return Statistics(entries, {VERSION_KEY: VERSION}, location)


def names_of(model: Checkpoint) -> dict[str, str]:
    """Return the model's names by llama.cpp's; none where the architecture is not known.

    Raises ``MissingExtraError`` where the package gguf is not installed, and what reading ``config.json`` raises.
    """
    files = companions.read_files(model.companions) if CONFIG in model.companions else {}
    family = FAMILIES.get(str(companions.parsed(files, CONFIG).get("model_type")))
    if family is None:
        return {}
    names = Names(family)
    found = dict[str, str]()
    for name in model:
        expert = names.expert(name)
        there = names.to_gguf(name) if expert is None else f"{expert.stacked}:expert.{expert.number}"
        if there is not None:
            found[there] = name
    return found


def write_imatrix(path: AnyPath, statistics: Statistics, model: Checkpoint, *, overwrite: bool = False) -> list[str]:
    """Write the mean squares of all matrices as a GGUF importance matrix under llama.cpp's names.

    Returns the names that llama.cpp has no place for.

    Raises
    ------
    UnsupportedError, ResourceError
        As ``ingot.save``.
    UsageError
        ``statistics.names``: llama.cpp's names of this architecture are not known.
    """
    there = {own: other for other, own in names_of(model).items()}
    if not there:
        raise UsageError(
            "expected an architecture whose names in llama.cpp are known: take the safetensors file alone",
            rule="statistics.names",
            where=model.location,
        )
    rows: dict[str, dict[int, tuple[Array, int]]] = {}
    for name in statistics.names:
        matrix = statistics.for_matrix(name)
        if matrix is not None and name in there:
            stacked, _, number = there[name].partition(":expert.")
            rows.setdefault(stacked, {})[int(number or 0)] = matrix.diagonal, matrix.count
    arrays: dict[str, Array] = {}
    for stacked, members in rows.items():
        width = len(next(iter(members.values()))[0])
        sums = np.zeros((max(members) + 1, width), np.float32)
        counts = np.zeros((max(members) + 1, 1), np.float32)
        for expert, (squares, count) in members.items():
            sums[expert], counts[expert] = squares * np.float32(count), count
        arrays[stacked + SUMS], arrays[stacked + COUNTS] = sums, counts
    save(path, arrays, _stated(statistics), format="gguf", overwrite=overwrite)
    return [name for name in statistics.names if name not in there]


def _stated(statistics: Statistics) -> dict[str, Any]:
    def number(key: str) -> int:
        text = statistics.metadata.get(key, "1")
        return int(text) if text.isdecimal() else 1

    source = statistics.metadata.get("source", "ingot")
    return {KIND: "imatrix", DATASETS: [source], CHUNKS: number("samples"), CHUNK_SIZE: number("length")}
