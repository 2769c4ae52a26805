"""``View``: operations on a checkpoint compose, and their notes, bytes and inexact tensors are joined."""

from __future__ import annotations

from ingot.model.checkpoint import Checkpoint
from ingot.model.view import View


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
