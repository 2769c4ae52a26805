"""Reference of the rANS of ``float_entropy`` and ``delta_exact``, written after ``spec/float_entropy.md``."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.reference.frequencies import log2_fixed

LANES, BARE, LEAST = 32, 64, 1 << 16
HEAD = 3 + 4 * LANES


def coded_bytes(counts: Sequence[int], freq: Sequence[int], bits: int) -> int:
    """Return what coding by these frequencies takes, rounded up."""
    cost = sum(count * ((bits << 12) - log2_fixed(one)) for count, one in zip(counts, freq, strict=True) if count)
    return -(-cost // (8 << 12))


def starts_of(freq: Sequence[int]) -> list[int]:
    """Return the first slot of every symbol."""
    starts, start = [], 0
    for count in freq:
        starts.append(start)
        start += count
    return starts


def encode(symbols: Sequence[int], tables: Sequence[Sequence[int]], which: Sequence[int], bits: int) -> bytes:
    """Return number of words, states and words; ``which[i]`` is the table of frequencies of symbol i."""
    starts = [starts_of(table) for table in tables]
    bare, states, words = max(len(symbols) - BARE, 0), [0] * LANES, []
    for i in range(len(symbols) - 1, -1, -1):
        if i == bare - 1:
            states = [state + LEAST for state in states]
        count, start, x = tables[which[i]][symbols[i]], starts[which[i]][symbols[i]], states[i % LANES]
        if i < bare and x >> 32 - bits >= count:
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % LANES] = (x // count << bits) + start + x % count
    if bare == 0:
        states = [state + LEAST for state in states]
    head = len(words).to_bytes(3, "little") + b"".join(state.to_bytes(4, "little") for state in states)
    return head + b"".join(word.to_bytes(2, "little") for word in reversed(words))


def decode(
    data: bytes, at: int, tables: Sequence[Sequence[int]], which: Sequence[int], bits: int
) -> tuple[list[int], int]:
    """Return the symbols of words that begin with their number at ``at``, and where they end."""
    starts = [starts_of(table) for table in tables]
    slots = [[symbol for symbol, count in enumerate(table) for _ in range(count)] for table in tables]
    end = at + HEAD + 2 * int.from_bytes(data[at : at + 3], "little")
    states = [int.from_bytes(data[at + 3 + 4 * k : at + 7 + 4 * k], "little") for k in range(LANES)]
    at, bare, symbols = at + HEAD, max(len(which) - BARE, 0), []
    for i, table in enumerate(which):
        if i == bare:
            states = [state - LEAST for state in states]
        x = states[i % LANES]
        slot = x & (1 << bits) - 1
        symbol = slots[table][slot]
        symbols.append(symbol)
        x = tables[table][symbol] * (x >> bits) + slot - starts[table][symbol]
        if i < bare and x < LEAST:
            x = x << 16 | int.from_bytes(data[at : at + 2], "little")
            at += 2
        states[i % LANES] = x
    assert not any(states)
    assert at == end
    return symbols, end
