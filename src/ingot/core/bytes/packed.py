"""The encoding ``ingot.packed/1``: entropy coding of packed integers and blocks, byte for byte (``spec/packed.md``).

A part is a sequence of equal records, such as ggml's blocks. They are encoded in independent frames. In a frame the
bits of all records are sorted into streams: scales, minima, codes. Each stream is coded as symbols, with a table for
every context of a unit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from ingot.core.bytes.record_layout import (
    BYTE,
    CENTERED,
    HALF,
    MAGNITUDE,
    MAX_LAYOUT,
    NO_KEY,
    RULE,
    RecordLayout,
    Stream,
    read_layout,
)
from ingot.core.runtime import native
from ingot.errors import FormatError

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | bytearray | memoryview

PACKED = "ingot.packed/1"
FRAME = 1 << 19
"""Decoded bytes of a frame, rounded down to whole records."""
MAX_CONTENT = 1 << 20
MAX_RATIO = MAX_CONTENT // 8
"""The largest number of decoded bytes per stored byte.

A frame decodes to at most ``MAX_CONTENT`` bytes, and has at least its eight bytes in the index.
"""
_MAX_SYMBOLS = 1 << 20
_MAGIC = b"ingpack1"
_END = Struct("<IIII8s")
_FRAME = Struct("<II")
_SEARCHED = 1 << 20
_RAW, _CODED = range(2)
_PLAIN, _CONSTANT, _SYMBOLS = range(3)
_MAX_CONTEXTS = 8
_SAMPLE = 1 << 13  # the fewest symbols that are coded to choose contexts
_MAX_STEP = 16  # at least one unit in sixteen is coded to choose contexts
_GAIN = 0.999  # more contexts must save a thousandth, because they take time
_SLACK = 4096  # bytes of a buffer for each stream in addition to its symbols: heads, and tables of small streams
_SHORT = 64  # symbols that are compared first to find a constant stream


def content_of(layout: RecordLayout) -> int:
    """Return the number of decoded bytes of each frame except the last."""
    limit = min(FRAME // layout.record, _MAX_SYMBOLS // layout.width)
    return max(1, limit) * layout.record


def bound(size: int) -> int:
    """Return the largest possible size of ``size`` bytes after encoding."""
    frames = max(1, -(-size // (FRAME // 4)))
    return size + (1 + _FRAME.size) * frames + MAX_LAYOUT + _END.size


def encode_frame(layout: RecordLayout, data: Buffer) -> bytes:
    """Encode the content of one frame; it takes at most one byte more than ``data``."""
    content = np.frombuffer(data, np.uint8)
    records = len(content) // layout.record
    body = content[: records * layout.record]
    tail = content[len(body) :]
    if records:
        target = _scratch("streams", records * layout.width)
        target[:] = 0
        layout.move(body, target, records, join=False)
        arrays = _split(layout, target, records)
        encoded = _scratch("frame", len(target) + len(arrays) * _SLACK)
        encoded[0] = _CODED
        size = 1
        for stream, symbols in zip(layout.streams, arrays, strict=True):
            size += _encode_stream(stream, symbols, _keys(stream, arrays, records), encoded[size:])
            if size > len(body):
                break
        if size <= len(body):
            return encoded[:size].tobytes() + tail.tobytes()
    return bytes((_RAW,)) + bytes(data)


_LOCAL = threading.local()


def _scratch(purpose: str, size: int) -> Array:
    """Return the first ``size`` bytes of a buffer that the calling thread reuses; new memory for every frame would be
    slow.
    """
    buffer: Array | None = getattr(_LOCAL, purpose, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        setattr(_LOCAL, purpose, buffer)
    return buffer[:size]


def checksum(content: Buffer) -> int:
    """Return the CRC-32C of a frame's content, which the index contains."""
    return native.crc32c(content, 0)


def _split(layout: RecordLayout, target: Array, records: int) -> list[Array]:
    """Return a view of every stream's bytes."""
    return [
        target[start * records : (start + stream.length) * records]
        for start, stream in zip(layout.starts, layout.streams, strict=True)
    ]


def _keys(stream: Stream, arrays: Sequence[Array], records: int) -> Array | None:
    """Return the key of every unit of a stream (u16); None if it has no key."""
    if stream.key == NO_KEY:
        return None
    first = arrays[stream.first]
    if stream.key == HALF:
        keys = (arrays[stream.second] & 0x7F).astype(np.uint16) << 8 | first
    elif stream.key == BYTE:
        keys = first.astype(np.uint16)
    elif stream.key == MAGNITUDE:
        keys = np.abs(first.view(np.int8).astype(np.int16)).astype(np.uint16)
    elif stream.key == CENTERED:
        keys = np.abs(first.astype(np.int16) - 32).astype(np.uint16)
    else:
        keys = (arrays[stream.second].astype(np.uint16) << 8) // (first.astype(np.uint16) + 1)
    units = stream.length // stream.unit * records
    return keys if len(keys) == units else np.repeat(keys, units // len(keys))


def _contexts(keys: Array, limits: Array) -> Array:
    """Return the context of every unit: the number of limits that its key reaches."""
    contexts = np.zeros(len(keys), np.uint8)
    for limit in limits:
        contexts += keys >= limit
    return contexts


_NO_CONTEXTS = np.empty(0, np.uint8)
_NO_LIMITS = np.empty(0, np.uint16)


def _encode_stream(stream: Stream, symbols: Array, keys: Array | None, out: Array) -> int:
    """Encode a stream at the start of ``out``, and return the number of bytes: at most one more than the symbols."""
    if _is_constant(symbols[:_SHORT]) and _is_constant(symbols):
        out[0] = _CONSTANT
        out[1] = symbols[0]
        return 2
    limits = _NO_LIMITS
    if keys is not None:
        step = max(1, min(_MAX_STEP, len(symbols) // _SAMPLE))
        sample = symbols
        if step > 1:
            sample = np.ascontiguousarray(symbols.reshape(-1, stream.unit)[::step]).reshape(-1)
        limits = _best_limits(stream, sample, keys[::step], step)
    start = 6 + 2 * len(limits)
    size = _code(stream, symbols, keys, limits, out[start : start + len(symbols) + _SLACK // 2])
    if not size or start + size > len(symbols):
        out[0] = _PLAIN
        out[1 : len(symbols) + 1] = symbols
        return 1 + len(symbols)
    head = bytes((_SYMBOLS, len(limits) + 1)) + limits.astype("<u2").tobytes() + size.to_bytes(4, "little")
    out[:start] = np.frombuffer(head, np.uint8)
    return start + size


def _is_constant(symbols: Array) -> bool:
    return bool((symbols == symbols[0]).all())


def _code(stream: Stream, symbols: Array, keys: Array | None, limits: Array, out: Array) -> int:
    """Code symbols with the contexts between ``limits``, and return the number of bytes; 0 if ``out`` is too small."""
    contexts = _NO_CONTEXTS if keys is None or not len(limits) else _contexts(keys, limits)
    return native.kernels.symbols_encode(symbols, stream.unit, contexts, len(limits) + 1, stream.pairs, out)


def _best_limits(stream: Stream, symbols: Array, keys: Array, scale: int) -> Array:
    """Return the limits of keys between contexts with which symbols take the fewest bytes.

    More contexts are tried as long as they help. ``symbols`` are a sample of a stream that has ``scale`` times as many
    symbols and tables of the same size.
    """
    ordered = np.sort(keys, kind="stable")  # by radix
    table = 2 * 16 if stream.pairs else min(256, int(symbols.max()) + 1)
    out = _scratch("sample", len(symbols) + _SLACK)
    best = _NO_LIMITS
    best_size = float("inf")
    for count in (1, 4, _MAX_CONTEXTS) if stream.unit == 1 else (1, 2, 4):
        quantiles = {int(ordered[len(ordered) * k // count]) for k in range(1, count)}
        limits = np.array(sorted(quantiles - {int(ordered[0])}), np.uint16)
        coded = _code(stream, symbols, keys, limits, out)
        tables = table * (len(limits) + 1)
        size = max(0, coded - tables) * scale + tables if coded else float("inf")
        if count > 1 and size >= _GAIN * best_size:
            break
        best = limits
        best_size = size
    return best


def decode_frame(layout: RecordLayout, frame: Buffer, out: Array, location: str) -> None:
    """Decode one frame into ``out``; raises ``FormatError`` ``part.packed`` unless it fills ``out`` exactly."""
    data = np.frombuffer(frame, np.uint8)
    mode = int(data[0]) if len(data) else -1
    records = len(out) // layout.record
    body = records * layout.record
    if mode == _RAW and len(data) == 1 + len(out):
        out[:] = data[1:]
        return
    if mode != _CODED or not records or records * layout.width > _MAX_SYMBOLS:
        raise _error("a frame of another mode or size", location)
    source = _scratch("streams", records * layout.width)
    arrays = _split(layout, source, records)
    position = 1
    for stream, symbols in zip(layout.streams, arrays, strict=True):
        position = _decode_stream(stream, data, position, symbols, _keys(stream, arrays, records), location)
    if len(data) - position != len(out) - body:
        raise _error("a frame with more or fewer bytes than its streams need", location)
    out[:body] = 0
    layout.move(source, out[:body], records, join=True)
    out[body:] = data[position:]


def _decode_stream(
    stream: Stream, data: Array, position: int, symbols: Array, keys: Array | None, location: str
) -> int:
    """Decode a stream from ``position`` on, and return the position after it."""
    head = data[position : position + 2]
    mode = int(head[0]) if len(head) else -1
    if mode == _PLAIN and len(data) - position > len(symbols):
        symbols[:] = data[position + 1 : position + 1 + len(symbols)]
        return position + 1 + len(symbols)
    if mode == _CONSTANT and len(head) == 2:
        symbols[:] = head[1]
        return position + 2
    count = int(head[1]) if len(head) == 2 else 0
    if mode != _SYMBOLS or not 1 <= count <= (1 if keys is None else _MAX_CONTEXTS):
        raise _error("a stream of another mode, or with another number of contexts", location)
    limits_end = position + 2 + 2 * (count - 1)
    start = limits_end + 4
    limits = np.frombuffer(data[position + 2 : limits_end].tobytes(), "<u2") if start <= len(data) else _NO_CONTEXTS
    length = int.from_bytes(data[limits_end:start].tobytes(), "little")
    if len(limits) != count - 1 or length > len(data) - start or bool((limits[1:] <= limits[:-1]).any()):
        raise _error("a stream that is cut off, or limits that do not ascend", location)
    contexts = _NO_CONTEXTS if keys is None or count == 1 else _contexts(keys, limits)
    coded = data[start : start + length]
    if native.kernels.symbols_decode(coded, stream.unit, contexts, count, stream.pairs, symbols):
        raise _error("a stream whose tables or symbols do not add up", location)
    return start + length


def _error(problem: str, location: str) -> FormatError:
    return FormatError(RULE, f"invalid bytes of encoding {PACKED}: {problem}", where=location)


def index_of(layout: RecordLayout, frames: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes after the last frame: layout, table of frames, and end.

    ``frames`` are pairs of the stored bytes and the CRC-32C of the content of each frame.
    """
    stored = layout.to_bytes()
    table = np.array(frames, "<u4").reshape(-1, 2).tobytes()
    numbers = (len(stored), len(frames), content_of(layout))
    digest = native.crc32c(stored + table + _END.pack(*numbers, 0, _MAGIC), 0)
    return stored + table + _END.pack(*numbers, digest, _MAGIC)


@dataclass(frozen=True)
class PackedIndex:
    """The layout of a part's records, and the stored bytes and checksum of each of its frames."""

    layout: RecordLayout
    content: int
    sizes: Array
    digests: Array


MIN_STORED = _END.size + len(RecordLayout(1, (), ()).to_bytes())
"""The smallest number of bytes of an index."""


def read_index(read: Callable[[int, int], Buffer], length: int, expected: int, location: str) -> PackedIndex:
    """Return the index of a part of ``length`` stored bytes and ``expected`` decoded bytes.

    ``read(offset, length)`` returns stored bytes. Raises ``FormatError`` ``part.packed``.
    """
    if length < MIN_STORED:
        raise _error(f"{length} bytes, without an index", location)
    layout_bytes, count, content, digest, magic = _END.unpack(read(length - _END.size, _END.size))
    table_bytes = count * _FRAME.size
    start = length - _END.size - table_bytes - layout_bytes
    if magic != _MAGIC or layout_bytes > MAX_LAYOUT or start < count or not 1 <= content <= MAX_CONTENT:
        raise _error("no index at the end", location)
    if count != -(-expected // content):
        raise _error(f"{count} frames for {expected} bytes", location)
    stored = bytes(read(start, layout_bytes + table_bytes))
    if native.crc32c(stored + _END.pack(layout_bytes, count, content, 0, _MAGIC), 0) != digest:
        raise _error("an index that differs from its checksum", location)
    layout = read_layout(stored[:layout_bytes], location)
    table = np.frombuffer(stored, "<u4", offset=layout_bytes).reshape(count, 2)
    sizes = table[:, 0].astype(np.int64)
    if int(sizes.sum()) != start or content % layout.record or (count and int(sizes.max()) > content + 1):
        raise _error("frames whose sizes do not fit the part", location)
    return PackedIndex(layout, content, sizes, table[:, 1])


def stored_length(read: Callable[[int, int], Buffer], limit: int, expected: int, location: str) -> int:
    """Return the number of stored bytes of a part whose end is not known, by its index.

    ``read(offset, length)`` returns bytes of a file; offset 0 is the start of the part, ``limit`` the end of the file.
    Raises ``FormatError`` ``part.packed`` if no index with a correct checksum follows.
    """
    overlap = len(_MAGIC) - 1
    for first in range(0, max(limit - overlap, 0), _SEARCHED):
        chunk = bytes(read(first, min(_SEARCHED + overlap, limit - first)))
        match = chunk.find(_MAGIC)
        while match >= 0:
            length = first + match + len(_MAGIC)
            try:
                read_index(read, length, expected, location)
            except FormatError:
                match = chunk.find(_MAGIC, match + 1)
            else:
                return length
    raise _error("no index", location)


def decode_checked(index: PackedIndex, number: int, frame: Buffer, out: Array, location: str) -> None:
    """Decode frame ``number`` into ``out`` and compare its checksum."""
    decode_frame(index.layout, frame, out, location)
    if checksum(out.data) != int(index.digests[number]):
        raise _error(f"frame {number}, which differs from its checksum", location)
