"""Reference reader of the encoding ``ingot.packed/1``, written after ``spec/packed.md``, in integers and lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.support.reference import rans
from tests.support.reference.frequencies import read_frequencies

END = 24


class Layout(NamedTuple):
    """The numbers of a layout: the bytes of a record, streams and fields as tuples in the order of the document."""

    record: int
    streams: list[tuple[int, ...]]
    fields: list[tuple[int, ...]]


def decode(data: bytes, size: int) -> bytes:
    """Return the ``size`` decoded bytes of a part."""
    layout_bytes, count, content = (_u(data, len(data) - END + 4 * k, 4) for k in range(3))
    table = len(data) - END - 8 * count
    layout = _layout(data[table - layout_bytes : table])
    result = b""
    position = 0
    for index in range(count):
        stored = _u(data, table + 8 * index, 4)
        result += _frame(layout, data[position : position + stored], min(content, size - len(result)))
        position += stored
    assert position == table - layout_bytes
    return result


def _u(data: bytes, position: int, size: int) -> int:
    return int.from_bytes(data[position : position + size], "little")


def _layout(data: bytes) -> Layout:
    streams, position = [], 6
    for _ in range(data[4]):
        streams.append((_u(data, position, 2), _u(data, position + 2, 2), *data[position + 4 : position + 8]))
        position += 8
    fields = []
    for _ in range(data[5]):
        numbers = (_u(data, position, 2), _u(data, position + 2, 2), _u(data, position + 4, 2))
        fields.append((*numbers, *data[position + 6 : position + 10]))
        position += 12
    return Layout(_u(data, 0, 2), streams, fields)


def _frame(layout: Layout, data: bytes, size: int) -> bytes:
    if data[0] == 0:
        return data[1:]
    records, tail = divmod(size, layout.record)
    arrays: list[bytes] = []
    position = 1
    for stream in layout.streams:
        symbols, position = _stream(stream, data, position, records, arrays)
        arrays.append(symbols)
    assert len(data) - position == tail
    return b"".join(_record(layout, arrays, index) for index in range(records)) + data[position:]


def _record(layout: Layout, arrays: Sequence[bytes], index: int) -> bytes:
    """Return a record, bit by bit from its streams."""
    width = [stream[0] for stream in layout.streams]
    streams = b"".join(array[index * n : (index + 1) * n] for array, n in zip(arrays, width, strict=True))
    result = bytearray(layout.record)
    for source, target, count, source_shift, target_shift, bits, side in layout.fields:
        for i in range(count):
            for bit in range(bits):
                to = 8 * source + (i if side == 1 else 8 * i + source_shift + bit)
                at = 8 * target + (i if side == 2 else 8 * i + target_shift + bit)
                result[to // 8] |= (streams[at // 8] >> at % 8 & 1) << to % 8
    return bytes(result)


def _keys(stream: tuple[int, ...], arrays: Sequence[bytes], units: int) -> list[int]:
    _, _, _, key, first, second = stream
    a = arrays[first]
    if key == 1:
        numbers = [low + 256 * (high & 127) for low, high in zip(a, arrays[second], strict=True)]
    elif key == 2:
        numbers = list(a)
    elif key == 3:
        numbers = [abs(byte - 256 * (byte > 127)) for byte in a]
    elif key == 4:
        numbers = [abs(byte - 32) for byte in a]
    else:
        numbers = [256 * minimum // (scale + 1) for scale, minimum in zip(a, arrays[second], strict=True)]
    return [number for number in numbers for _ in range(units // len(numbers))]


def _stream(
    stream: tuple[int, ...], data: bytes, position: int, records: int, arrays: Sequence[bytes]
) -> tuple[bytes, int]:
    length, unit, pairs, key = stream[:4]
    size = length * records
    if data[position] == 0:
        return data[position + 1 : position + 1 + size], position + 1 + size
    if data[position] == 1:
        return data[position + 1 : position + 2] * size, position + 2
    count = data[position + 1]
    limits = [_u(data, position + 2 + 2 * k, 2) for k in range(count - 1)]
    position += 2 * count
    end = position + 4 + _u(data, position, 4)
    position += 4
    units = size // unit
    keys = _keys(stream, arrays, units) if key else [0] * units
    contexts = [sum(number >= limit for limit in limits) for number in keys]
    tables: list[list[int]] = []
    for context in range(count):
        table: list[int] = []
        if context in contexts:
            table, position = read_frequencies(data, position)
            if pairs:
                high, position = read_frequencies(data, position)
                table = _product(table + [0] * 16, high + [0] * 16)
        tables.append(table)
    order = sorted(range(units), key=lambda u: contexts[u])
    which = [contexts[u] for u in order for _ in range(unit)]
    symbols, position = rans.decode(data, position, tables, which, 12)
    assert position == end
    result = bytearray(size)
    for run, u in enumerate(order):
        result[u * unit : (u + 1) * unit] = bytes(symbols[run * unit : (run + 1) * unit])
    return bytes(result), end


def _product(low: Sequence[int], high: Sequence[int]) -> list[int]:
    products = [high[value // 16] * low[value % 16] for value in range(256)]
    freq = [max(1, (product + 2048) // 4096) if product else 0 for product in products]
    remaining = 4096 - sum(freq)
    while remaining:
        largest = max(freq)
        for value in range(256):
            if remaining and 2 * freq[value] > largest:
                step = 1 if remaining > 0 else -1
                freq[value] += step
                remaining -= step
    return freq
