"""Spans of bytes that are looked at together, endings of names, and names that lie on top of each other."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from ingot.core.parsing import columns
from ingot.core.parsing import columns as spans
from ingot.naming.names import any_ends

MASK = (1 << 64) - 1
PRIME = 0x9E3779B97F4A7C15
FORMS = columns.DigestSyntax(((b"a:", 3), (b"long:0x", 8)), b"0123456789abcdef")


def of_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_rows_are_compared_with_what_lies_at_their_places():
    chance = random.Random(1)
    data = bytes(chance.choice((0, 1)) for _ in range(400))
    starts = np.array([-1, *(chance.randrange(404) for _ in range(300)), 2**62], np.int64)
    for size in (1, 2, 3, 5):
        rows = np.array([[chance.choice((0, 1)) for _ in range(size)] for _ in starts], np.uint8)
        wanted = [
            0 <= at <= len(data) - size and data[at : at + size] == bytes(row)
            for at, row in zip(starts, rows, strict=True)
        ]
        assert spans.same(of_bytes(data), starts, rows).tolist() == wanted
        assert any(wanted)
    assert spans.same(of_bytes(b""), np.zeros(0, np.int64), np.zeros((0, 4), np.uint8)).tolist() == []


@pytest.mark.parametrize(
    ("start", "length", "wanted"),
    [(0, 3, True), (0, 4, False), (3, 1, False), (4, 4, True), (4, 5, False), (8, 0, True), (9, 0, False),
     (-1, 1, False), (4, -1, False), (2**62, 2**62, False)],
)  # fmt: skip
def test_zeros_are_such_as_lie_in_the_bytes(start, length, wanted):
    data = of_bytes(b"\0\0\0\1\0\0\0\0")
    assert spans.zeros(data, np.array([0, start]), np.array([1, length])) is wanted
    assert spans.zeros(data, np.array([start]), np.array([length])) is wanted


def test_digests_are_spelled_in_a_form_as_a_whole():
    texts = [b"a:0f9", b"a:0F9", b"a:0f", b"a:0f99", b"b:0f9", b"long:0x01234567", b"long:0x0123456g", b"long:0x", b""]
    data = b"".join(texts)
    ends = np.cumsum([len(text) for text in texts])
    starts = [*(ends - [len(text) for text in texts]).tolist(), -1, len(data) - 4, len(data) + 9]
    lengths = [*map(len, texts), -1, 5, 5]
    column = columns.Column(
        (struct.pack(f"{len(starts)}q", *starts), struct.pack(f"{len(lengths)}q", *lengths), b"", [], [])
    )
    found = columns.are_digests(column, data, FORMS).tolist()
    assert found == [True, False, False, False, False, True, False, False, False, True, False, False]
    one = columns.Column(((0, 3), (5, 3), b"", [], []))  # all alike
    assert columns.are_digests(one, data, FORMS).tolist() == [True] * 3


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], False),
        (["", "x.weight", "scale"], False),
        (["x.scale"], True),
        (["ü.scale"], True),
        (["\ud800.scale"], True),
        (["\ud800.scaly", "a"], False),
        (["x.größe"], True),
        (["x.scal"], False),
    ],
)
def test_endings_of_names_of_any_kind(names, wanted):
    assert any_ends(dict.fromkeys(names), (".scale", ".größe")) is wanted


def mixed(state: int, word: int) -> int:
    found = (state ^ word) * PRIME & MASK
    return found ^ found >> 29


def unmixed(found: int, state: int) -> int:
    """Return the word that leads from one state to the other."""
    first = found ^ found >> 29
    first = found ^ first >> 29
    first = found ^ first >> 29
    return first * pow(PRIME, -1, 1 << 64) & MASK ^ state


def colliding(count: int) -> list[str]:
    """Return names of 16 characters with one hash."""
    chance, names = random.Random(2), []
    while len(names) < count:
        word = int.from_bytes(bytes(chance.randrange(32, 127) for _ in range(8)), "little")
        last = unmixed(12345, mixed(16 * PRIME & MASK, word))
        if not last & 0x8080808080808080:
            names.append((word.to_bytes(8, "little") + last.to_bytes(8, "little")).decode())
    return names


def table_of(names: list[str]) -> columns.Table | None:
    schema = columns.record(columns.field("n", "number"))
    rows = b"".join(b"\x70" + name.encode() + b"\xa1\x61n\x01" for name in names)
    data = b"\xa1\x61o\xb9" + struct.pack(">H", len(names)) + rows
    return columns.cbor_table(data, schema, "o", max_depth=8, max_items=1 << 20)


def test_names_that_are_made_to_lie_on_top_of_each_other_deserve_a_closer_look():
    names = colliding(400)
    assert len(set(names)) == 400
    assert table_of(names) is None
    few = table_of(names[:100])
    assert few is not None
    assert dict(few.rows) == {name: row for row, name in enumerate(names[:100])}
    many = table_of([f"{index:016}" for index in range(20_000)])
    assert many is not None
    assert len(many.rows) == 20_000


def test_a_name_that_is_there_twice_deserves_a_closer_look():
    names = [f"{index:016}" for index in range(1000)]
    assert table_of(names) is not None
    assert table_of([*names, names[500]]) is None
    assert table_of([names[0], names[0]]) is None
