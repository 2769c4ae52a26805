"""Reference of the kernels of ``float_entropy``, written after ``spec/float_entropy.md``: plain Python integers as bit
streams, NumPy for counting. Encoding gives the kernels' bytes, decoding takes well-formed chunks only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any

import numpy as np

from tests.support.reference import rans
from tests.support.reference.frequencies import frequencies, frequency_table, ideal_bytes, read_frequencies

Array = np.ndarray[Any, np.dtype[Any]]

RAW, CONSTANT, HUFFMAN, ANS, JOINT, RANS, JOINT_RANS = range(7)
STREAMS, LIMIT, SCALE_BITS, DISTINCT, SIX_BLOCK = 4, 12, 13, 256, 1024
RANS_BITS, RANS_LEAST, RANS_DISTINCT = 12, 1 << 16, 128
SCALE = 1 << SCALE_BITS


def encode(words: Array, chunk: int, *, max: bool, joint: bool) -> tuple[list[int], bytes]:
    """Return the size of each chunk and all their bytes."""
    chunks = [encode_chunk(words[start : start + chunk], max, joint) for start in range(0, words.size, chunk)]
    return [len(item) for item in chunks], b"".join(chunks)


def decode(sizes: Sequence[int], data: bytes, chunk: int, count: int, width: int) -> Array:
    """Return ``count`` words of ``width`` bytes."""
    out, start = np.empty(count, f"u{width}"), 0
    for index, size in enumerate(sizes):
        n = min(chunk, count - index * chunk)
        out[index * chunk : index * chunk + n] = decode_chunk(data[start : start + size], n, width)
        start += size
    return out


# Planes.


def split(words: Array) -> list[Array]:
    """Return the byte planes, highest first, of words rotated left by one bit."""
    width = words.dtype.itemsize
    turned = (words << words.dtype.type(1)) | (words >> words.dtype.type(8 * width - 1))
    return [(turned >> words.dtype.type(8 * (width - 1 - k))).astype(np.uint8) for k in range(width)]


def join(planes: Sequence[Array]) -> Array:
    """Invert ``split``."""
    width = len(planes)
    kind = np.dtype(f"u{width}").type
    turned = np.zeros(planes[0].size, kind)
    for k, plane in enumerate(planes):
        turned |= plane.astype(kind) << kind(8 * (width - 1 - k))
    return np.asarray((turned >> kind(1)) | (turned << kind(8 * width - 1)))


def pack_six(values: Array) -> bytes:
    """Pack the six low bits of each byte: four in three bytes, in blocks."""
    out = b""
    for start in range(0, values.size, SIX_BLOCK):
        block = values[start : start + SIX_BLOCK] & 63
        quarters = np.resize(np.append(block, np.zeros(-block.size % 4, np.uint8)), (4, -(-block.size // 4)))
        out += b"".join(
            ((quarters[k] | (quarters[3] >> 2 * k) << 6) & 255).astype(np.uint8).tobytes() for k in range(3)
        )
    return out


def unpack_six(data: bytes, n: int) -> Array:
    """Invert ``pack_six``."""
    blocks = []
    for start in range(0, n, SIX_BLOCK):
        count = min(SIX_BLOCK, n - start)
        quarter = -(-count // 4)
        runs = np.frombuffer(data, np.uint8, 3 * quarter, start // 4 * 3).reshape(3, quarter)
        fourth = (runs[0] >> 6) | (runs[1] >> 6) << 2 | (runs[2] >> 6) << 4
        blocks.append(np.concatenate([(runs & 63).reshape(-1), fourth])[:count])
    return np.concatenate(blocks)


def counts_of(values: Array, symbols: int) -> list[int]:
    return [int(count) for count in np.bincount(values, minlength=symbols)]


# Huffman.


def code_lengths(counts: Sequence[int]) -> list[int]:
    """Optimal lengths of at most ``LIMIT`` bits by package-merge; items sort by count, then value, before packages."""
    items = sorted((count, value) for value, count in enumerate(counts) if count)
    levels: list[list[tuple[int, int]]] = []
    packages: list[tuple[int, int]] = []
    for _ in range(LIMIT):
        level = list(merge([(count, 0) for count, _ in items], packages))
        levels.append(level)
        packages = [(level[i][0] + level[i + 1][0], 1) for i in range(0, len(level) - 1, 2)]
    lengths, wanted = [0] * len(counts), 2 * len(items) - 2
    for level in reversed(levels):
        taken = sum(1 - is_package for _, is_package in level[:wanted])
        for _, value in items[:taken]:
            lengths[value] += 1
        wanted = 2 * (wanted - taken)
    return lengths


def canonical(lengths: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return (code with its first bit lowest, length) of every value that has a code."""
    codes, code, before = {}, 0, 0
    for length, value in sorted((length, value) for value, length in enumerate(lengths) if length):
        code <<= length - before
        codes[value] = (int(f"{code:0{length}b}"[::-1], 2), length)
        code, before = code + 1, length
    return codes


def quarters(n: int) -> list[tuple[int, int]]:
    quarter = -(-n // STREAMS)
    return [(min(s * quarter, n), min((s + 1) * quarter, n)) for s in range(STREAMS)]


def encode_huffman(plane: Array) -> bytes:
    counts = counts_of(plane, 256)
    lengths = code_lengths(counts)
    codes = canonical(lengths)
    present = sorted(codes)
    table = lengths[present[0] : present[-1] + 1]
    nibbles = [*table, 0]
    packed = bytes(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, len(table), 2))
    streams = []
    for start, stop in quarters(plane.size):
        bits, held = 0, 0
        for value in plane[start:stop].tolist():
            code, length = codes[value]
            bits |= code << held
            held += length
        streams.append(bits.to_bytes(-(-held // 8), "little"))
    sizes = b"".join(len(stream).to_bytes(3, "little") for stream in streams)
    return bytes((present[0], present[-1])) + packed + sizes + b"".join(streams)


def decode_huffman(data: bytes, n: int) -> tuple[Array, int]:
    """Return the plane and how many bytes it took."""
    first, last = data[0], data[1]
    span = last - first + 1
    at = 2 + (span + 1) // 2
    lengths = [0] * first + [data[2 + i // 2] >> i % 2 * 4 & 15 for i in range(span)]
    values = {code: value for value, code in canonical(lengths).items()}
    sizes = [int.from_bytes(data[at + 3 * s : at + 3 * s + 3], "little") for s in range(STREAMS)]
    at += 3 * STREAMS
    out = np.empty(n, np.uint8)
    for (start, stop), size in zip(quarters(n), sizes, strict=True):
        bits = int.from_bytes(data[at : at + size], "little")
        at += size
        for i in range(start, stop):
            length = next(length for length in range(1, LIMIT + 1) if (bits & (1 << length) - 1, length) in values)
            out[i] = values[bits & (1 << length) - 1, length]
            bits >>= length
    return out, at


# ANS.


def spread(freq: Sequence[int], bits: int = SCALE_BITS) -> list[int]:
    """Return the symbol of every one of ``2**bits`` states."""
    scale = 1 << bits
    symbols, at = [0] * scale, 0
    for symbol, count in enumerate(freq):
        for _ in range(count):
            symbols[at] = symbol
            at = (at + (scale >> 1) + (scale >> 3) + 3) % scale
    return symbols


def by_rans(counts: Sequence[int]) -> bool:
    """Whether a chunk is large enough, and its symbols few enough, for rANS."""
    return sum(counts) >= RANS_LEAST and sum(map(bool, counts)) <= RANS_DISTINCT


def encode_ans(symbols: Array, counts: Sequence[int]) -> bytes:
    freq = frequencies(counts)
    states: dict[int, list[int]] = {}
    for state, symbol in enumerate(spread(freq)):
        states.setdefault(symbol, []).append(SCALE + state)
    heads, streams = b"", []
    for s in range(STREAMS):
        state, pieces = SCALE, []
        for symbol in symbols[s::STREAMS].tolist()[::-1]:
            count = freq[symbol]
            bits = next(bits for bits in range(SCALE_BITS + 1) if count <= state >> bits < 2 * count)
            pieces.append((state & (1 << bits) - 1, bits))
            state = states[symbol][(state >> bits) - count]
        total = sum(bits for _, bits in pieces)
        stream, held = 0, -total % 8
        pad = held
        for value, bits in reversed(pieces):
            stream |= value << held
            held += bits
        streams.append(stream.to_bytes(held // 8, "little"))
        heads += (state - SCALE | pad << 13).to_bytes(2, "little") + len(streams[-1]).to_bytes(3, "little")
    return frequency_table(freq) + heads + b"".join(streams)


def decode_rans(data: bytes, n: int) -> tuple[Array, int]:
    """Return the symbols and how many bytes they took."""
    freq, at = read_frequencies(data)
    symbols, at = rans.decode(data, at, [freq], [0] * n, RANS_BITS)
    return np.array(symbols, np.uint16), at


def decode_ans(data: bytes, n: int) -> tuple[Array, int]:
    """Return the symbols and how many bytes they took."""
    freq, at = read_frequencies(data)
    seen, rows = list(freq), []
    for symbol in spread(freq):
        bits = SCALE_BITS + 1 - seen[symbol].bit_length()
        rows.append((symbol, bits, (seen[symbol] << bits) - SCALE))
        seen[symbol] += 1
    out = np.empty(n, np.uint16)
    begin = at + 5 * STREAMS
    for s in range(STREAMS):
        head, size = int.from_bytes(data[at : at + 2], "little"), int.from_bytes(data[at + 2 : at + 5], "little")
        stream = int.from_bytes(data[begin : begin + size], "little") >> (head >> 13)
        state = head & 0x1FFF
        for i in range(s, n, STREAMS):
            out[i], bits, base = rows[state]
            state = base + (stream & (1 << bits) - 1)
            stream >>= bits
        assert state == 0
        assert stream == 0
        at, begin = at + 5, begin + size
    return out, begin


DECODERS = {
    HUFFMAN: decode_huffman,
    ANS: decode_ans,
    JOINT: decode_ans,
    RANS: decode_rans,
    JOINT_RANS: decode_rans,
}

# Chunks.


@dataclass(frozen=True)
class Chosen:
    """How a plane is stored; ``planned`` is the size that the choice went by."""

    mode: int
    planned: int


def promises(plane: Array, part: int) -> bool:
    """Whether one run of 256 in sixteen says that coding saves a part in ``part``."""
    if plane.size < 4096:
        return True
    runs = plane[: plane.size // 256 * 256].reshape(-1, 256)[::16]
    return ideal_bytes(counts_of(runs.reshape(-1), 256)) <= runs.size - runs.size // part


def coded_size(counts: Sequence[int]) -> int:
    """What a plane or two take as planned: by rANS, where that is chosen, else by ANS."""
    if not by_rans(counts):
        return len(frequency_table(frequencies(counts))) + 5 * STREAMS + ideal_bytes(counts)
    freq = frequencies(counts, RANS_BITS)
    return len(frequency_table(freq)) + rans.HEAD + rans.coded_bytes(counts, freq, RANS_BITS)


def choose(plane: Array, max: bool, sampled: bool) -> Chosen:
    n, part = plane.size, 64 if max else 16
    if sampled and not promises(plane, part):
        return Chosen(RAW, n)
    counts = counts_of(plane, 256)
    if counts[int(plane[0])] == n:
        return Chosen(CONSTANT, 1)
    margin = n // part if sampled else 0
    best = Chosen(RAW, n)
    huffman = len(encode_huffman(plane))
    if huffman < n - margin:
        best = Chosen(HUFFMAN, huffman)
    if max:
        size = coded_size(counts)
        if size < best.planned - (margin if best.mode == RAW else 0):
            best = Chosen(RANS if by_rans(counts) else ANS, size)
    return best


def payload(plane: Array, chosen: Chosen) -> tuple[int, bytes]:
    """Return mode and bytes; ANS or rANS that comes out larger than the plane gives way."""
    if chosen.mode in (ANS, RANS):
        data = encode_symbols(plane, counts_of(plane, 256))
        if len(data) <= plane.size:
            return chosen.mode, data
        return RAW, plane.tobytes()
    if chosen.mode == HUFFMAN:
        return HUFFMAN, encode_huffman(plane)
    return chosen.mode, plane[:1].tobytes() if chosen.mode == CONSTANT else plane.tobytes()


def encode_symbols(symbols: Array, counts: Sequence[int]) -> bytes:
    """Code by rANS where that is chosen, else by ANS."""
    if not by_rans(counts):
        return encode_ans(symbols, counts)
    freq = frequencies(counts, RANS_BITS)
    return frequency_table(freq) + rans.encode(symbols.tolist(), [freq], [0] * symbols.size, RANS_BITS)


def encode_joint(planes: Sequence[Array]) -> tuple[int, bytes] | None:
    """Return mode and payload of the two upper planes coded jointly, None where that does not pay."""
    n = planes[0].size
    symbols = planes[0].astype(np.uint16) << 2 | planes[1] >> 6
    counts = counts_of(symbols, 1024)
    if sum(map(bool, counts)) > DISTINCT:
        return None
    apart = choose(planes[1], True, True).planned
    apart += coded_size(counts_of(planes[0], 256)) if by_rans(counts) else choose(planes[0], True, False).planned
    six = pack_six(planes[1])
    if len(six) + coded_size(counts) >= min(apart, 2 * n):
        return None
    data = six + encode_symbols(symbols, counts)
    return (JOINT_RANS if by_rans(counts) else JOINT, data) if len(data) <= 2 * n else None


def encode_chunk(words: Array, max: bool, joint: bool) -> bytes:
    """Return one chunk's bytes."""
    planes = split(words)
    modes, data = b"", b""
    if max and joint:
        both = encode_joint(planes)
        if both is not None:
            modes, data = bytes((both[0], both[0])), both[1]
    for k in range(len(modes), len(planes)):
        mode, piece = payload(planes[k], choose(planes[k], max, k != 0))
        modes, data = modes + bytes((mode,)), data + piece
    return modes + data


def decode_chunk(data: bytes, n: int, width: int) -> Array:
    """Return the n words of a chunk."""
    modes, at = data[:width], width
    planes: list[Array] = []
    while len(planes) < width:
        mode = modes[len(planes)]
        if mode in (JOINT, JOINT_RANS):
            six_bytes = n // SIX_BLOCK * (SIX_BLOCK // 4 * 3) + -(-(n % SIX_BLOCK) // 4) * 3
            six = unpack_six(data[at : at + six_bytes], n)
            at += six_bytes
            symbols, size = DECODERS[mode](data[at:], n)
            planes += [(symbols >> 2).astype(np.uint8), (six | (symbols << 6)).astype(np.uint8)]
        elif mode in DECODERS:
            values, size = DECODERS[mode](data[at:], n)
            planes.append(values.astype(np.uint8))
        else:
            size = n if mode == RAW else 1
            planes.append(np.resize(np.frombuffer(data, np.uint8, size, at), n))
        at += size
    assert at == len(data)
    return join(planes)
