"""Strict CBOR: each refusal by its rule and place, and the forms that are accepted though nobody must write them."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ingot.core.parsing import cbor
from ingot.errors import FormatError, UsageError

REFUSED = {
    "": ("cbor.truncated", 0),
    "18": ("cbor.truncated", 0),
    "19 01": ("cbor.truncated", 0),
    "1b 00 00 00 00 00 00 00": ("cbor.truncated", 0),
    "fb 00": ("cbor.truncated", 0),
    "81": ("cbor.length", 0),
    "82 00": ("cbor.length", 0),
    "a1 61 61": ("cbor.truncated", 3),
    "a1": ("cbor.length", 0),
    "a2 61 61 00": ("cbor.length", None),
    "62 61": ("cbor.length", 0),
    "9b ff ff ff ff ff ff ff ff": ("cbor.length", 0),
    "bb 80 00 00 00 00 00 00 00 00 00": ("cbor.length", 0),
    "7b ff ff ff ff ff ff ff ff 61": ("cbor.length", 0),
    "5b ff ff ff ff ff ff ff f7 61": ("cbor.length", 0),
    "00 00": ("cbor.trailing-bytes", 1),
    "a0 ff": ("cbor.trailing-bytes", 1),
    "9f ff": ("cbor.indefinite-length", 0),
    "bf ff": ("cbor.indefinite-length", 0),
    "7f 61 61 ff": ("cbor.indefinite-length", 0),
    "5f 41 61 ff": ("cbor.indefinite-length", 0),
    "ff": ("cbor.indefinite-length", 0),
    "81 ff": ("cbor.indefinite-length", 1),
    "1c": ("cbor.reserved", 0),
    "5d": ("cbor.reserved", 0),
    "fe": ("cbor.reserved", 0),
    "a1 01 02": ("cbor.key-type", 1),
    "a1 41 61 02": ("cbor.key-type", 1),
    "a1 80 00": ("cbor.key-type", 1),
    "a2 61 61 01 61 61 02": ("cbor.duplicate-key", 4),
    "a2 61 61 f6 78 01 61 f6": ("cbor.duplicate-key", 4),
    "c0 60": ("cbor.tag", 0),
    "d8 20 60": ("cbor.tag", 0),
    "f7": ("cbor.simple", 0),
    "e0": ("cbor.simple", 0),
    "f8 14": ("cbor.simple", 0),
    "f8 ff": ("cbor.simple", 0),
    "61 ff": ("cbor.utf8", 0),
    "63 ed a0 80": ("cbor.utf8", 0),
    "62 c0 80": ("cbor.utf8", 0),
    "64 f4 90 80 80": ("cbor.utf8", 0),
    "81" * 33 + "00": ("cbor.depth", 32),
    "a1 61 61" * 33 + "00": ("cbor.depth", 96),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    rule, offset = REFUSED[text]
    with pytest.raises(FormatError) as caught:
        cbor.loads(bytes.fromhex(text), location="manifest")
    assert caught.value.rule == rule
    if offset is not None:
        assert caught.value.where == f"manifest: byte {offset}"


ACCEPTED: dict[str, Any] = {
    "1b 00 00 00 00 00 00 00 01": 1,
    "18 01": 1,
    "38 00": -1,
    "3b ff ff ff ff ff ff ff ff": -(2**64),
    "3b 7f ff ff ff ff ff ff ff": -(2**63),
    "3b 80 00 00 00 00 00 00 00": -(2**63) - 1,
    "1b ff ff ff ff ff ff ff ff": 2**64 - 1,
    "fb 3f f0 00 00 00 00 00 00": 1.0,
    "f9 3c 00": 1.0,
    "f9 00 01": 2.0**-24,
    "f9 fc 00": -math.inf,
    "fa 7f 80 00 00": math.inf,
    "98 01 00": [0],
    "b8 01 78 01 61 f5": {"a": True},
    "81" * 32 + "00": eval("[" * 32 + "0" + "]" * 32),
    "64 f0 9f 98 80": "\U0001f600",
    "43 00 ff 80": b"\x00\xff\x80",
    "62 00 0a": "\0\n",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text: str) -> None:
    value = cbor.loads(bytes.fromhex(text))
    assert value == ACCEPTED[text]
    assert type(value) is type(ACCEPTED[text])


@pytest.mark.parametrize("text", ["f9 7e 00", "fa 7f c0 00 01", "fb ff f8 00 00 00 00 00 00"])
def test_every_nan_is_read_and_one_is_written(text: str) -> None:
    value = cbor.loads(bytes.fromhex(text))
    assert math.isnan(value)
    assert cbor.dumps(value) == bytes.fromhex("f9 7e 00")


def test_the_number_of_items_is_limited() -> None:
    with pytest.raises(FormatError) as caught:
        cbor.loads(cbor.dumps([0] * 10), max_items=10)
    assert caught.value.rule == "cbor.items"
    assert cbor.loads(cbor.dumps([0] * 10), max_items=11) == [0] * 10


def test_a_claimed_count_allocates_nothing() -> None:
    data = bytes.fromhex("9a 7f ff ff ff") + b"\0" * 64
    tracemalloc.start()
    with pytest.raises(FormatError):
        cbor.loads(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_is_read(wrap: Any) -> None:
    assert cbor.loads(wrap(cbor.dumps({"a": [1, "b"]}))) == {"a": [1, "b"]}


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    cbor.loads(b"\x80")
    with pytest.raises(FormatError):
        cbor.loads(b"\xff")
    assert gc.isenabled()
    gc.disable()
    try:
        cbor.loads(b"\x80")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_key_order_is_kept() -> None:
    keys = ["b", "", "a" * 300, "ä", "a"]
    assert list(cbor.loads(cbor.dumps(dict.fromkeys(keys)))) == keys


def test_many_similar_strings_stay_apart() -> None:
    words = [f"{i:x}" for i in range(5000)]
    assert cbor.loads(cbor.dumps(words)) == words


def test_subclasses_and_tuples_are_written_as_their_base() -> None:
    assert cbor.loads(cbor.dumps((np.float64(1.5), bytearray(b"x"), memoryview(b"y")))) == [1.5, b"x", b"y"]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (object(), "cbor.type"),
        (np.int64(1), "cbor.type"),
        ({1: 2}, "cbor.key-type"),
        (2**64, "cbor.integer"),
        (-(2**64) - 1, "cbor.integer"),
        ("\ud800", "cbor.utf8"),
        ({"\ud800": 1}, "cbor.utf8"),
        (CYCLE, "cbor.depth"),
    ],
)
def test_what_cannot_be_written(value: object, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        cbor.dumps(value)
    assert caught.value.rule == rule


def test_the_deepest_that_is_written_is_read() -> None:
    value: Any = 0
    for _ in range(cbor.MAX_DEPTH):
        value = [value]
    assert cbor.loads(cbor.dumps(value)) == value
    with pytest.raises(UsageError):
        cbor.dumps([value])


class Clearing(Mapping[str, int]):
    """A mapping that empties what holds it when it is encoded."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __getitem__(self, key: str) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        self.holder.clear()
        gc.collect()
        return iter(("key",))


def test_what_is_changed_while_it_is_written_is_refused() -> None:
    entries: list[Any] = []
    entries += [Clearing(entries), *([f"text {i}"] for i in range(100))]
    table: dict[str, Any] = {}
    table.update({"first": Clearing(table), **{str(i): [f"text {i}"] for i in range(100)}})
    for value in (entries, table):
        with pytest.raises(UsageError) as caught:
            cbor.dumps(value)
        assert caught.value.rule == "cbor.changed"


def test_items_that_are_no_pairs_are_refused() -> None:
    class Odd(Clearing):
        def items(self) -> Any:
            return [["a", 1]]

    with pytest.raises(UsageError) as caught:
        cbor.dumps(Odd([]))
    assert caught.value.rule == "cbor.type"
