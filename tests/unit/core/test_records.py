"""A column of records of a key and two floats: what is told of the other column, of the keys and of narrowing."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.core.parsing.records import FIELDS, RECORD, gather


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("count", [1, 16, 700])
def test_the_other_column_is_filled_by_anything_but_zeros_of_either_sign(column: int, count: int) -> None:
    records = np.zeros(count, RECORD)
    records["key"] = 7
    records[FIELDS[column]] = 1.5
    for value, filled in ((0.0, False), (-0.0, False), (2.0**-149, True), (np.nan, True)):
        records[FIELDS[1 - column]] = 0
        records[FIELDS[1 - column]][count // 2 :] = value
        found = gather(records.view(np.uint8), 7, column, "f32")
        assert found.other_filled == filled
        assert found.keys_match
        assert found.exact
        assert (found.values == 1.5).all()


def test_keys_and_narrowing_are_told() -> None:
    records = np.zeros(600, RECORD)
    records["key"] = 1 << 40
    records[FIELDS[0]] = 1 + 2.0**-9
    for dtype, exact in (("f32", True), ("f16", True), ("bf16", False)):
        assert gather(records.view(np.uint8), 1 << 40, 0, dtype).exact == exact
    records["key"][599] = 1
    assert not gather(records.view(np.uint8), 1 << 40, 0, "f32").keys_match
