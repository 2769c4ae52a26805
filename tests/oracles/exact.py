"""Without loss: ``spec/float_entropy.md``, ``spec/delta_exact.md``, ``spec/tca_tbe.md``. Words of bits, not numbers."""

from __future__ import annotations

from math import prod

import numpy as np

from .common import Array, Stored, stream

_BYTES = {"f64": 8, "f32": 4, "i64": 8, "u64": 8, "i32": 4, "u32": 4}
_BYTES |= {"f16": 2, "bf16": 2, "i16": 2, "u16": 2}
_MANTISSA = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}
_MANTISSA |= {"f8_e4m3fn": 3, "f8_e5m2": 2, "f8_e4m3fnuz": 3, "f8_e5m2fnuz": 2}


class _Bits:
    """A run of bytes read bit by bit, the lowest first."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self._at = data, at

    def take(self, count: int) -> int:
        start, self._at = self._at, self._at + count
        assert self._at <= 8 * len(self._data)
        return int.from_bytes(self._data[start >> 3 : self._at + 7 >> 3], "little") >> (start & 7) & (1 << count) - 1


def _u24(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 3], "little")


def _huffman(data: bytes, n: int) -> tuple[list[int], int]:
    """The ``n`` values of a Huffman plane, and the bytes that it took."""
    first, last = data[0], data[1]
    count, at = last - first + 1, 2
    lengths = [data[at + i // 2] >> 4 * (i % 2) & 15 for i in range(count)]
    at += (count + 1) // 2
    assert sum(2.0**-length for length in lengths if length) == 1
    codes, code = {}, 0
    for length in range(1, 13):
        for value, own in enumerate(lengths):
            if own == length:
                codes[length, code] = first + value
                code += 1
        code <<= 1
    sizes = [_u24(data, at + 3 * s) for s in range(4)]
    at += 12
    quarter, out = -(-n // 4), []
    for s, size in enumerate(sizes):
        bits = _Bits(data[at : at + size])
        for _ in range(s * quarter, min((s + 1) * quarter, n)):
            code, length = bits.take(1), 1
            while (length, code) not in codes:
                code, length = code << 1 | bits.take(1), length + 1
            out.append(codes[length, code])
        at += size
    return out, at


def _frequencies(data: bytes, at: int) -> tuple[dict[int, int], int]:
    first, last = (int.from_bytes(data[at + 2 * i : at + 2 * i + 2], "little") for i in range(2))
    at, symbol, found = at + 4, first, {}
    while symbol <= last:
        value, at = data[at], at + 1
        if value >= 128:
            value, at = (value & 127) << 8 | data[at], at + 1
        if value:
            found[symbol] = value
            symbol += 1
        else:
            symbol += 1 + data[at]
            at += 1
    return found, at


def _states(frequencies: dict[int, int], log: int, step: int) -> list[tuple[int, int, int]]:
    """Symbol, bits to read, and what is added to them, of every state."""
    size = 1 << log
    assert sum(frequencies.values()) == size
    spread, place = [0] * size, 0
    for symbol in sorted(frequencies):
        for _ in range(frequencies[symbol]):
            spread[place] = symbol
            place = (place + step) % size
    count, table = dict(frequencies), []
    for symbol in spread:
        x = count[symbol]
        count[symbol] += 1
        bits = log - (x.bit_length() - 1)
        table.append((symbol, bits, (x << bits) - size))
    return table


def _ans(data: bytes, at: int, tables: list[list[tuple[int, int, int]]], which: list[int]) -> tuple[list[int], int]:
    """Symbols of four streams in turn; ``which`` table each one is of."""
    heads = [
        (int.from_bytes(data[at + 5 * s : at + 5 * s + 2], "little"), _u24(data, at + 5 * s + 2)) for s in range(4)
    ]
    at += 20
    bits, states = [], []
    for head, size in heads:
        bits.append(_Bits(data[at : at + size], head >> 13))
        states.append(head & 8191)
        at += size
    out = []
    for i, table in enumerate(which):
        symbol, width, base = tables[table][states[i % 4]]
        states[i % 4] = base + bits[i % 4].take(width)
        out.append(symbol)
    assert not any(states)
    return out, at


def _rans(data: bytes, at: int, tables: list[dict[int, int]], which: list[int], log: int) -> tuple[list[int], int]:
    """Symbols of 32 states in turn that share words; ``which`` frequencies each one is by."""
    words, at = _u24(data, at), at + 3
    states = [int.from_bytes(data[at + 4 * k : at + 4 * k + 4], "little") for k in range(32)]
    assert min(states) >= 65536
    at += 128
    end = at + 2 * words
    found: list[list[tuple[int, int, int]]] = []
    for table in tables:
        found.append([])
        for symbol in sorted(table):
            found[-1] += [(symbol, table[symbol], place) for place in range(table[symbol])]
        assert len(found[-1]) == 1 << log
    out, last = [], max(len(which) - 64, 0)
    for i, table_number in enumerate(which):
        k = i % 32
        if last <= i < last + 32:
            states[k] -= 65536
        symbol, frequency, place = found[table_number][states[k] % (1 << log)]
        states[k] = frequency * (states[k] >> log) + place
        if i < last and states[k] < 65536:
            states[k] = states[k] << 16 | int.from_bytes(data[at : at + 2], "little")
            at += 2
        out.append(symbol)
    assert at == end
    assert states == [0 if k < len(which) else 65536 for k in range(32)]
    return out, at


def _plane(mode: int, data: bytes, n: int) -> tuple[list[int], int]:
    if mode == 0:
        return list(data[:n]), n
    if mode == 1:
        return [data[0]] * n, 1
    if mode == 2:
        return _huffman(data, n)
    assert mode in (3, 5)
    frequencies, at = _frequencies(data, 0)
    if mode == 5:
        return _rans(data, at, [frequencies], [0] * n, 12)
    return _ans(data, at, [_states(frequencies, 13, 5123)], [0] * n)


def _joint(mode: int, data: bytes, n: int) -> tuple[list[int], list[int], int]:
    six: list[int] = []
    at = 0
    for start in range(0, n, 1024):
        m = min(1024, n - start)
        q = -(-m // 4)
        a, b, c = (data[at + k * q : at + (k + 1) * q] for k in range(3))
        d = [a[i] >> 6 | b[i] >> 6 << 2 | c[i] >> 6 << 4 for i in range(q)]
        six += [value & 63 for value in (*a, *b, *c, *d)][:m]
        at += 3 * q
    frequencies, at = _frequencies(data, at)
    if mode == 6:
        symbols, at = _rans(data, at, [frequencies], [0] * n, 12)
    else:
        symbols, at = _ans(data, at, [_states(frequencies, 13, 5123)], [0] * n)
    return [symbol >> 2 for symbol in symbols], [(s & 3) << 6 | low for s, low in zip(symbols, six, strict=True)], at


def _chunks(tensor: Stored) -> list[tuple[bytes, int]]:
    """Each chunk's bytes and elements."""
    data, at, left, out = tensor.parts["planes"][1], 0, prod(tensor.shape), []
    for size in tensor.numbers("sizes").tolist():
        out.append((data[at : at + size], min(tensor.params["chunk"], left)))
        at, left = at + size, left - min(tensor.params["chunk"], left)
    assert at == len(data)
    assert not left
    return out


def float_entropy(tensor: Stored) -> Array:
    """The words of all elements."""
    width, out = _BYTES.get(tensor.dtype, 1), []
    for data, n in _chunks(tensor):
        modes, at, planes = data[:width], width, []
        if modes[0] in (4, 6):
            assert modes[1] == modes[0]
            top, low, used = _joint(modes[0], data[at:], n)
            planes, at = [top, low], at + used
        for mode in modes[len(planes) :]:
            found, used = _plane(mode, data[at:], n)
            planes.append(found)
            at += used
        assert at == len(data)
        for values in zip(*planes, strict=True):
            turned = int.from_bytes(bytes(values), "big")
            out.append(turned >> 1 | (turned & 1) << (8 * width - 1))
    return np.array(out, f"u{width}").reshape(tensor.shape)


def delta_exact(tensor: Stored, base: Array) -> Array:
    """The fine-tune's words from the base's."""
    width = base.dtype.itemsize
    words, out, at = [int(word) for word in base.reshape(-1)], [], 0
    for data, n in _chunks(tensor):
        old = words[at : at + n]
        at += n
        if data[0] == 0:
            new = old
        elif data[0] == 1:
            new = [int.from_bytes(data[1 + i * width : 1 + (i + 1) * width], "little") for i in range(n)]
        elif data[0] == 2:
            new = _sparse(tensor.dtype, data[1:], old, width)
        else:
            new = _dense(tensor.dtype, data, old, width)
        out += new
    return np.array(out, base.dtype).reshape(tensor.shape)


def _moved(dtype: str, word: int, difference: int, bits: int) -> int:
    """A word and its difference word make the other word."""
    if dtype not in _MANTISSA:
        step = difference >> 1 if not difference & 1 else -(difference + 1 >> 1)
        return (word + step) % (1 << bits)
    sign, folded, size = word >> bits - 1, difference >> 1, 1 << bits - 1
    step = folded >> 1 if not folded & 1 else -(folded + 1 >> 1)
    return (sign ^ difference & 1) << bits - 1 | ((word & size - 1) + step) % size


def _sparse(dtype: str, data: bytes, old: list[int], width: int) -> list[int]:
    k, m, at = _u24(data, 0), _u24(data, 3), 6
    planes = []
    for n in (m, *[k] * width):
        found, used = _plane(data[at], data[at + 1 :], n)
        planes.append(found)
        at += 1 + used
    assert at == len(data)
    new, place, element = list(old), 0, 0
    for gap in planes[0]:
        place += gap
        if gap == 255:
            continue
        word = int.from_bytes(bytes(plane[element] for plane in planes[1:]), "big")
        new[place] = _moved(dtype, old[place], word, 8 * width)
        place, element = place + 1, element + 1
    assert element == k
    return new


def _dense(dtype: str, data: bytes, old: list[int], width: int) -> list[int]:
    bits, count = 8 * width, data[1] + 1
    first, at = [0, *data[2 : 1 + count]], 1 + count
    mantissa = _MANTISSA.get(dtype)
    bins = [word >> (bits - 8 if mantissa is None else mantissa) & 255 for word in old]
    if mantissa is not None and bits - 1 - mantissa < 8:
        bins = [value & (1 << bits - 1 - mantissa) - 1 for value in bins]
    which = [sum(1 for start in first[1:] if value >= start) for value in bins]
    tables = []
    for _ in range(count):
        frequencies, at = _frequencies(data, at)
        tables.append(frequencies)
    if data[0] == 4:
        symbols, at = _rans(data, at, tables, which, 11)
    else:
        assert data[0] == 3
        symbols, at = _ans(data, at, [_states(table, 11, 1283) for table in tables], which)
    tail, out = _Bits(data[at:]), []
    for word, symbol in zip(old, symbols, strict=True):
        flips = 4 * (bits - 2) if mantissa is not None else 4 * bits
        changes, rest = divmod(symbol, flips)
        kind, direction = rest >> 1, rest & 1
        if kind < 2:
            magnitude = kind
        else:
            length = kind >> 1
            magnitude = 1 << length | (kind & 1) << length - 1 | tail.take(length - 1)
        difference = magnitude << 1 | direction
        out.append(_moved(dtype, word, difference << 1 | changes if mantissa is not None else difference, bits))
    return out


def tca_tbe(tensor: Stored) -> Array:
    """The words of all elements."""
    rows, cols = tensor.matrix
    out = np.zeros((-(-rows // 64) * 64, -(-cols // 64) * 64), np.uint16)
    counts = tensor.numbers("counts").reshape(-1, 2)
    planes = [stream(tensor.parts[f"bitmap{k}"][1], 1, 4096 * len(counts)).reshape(-1, 64) for k in (1, 2, 3)]
    codes = planes[0] | planes[1] << 1 | planes[2] << 2
    high, fallback = tensor.numbers("high"), tensor.numbers("fallback")
    h = f = 0
    wide = out.shape[1] // 64
    for tile, (ones, others) in enumerate(counts.astype(int)):
        a, b = h, f
        top, left = tile // wide * 64, tile % wide * 64
        for small in range(64):
            median, group, part = small // 16, small // 4 % 4, small % 4
            row, column = top + 16 * median + 8 * (part % 2), left + 16 * group + 8 * (part // 2)
            for p, code in enumerate(codes[64 * tile + small]):
                if code:
                    byte, a = int(high[a]), a + 1
                    word = (byte & 128) << 8 | (tensor.params["start"] + int(code)) << 7 | byte & 127
                else:
                    word, b = int(fallback[b]), b + 1
                out[row + p // 8, column + p % 8] = word
        assert (ones, others) == (-(-(a - h) // 16) * 16, -(-(b - f) // 8) * 8)
        h, f = h + ones, f + others
    assert (h, f) == (len(high), len(fallback))
    return out[:rows, :cols].reshape(tensor.shape)
