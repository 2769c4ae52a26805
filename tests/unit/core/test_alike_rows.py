"""Rows and records that are alike: what is decoded once stands for all of them."""

from __future__ import annotations

import random

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
