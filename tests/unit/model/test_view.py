"""Views: operations on a checkpoint compose, and a view checks and closes what it was made from."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint, CheckpointSource
from ingot.model.reading.view import View, derive_checkpoint


class RecordingSource(CheckpointSource):
    """A source that records the calls to it in ``calls``."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def identity(self) -> list[Any]:
        return [self.name]

    def require_whole(self) -> None:
        self.calls.append(f"{self.name} whole")

    def require_unchanged(self) -> None:
        self.calls.append(f"{self.name} unchanged")

    def close(self) -> None:
        self.calls.append(f"{self.name} closed")


def verb(checkpoint: Checkpoint, argument: int) -> Checkpoint:
    return derive_checkpoint(checkpoint, {}, verb, argument, argument)


def test_a_further_view_joins_the_reports() -> None:
    first, second = (Checkpoint({}, format="zt", location=name) for name in "ab")
    view = View(first, ["one"], 3, frozenset({"x"}))
    joined = view.then(lambda _: View(second, ["two"], 4, frozenset({"y"})))
    assert joined == View(second, ("one", "two"), 7, frozenset({"x", "y"}))


def test_an_operation_without_a_report_keeps_the_earlier_one() -> None:
    first, second = (Checkpoint({}, format="zt", location=name) for name in "ab")
    received = []

    def operation(checkpoint: Checkpoint) -> Checkpoint:
        received.append(checkpoint)
        return second

    view = View(first, ["one"], 3).then(operation)
    assert received[0] is first
    assert view.checkpoint is second
    assert (view.notes, view.bytes_read) == (["one"], 3)


def test_empty_notes_are_left_out() -> None:
    view = View(Checkpoint({}, format="zt", location="a"), ["one"])
    assert view.with_notes("", "two").notes == ("one", "two")


def test_a_checkpoint_without_a_source_has_nothing_to_check_and_no_copy() -> None:
    checkpoint = Checkpoint({}, format="zt", location="memory")
    checkpoint.require_whole()
    checkpoint.require_unchanged()
    assert checkpoint.identity() == [[]]
    assert checkpoint.origins_of("x") == ("x",)
    with pytest.raises(UsageError) as caught:
        checkpoint.__reduce__()
    assert (caught.value.rule, caught.value.where) == ("checkpoint.copy", "memory")
    checkpoint.close()


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(TypeError, match="on_close"):
        Checkpoint({}, format="zt", location="a", on_close=print)  # type: ignore[call-arg]


def test_a_view_checks_and_closes_all_that_it_reads() -> None:
    calls: list[str] = []
    base = Checkpoint({}, format="zt", location="a", source=RecordingSource("base", calls))
    further = RecordingSource("further", calls)
    view = derive_checkpoint(base, {}, verb, 1, 1, opened=[further], also_close=further.close)
    view.require_whole()
    view.require_unchanged()
    assert calls == ["base whole", "further whole", "base unchanged", "further unchanged"]
    calls.clear()
    view.close()
    view.close()
    assert calls == ["further closed", "base closed"]


def test_views_of_views_state_each_of_them() -> None:
    base = Checkpoint({}, format="zt", location="a", source=RecordingSource("base", []))
    view = verb(verb(base, 1), 2)
    assert view.views == (("verb", 1), ("verb", 2))
    assert view.identity() == [["base"], ["verb", 1], ["verb", 2]]
    assert view.__reduce__()[0] is verb
    assert view.__reduce__()[1][1] == 2


def test_a_view_has_the_attributes_of_its_base_but_for_the_changes() -> None:
    base = Checkpoint(
        {}, format="zt", location="a", metadata={"a": 1}, companions={"f": "p"}, unread={"x": "why"}, aliases={"y": "z"}
    )
    view = derive_checkpoint(base, {}, verb, 1, 1, metadata={"b": 2})
    assert (view.metadata, view.companions, view.unread) == ({"b": 2}, {"f": "p"}, {"x": "why"})
    assert view.aliases == {}  # no tensor has the name
    assert (view.format, view.location) == ("zt", "a")
