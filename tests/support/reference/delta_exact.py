"""Reference of the kernels of ``delta_exact``, written after ``spec/delta_exact.md``: Python integers for words and bit
streams. Encoding gives the kernels' bytes, applying takes well-formed chunks only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from tests.support.reference import rans
from tests.support.reference.float_entropy import RANS_LEAST, STREAMS, decode_huffman, encode_huffman, spread
from tests.support.reference.frequencies import frequencies, frequency_table, log2_fixed, read_frequencies

Array = np.ndarray[Any, np.dtype[Any]]

SAME, WHOLE, SPARSE, DENSE, DENSE_RANS = range(5)
MODES = ("same", "whole", "sparse", "dense", "dense by rANS")
RAW, CONSTANT, HUFFMAN = range(3)
SCALE_BITS, CONTEXTS, FAR = 11, 16, 255
SCALE = 1 << SCALE_BITS


@dataclass(frozen=True)
class Element:
    """An element of ``bits`` bits: sign and magnitude or an integer; ``shift`` is where a context begins."""

    bits: int
    floats: bool
    shift: int

    @property
    def low(self) -> int:
        """Bits of a difference below its magnitude."""
        return 2 if self.floats else 1

    @property
    def classes(self) -> int:
        return 2 * (self.bits - self.low)

    def turned(self, word: int) -> int:
        """Return magnitude above sign."""
        return (word << 1 | word >> (self.bits - 1)) & (1 << self.bits) - 1 if self.floats else word

    def bin(self, base: int) -> int:
        return self.turned(base) >> (self.shift + self.low - 1) & 255

    def difference(self, base: int, tuned: int) -> int:
        a, b, bits = self.turned(base), self.turned(tuned), self.bits
        if not self.floats:
            return zigzag(b - a, bits)
        return zigzag((b >> 1) - (a >> 1), bits - 1) << 1 | (a ^ b) & 1

    def applied(self, base: int, difference: int) -> int:
        a, bits = self.turned(base), self.bits
        if not self.floats:
            return (a + unzigzag(difference)) % (1 << bits)
        magnitude = ((a >> 1) + unzigzag(difference >> 1)) % (1 << bits - 1)
        return magnitude | ((a ^ difference) & 1) << bits - 1

    def symbol(self, difference: int) -> tuple[int, int, int]:
        """Return a difference's symbol, the bits that it leaves open, and how many these are."""
        magnitude, sign = difference >> self.low, difference >> self.low - 1 & 1
        turns = difference & 1 if self.floats else 0
        below = magnitude.bit_length() - 1
        exponent_class, count = (
            (magnitude, 0) if magnitude < 2 else (2 * below + (magnitude >> below - 1 & 1), below - 1)
        )
        return turns * 2 * self.classes + 2 * exponent_class + sign, magnitude & (1 << count) - 1, count

    def open_bits(self, symbol: int) -> int:
        return max(symbol % (2 * self.classes) // 4 - 1, 0)

    def of_symbol(self, symbol: int, rest: int) -> int:
        exponent_class, sign = divmod(symbol % (2 * self.classes), 2)
        magnitude = exponent_class if exponent_class < 2 else (2 | exponent_class & 1) << self.open_bits(symbol) | rest
        return magnitude << self.low | sign << self.low - 1 | symbol // (2 * self.classes)


def zigzag(value: int, bits: int) -> int:
    """Fold a difference modulo ``2**bits``: 0, -1, 1, -2, ..."""
    value %= 1 << bits
    value -= (value >> bits - 1) << bits
    return 2 * value if value >= 0 else -2 * value - 1


def unzigzag(value: int) -> int:
    return value // 2 if value % 2 == 0 else -(value + 1) // 2


def encode(base: Array, tuned: Array, chunk: int, *, floats: bool, shift: int) -> tuple[list[int], bytes]:
    """Return the size of each chunk and all their bytes; arrays are flat words."""
    element = Element(8 * base.dtype.itemsize, floats, shift)
    chunks = [
        encode_chunk(element, base[start : start + chunk].tolist(), tuned[start : start + chunk].tolist())
        for start in range(0, base.size, chunk)
    ]
    return [len(item) for item in chunks], b"".join(chunks)


def apply(sizes: Sequence[int], data: bytes, chunk: int, base: Array, *, floats: bool, shift: int) -> Array:
    """Return the fine-tune's words."""
    element, start = Element(8 * base.dtype.itemsize, floats, shift), 0
    out = np.empty_like(base)
    for index, size in enumerate(sizes):
        piece = slice(index * chunk, (index + 1) * chunk)
        out[piece] = apply_chunk(element, data[start : start + size], base[piece].tolist())
        start += size
    return out


# Chunks.


def encode_chunk(element: Element, base: list[int], tuned: list[int]) -> bytes:
    n, width = len(base), element.bits // 8
    differences = [element.difference(old, new) for old, new in zip(base, tuned, strict=True)]
    changed = [i for i, difference in enumerate(differences) if difference]
    if not changed:
        return bytes((SAME,))
    whole = bytes((WHOLE,)) + b"".join(word.to_bytes(width, "little") for word in tuned)
    sparse = encode_sparse(width, changed, [differences[i] for i in changed]) if len(changed) <= n // 2 else whole
    if len(changed) > n // 16:
        dense = encode_dense(element, [element.bin(word) for word in base], differences)
        margin = dense.planned // 16 if len(sparse) < len(whole) else 0
        if dense.planned + margin < min(len(sparse), len(whole)) and len(dense.data) < len(whole):
            return dense.data
    return sparse if len(sparse) < len(whole) else whole


def apply_chunk(element: Element, data: bytes, base: list[int]) -> list[int]:
    width = element.bits // 8
    if data[0] == SAME:
        return base
    if data[0] == WHOLE:
        return [int.from_bytes(data[1 + i * width : 1 + (i + 1) * width], "little") for i in range(len(base))]
    differences = decode_sparse(data, len(base), width) if data[0] == SPARSE else decode_dense(element, data, base)
    return [element.applied(old, difference) for old, difference in zip(base, differences, strict=True)]


# Sparse.


def encode_sparse(width: int, changed: list[int], differences: list[int]) -> bytes:
    gaps, after = bytearray(), 0
    for i in changed:
        gaps += bytes((FAR,)) * ((i - after) // FAR) + bytes(((i - after) % FAR,))
        after = i + 1
    planes = [bytes(gaps)] + [
        bytes(difference >> 8 * (width - 1 - k) & 255 for difference in differences) for k in range(width)
    ]
    head = bytes((SPARSE,)) + len(changed).to_bytes(3, "little") + len(gaps).to_bytes(3, "little")
    return head + b"".join(map(encode_plane, planes))


def encode_plane(plane: bytes) -> bytes:
    if len(set(plane)) == 1:
        return bytes((CONSTANT, plane[0]))
    huffman = encode_huffman(np.frombuffer(plane, np.uint8))
    return bytes((HUFFMAN,)) + huffman if len(huffman) < len(plane) else bytes((RAW,)) + plane


def decode_sparse(data: bytes, n: int, width: int) -> list[int]:
    changes, gaps = int.from_bytes(data[1:4], "little"), int.from_bytes(data[4:7], "little")
    planes, at = [], 7
    for count in (gaps, *[changes] * width):
        mode, at = data[at], at + 1
        if mode == HUFFMAN:
            plane, size = decode_huffman(data[at:], count)
        else:
            size = count if mode == RAW else 1
            plane = np.resize(np.frombuffer(data, np.uint8, size, at), count)
        planes.append(plane.tolist())
        at += size
    assert at == len(data)
    out, position = [0] * n, 0
    words = iter(zip(*planes[1:], strict=True))
    for gap in planes[0]:
        position += gap
        if gap != FAR:
            out[position] = int.from_bytes(bytes(next(words)), "big")
            position += 1
    return out


# Dense.


@dataclass(frozen=True)
class Dense:
    """A chunk's bytes, and the size that the choice goes by."""

    planned: int
    data: bytes


@dataclass
class Group:
    """Neighbouring bins that share a table: the first that occurs, and their symbols' counts."""

    bin: int
    counts: list[int]

    @cached_property
    def cost(self) -> int:
        """About what coding takes, in 2**-12 bits."""
        total = sum(self.counts)
        present = [count for count in self.counts if count]
        less = sum(count * log2(count) for count in present)
        return total * log2(total) - less + (len(present) + 8 << 15)


log2 = lru_cache(None)(log2_fixed)


def joined(first: Group, other: Group) -> Group:
    return Group(first.bin, [a + b for a, b in zip(first.counts, other.counts, strict=True)])


def grouped(bins: list[int], symbols: list[int], count: int) -> list[Group]:
    """Join neighbouring bins as long as that saves, or there are too many."""
    groups = []
    for number in sorted(set(bins)):
        members = [symbol for where, symbol in zip(bins, symbols, strict=True) if where == number]
        groups.append(Group(number, [int(times) for times in np.bincount(members, minlength=count)]))
    pairs = [joined(number, other) for number, other in pairwise(groups)]
    while pairs:
        saved = [groups[i].cost + groups[i + 1].cost - pair.cost for i, pair in enumerate(pairs)]
        best = saved.index(max(saved))
        if saved[best] < 0 and len(groups) <= CONTEXTS:
            break
        groups[best : best + 2] = [pairs[best]]
        near = slice(max(best - 1, 0), best + 2)
        pairs[near] = [joined(number, other) for number, other in pairwise(groups[near])]
    return groups


def encode_dense(element: Element, bins: list[int], differences: list[int]) -> Dense:
    coded = [element.symbol(difference) for difference in differences]
    symbols = [symbol for symbol, _, _ in coded]
    groups = grouped(bins, symbols, element.classes << element.low)
    rest, held = 0, 0
    for _, value, count in coded:
        rest |= value << held
        held += count
    tables = [frequencies(group.counts, SCALE_BITS) for group in groups]
    contexts = [sum(group.bin <= bin for group in groups[1:]) for bin in bins]
    ranged = len(symbols) >= RANS_LEAST
    head = bytes((DENSE_RANS if ranged else DENSE, len(groups) - 1)) + bytes(group.bin for group in groups[1:])
    data = head + b"".join(map(frequency_table, tables))
    data += rans.encode(symbols, tables, contexts, SCALE_BITS) if ranged else encode_streams(symbols, contexts, tables)
    cost = sum(group.cost for group in groups)
    planned = 2 + len(groups) + (rans.HEAD if ranged else 5 * STREAMS) + -(-cost // (1 << 15)) + -(-held // 8)
    return Dense(planned, data + rest.to_bytes(-(-held // 8), "little"))


def encode_streams(symbols: list[int], contexts: list[int], tables: list[list[int]]) -> bytes:
    states: list[dict[int, list[int]]] = []
    for table in tables:
        states.append({})
        for state, symbol in enumerate(spread(table, SCALE_BITS)):
            states[-1].setdefault(symbol, []).append(SCALE + state)
    heads, streams = b"", []
    for s in range(STREAMS):
        state, pieces = SCALE, []
        for symbol, context in list(zip(symbols, contexts, strict=True))[s::STREAMS][::-1]:
            count = tables[context][symbol]
            bits = next(bits for bits in range(SCALE_BITS + 1) if count <= state >> bits < 2 * count)
            pieces.append((state & (1 << bits) - 1, bits))
            state = states[context][symbol][(state >> bits) - count]
        total = sum(bits for _, bits in pieces)
        stream, held = 0, -total % 8
        pad = held
        for value, bits in reversed(pieces):
            stream |= value << held
            held += bits
        streams.append(stream.to_bytes(held // 8, "little"))
        heads += (state - SCALE | pad << 13).to_bytes(2, "little") + len(streams[-1]).to_bytes(3, "little")
    return heads + b"".join(streams)


def decode_streams(data: bytes, at: int, contexts: list[int], tables: list[list[int]]) -> tuple[list[int], int]:
    """Return the symbols of four streams and where these end."""
    rows = [states_of(table) for table in tables]
    n = len(contexts)
    symbols, begin = [0] * n, at + 5 * STREAMS
    for s in range(STREAMS):
        head, size = int.from_bytes(data[at : at + 2], "little"), int.from_bytes(data[at + 2 : at + 5], "little")
        stream, state = int.from_bytes(data[begin : begin + size], "little") >> (head >> 13), head & 0x1FFF
        for i in range(s, n, STREAMS):
            symbols[i], bits, start = rows[contexts[i]][state]
            state = start + (stream & (1 << bits) - 1)
            stream >>= bits
        assert state == 0
        assert stream == 0
        at, begin = at + 5, begin + size
    return symbols, begin


def states_of(table: list[int]) -> list[tuple[int, int, int]]:
    """Return symbol, bits to read and what they are added to, for every state."""
    freq, rows = list(table), []
    for symbol in spread(freq, SCALE_BITS):
        bits = SCALE_BITS + 1 - freq[symbol].bit_length()
        rows.append((symbol, bits, (freq[symbol] << bits) - SCALE))
        freq[symbol] += 1
    return rows


def decode_dense(element: Element, data: bytes, base: list[int]) -> list[int]:
    more = data[1]
    firsts, at, tables = data[2 : 2 + more], 2 + more, []
    for _ in range(more + 1):
        table, at = read_frequencies(data, at)
        tables.append(table)
    contexts = [sum(first <= element.bin(word) for first in firsts) for word in base]
    if data[0] == DENSE_RANS:
        symbols, begin = rans.decode(data, at, tables, contexts, SCALE_BITS)
    else:
        symbols, begin = decode_streams(data, at, contexts, tables)
    rest, out = int.from_bytes(data[begin:], "little"), []
    for symbol in symbols:
        count = element.open_bits(symbol)
        out.append(element.of_symbol(symbol, rest & (1 << count) - 1))
        rest >>= count
    assert rest == 0
    return out
