"""Kernels of the encoding ``ingot.packed/1``: symbols in contexts, and fields of bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ingot.core.runtime import native

Array = np.ndarray[Any, np.dtype[Any]]
NONE = np.empty(0, np.uint8)


def every_isa() -> Iterator[str]:
    """Activate each instruction set of this machine in turn."""
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.set_isa(isa)
            yield isa
    finally:
        native.set_isa(before)


def symbols_of(size: int, seed: int = 0, *, pairs: bool) -> Array:
    rng = np.random.default_rng(seed)
    if not pairs:
        return np.clip(rng.normal(128, 20, size).round(), 0, 255).astype(np.uint8)
    low, high = np.clip(rng.normal(8, 2, (2, size)).round(), 0, 15).astype(np.uint8)
    return low | high << 4


def encode(symbols: Array, unit: int, contexts: Array, count: int, *, pairs: bool) -> Array:
    out = np.full(2 * symbols.size + 4096, 0xA5, np.uint8)
    size = native.kernels.symbols_encode(symbols, unit, contexts, count, pairs, out[:-64])
    assert (out[-64:] == 0xA5).all()
    assert size
    return out[:size]


def decode(data: Array, size: int, unit: int, contexts: Array, count: int, *, pairs: bool) -> tuple[int, Array]:
    """Decode into the middle of a larger buffer: the bytes around it must stay."""
    guarded = np.full(size + 128, 0x5A, np.uint8)
    status = native.kernels.symbols_decode(data, unit, contexts, count, pairs, guarded[64:-64])
    assert (guarded[:64] == 0x5A).all()
    assert (guarded[-64:] == 0x5A).all()
    return status, guarded[64:-64]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("unit", "count"), [(1, 1), (1, 8), (16, 2), (32, 4), (7, 3), (256, 1)])
def test_every_instruction_set_writes_and_reads_the_same(unit: int, count: int, pairs: bool) -> None:
    for units in (1, 3, 40, 1000):
        symbols = symbols_of(units * unit, units, pairs=pairs)
        contexts = NONE if count == 1 else np.random.default_rng(units).integers(0, count, units, np.uint8)
        written = []
        for _ in every_isa():
            written.append(encode(symbols, unit, contexts, count, pairs=pairs))
            status, back = decode(written[0], symbols.size, unit, contexts, count, pairs=pairs)
            assert status == 0
            np.testing.assert_array_equal(back, symbols)
        assert all(bytes(data) == bytes(written[0]) for data in written)


@pytest.mark.parametrize("pairs", [False, True])
def test_damaged_symbols_are_refused_or_others(pairs: bool) -> None:
    symbols = symbols_of(3000, pairs=pairs)
    data = encode(symbols, 1, NONE, 1, pairs=pairs)
    statuses = []
    for position in range(data.size):
        damaged = data.copy()
        damaged[position] ^= 1 << position % 8
        status, back = decode(damaged, symbols.size, 1, NONE, 1, pairs=pairs)
        statuses.append(status)
        assert status in (2, 3) or (status == 0 and (back != symbols).any())
    assert {2, 3} <= set(statuses)


def test_streams_must_end_with_the_last_symbol() -> None:
    symbols = symbols_of(3000, pairs=True)
    data = encode(symbols, 1, NONE, 1, pairs=True)
    for cut in (0, 1, 5, 100, data.size - 2, data.size - 1):
        assert decode(data[:cut], symbols.size, 1, NONE, 1, pairs=True)[0] in (2, 3)
    assert decode(np.append(data, data[:2]), symbols.size, 1, NONE, 1, pairs=True)[0] == 3
    assert decode(data, symbols.size - 1, 1, NONE, 1, pairs=True)[0] == 3
    assert decode(data, symbols.size + 1, 1, NONE, 1, pairs=True)[0] == 3


def test_a_table_of_one_symbol_and_a_skewed_product() -> None:
    """The product of frequencies 4095 and 1 rounds to 0 for the rarest pair, which must still be codable."""
    rare = np.zeros(8192, np.uint8)
    rare[100] = 0x11
    for symbols in (np.full(500, 7, np.uint8), rare):
        data = encode(symbols, 1, NONE, 1, pairs=True)
        status, back = decode(data, symbols.size, 1, NONE, 1, pairs=True)
        assert status == 0
        np.testing.assert_array_equal(back, symbols)


def test_wrong_arguments_are_errors() -> None:
    symbols = symbols_of(64, pairs=True)
    out = np.empty(4096, np.uint8)
    two = np.array([0, 1], np.uint8)
    for unit, contexts, count in (
        (3, NONE, 1),
        (0, NONE, 1),
        (32, two, 1),
        (32, NONE, 2),
        (32, two, 9),
        (32, 2 * two, 2),
    ):
        with pytest.raises(ValueError, match="expected"):
            native.kernels.symbols_encode(symbols, unit, contexts, count, True, out)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.symbols_encode(NONE, 1, NONE, 1, True, out)


FIELD = [0, 4, 0, 0, 4, 0, 8, 4, 0]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (0, 1),
        (0, -1),
        (0, 2**62),
        (1, 5),
        (1, 2**62),
        (2, 1),
        (2, 8),
        (3, 5),
        (4, 9),
        (5, 8),
        (6, 0),
        (6, 9),
        (7, 5),
        (8, 3),
    ],
)
def test_fields_past_the_arrays_are_errors(column: int, value: int) -> None:
    source = np.arange(40, dtype=np.uint8)
    target = np.zeros(40, np.uint8)
    native.kernels.move_bits(source, target, 10, np.array(FIELD, np.int64))
    np.testing.assert_array_equal(target, source)
    field = np.array(FIELD, np.int64)
    field[column] = value
    with pytest.raises(ValueError, match="expected"):
        native.kernels.move_bits(source, target, 10, field)


def test_bits_move_between_bytes_and_arrays_of_bits() -> None:
    source = np.random.default_rng(1).integers(0, 256, 5 * 4, np.uint8)
    for _ in every_isa():
        spread = np.zeros(5 * 32, np.uint8)
        native.kernels.move_bits(source, spread, 5, np.array([0, 4, 0, 0, 32, 3, 1, 32, 1], np.int64))
        np.testing.assert_array_equal(spread, np.unpackbits(source, bitorder="little") << 3)
        back = np.zeros(20, np.uint8)
        native.kernels.move_bits(spread, back, 5, np.array([0, 32, 3, 0, 4, 0, 1, 32, 2], np.int64))
        np.testing.assert_array_equal(back, source)
