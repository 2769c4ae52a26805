"""Rows and records that are alike: what is decoded once stands for all of them."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest

from ingot.core import cbor, columns


@pytest.mark.parametrize("seed", range(6))
def test_numbers_are_what_was_said_whether_or_not_they_go_on_in_equal_steps(seed):
    chance = random.Random(seed)
    said, value, step = [], 5, 0
    for _ in range(300):
        if chance.random() < 0.05 * seed:
            step = chance.choice((0, 0, 1, 7, -1))
        value = abs(value + step) if chance.random() < 0.98 else chance.choice((0, 2**63 - 1, value))
        said.append(min(value, 2**63 - 1))
    rows = {f"n{index}": {"n": number} | ({"m": number} if number % 3 else {}) for index, number in enumerate(said)}
    schema = columns.record(columns.field("n", "number"), columns.field("m", "number", optional=True))
    table = columns.cbor_table(cbor.dumps({"o": rows}), schema, "o", max_depth=8, max_items=9999)
    assert table is not None
    first, second = table.columns
    assert columns.numbers(first.first).tolist() == first.first.tolist() == said
    assert columns.numbers(second.first).tolist() == [number if number % 3 else -1 for number in said]
    assert [first.first[row] for row in range(300)] == said


def test_rows_that_are_spelled_alike_are_told():
    kinds = [{"n": 1, "shape": [3, 4]}, {"n": 2, "shape": [5]}, {"n": 1, "shape": []}]
    order = [0] * 5 + [1] * 4 + [0, 1, 2] * 8 + [2] * 3 + [0]
    data = json.dumps({"o": {f"n{at}": kinds[kind] for at, kind in enumerate(order)}}).encode()
    schema = columns.record(columns.field("n", "number"), columns.field("shape", "sizes"))
    table = columns.json_table(data, schema, under="o")
    assert table is not None
    assert table.alike.tolist() == [order.index(kind) for kind in order]
    assert [table.columns[1].sizes(row) for row in range(len(order))] == [tuple(kinds[kind]["shape"]) for kind in order]
    assert columns.numbers(table.columns[0].first).tolist() == [kinds[kind]["n"] for kind in order]


def head_of(name: str, field: bytes, dtype: bytes, sizes: tuple[int, ...], length: int) -> bytes:
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (name.encode(), field, dtype))
    return texts + struct.pack(f"<I{len(sizes)}QQ", len(sizes), *sizes, length)


GROUP = [(b"indices", b"int64", (3,), 24), (b"values", b"float32", (3,), 12), (b"scale", b"float16", (), 2)]


def taken(groups: columns.Groups, data: bytes, step: int) -> bool:
    at = 0
    while at < len(data):
        more = groups.take(data[at : at + step])
        if not more:
            return False
        at += more
    return at == len(data) and groups.finish()


@pytest.mark.parametrize("step", [1 << 20, 97, 1000])
def test_records_of_tensors_are_what_they_say(step):
    chance = random.Random(7)
    names = [f"tensor.{index}.\u00fc" for index in range(300)]
    data, wanted = b"", []
    for row in (*range(100), *chance.sample(range(100, 300), 150)):
        heads = [chance.choice(GROUP) for _ in range(chance.randrange(1, 4))] if chance.random() < 0.2 else GROUP
        heads = [(b"odd", b"u8", (row, 2), row), *heads] if chance.random() < 0.1 else heads
        places = []
        for field, dtype, sizes, length in heads:
            data += head_of(names[row], field, dtype, sizes, length)
            places.append((field.decode(), dtype.decode(), int(np.prod(sizes, dtype=int)), 11 + len(data), length))
            data += bytes(length)
        wanted.append((row, places))
    groups = columns.Groups(names, 11)
    assert taken(groups, data, step)
    assert groups.rows.tolist() == [row for row, _ in wanted]
    for at, (row, places) in enumerate(wanted):
        group, place, found = groups.groups[at], groups.starts[at], []
        for kind in groups.members[groups.begins[group] : groups.begins[group + 1]].tolist():
            place += 4 + len(names[row].encode()) + groups.sizes[kind]
            texts = groups.fields.text(kind), groups.dtypes.text(kind)
            found.append((*texts, groups.elements[kind], place, groups.lengths[kind]))
            place += groups.lengths[kind]
        assert found == places


ONE = head_of("a", *GROUP[2]) + b"12"
BAD = {
    "a name that is not known": head_of("c", *GROUP[2]) + b"12",
    "a tensor in two places": ONE + ONE.replace(b"a", b"b", 1) + ONE,
    "heads without end": ONE * 40 + ONE.replace(b"a", b"b", 1),
    "sizes past 63 bits": head_of("a", b"f", b"u8", (2**40, 2**40), 0),
    "a length past 63 bits": head_of("a", b"f", b"u8", (1,), 2**63),
    "an end past 63 bits": head_of("a", b"f", b"u8", (1,), 2**63 - 1),
    "many dimensions": head_of("a", b"f", b"u8", (1,) * 65, 0),
    "no UTF-8": head_of("a", b"\xff", b"u8", (1,), 0),
    "cut off": ONE + head_of("b", *GROUP[2])[:-1],
    "a text past the end": ONE + struct.pack("<I", 2**32 - 1) + b"b",
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_records_that_no_writer_writes_deserve_a_closer_look(what):
    assert taken(columns.Groups(["a", "b"], 0), ONE + ONE.replace(b"a", b"b", 1), 1 << 20)
    assert not taken(columns.Groups(["a", "b"], 0), BAD[what], 1 << 20)


def test_heads_without_end_are_not_kept():
    """A file with holes may have billions of them, of zeros, that take no room on the disk."""
    assert columns.Groups(["a", "b"], 0).take(ONE * 16) == 16 * len(ONE)
    assert columns.Groups(["a", "b"], 0).take(ONE * 17) is None
