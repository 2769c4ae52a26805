"""The steps of a diff, in order: of tensors that are alike one is kept, and what becomes of each is said once."""

from __future__ import annotations

from collections.abc import Hashable

from ingot.engine.alike import Steps
from ingot.engine.pair import Diff
from ingot.engine.work import Step
from ingot.formats.base import Format
from ingot.formats.many import refusing
from ingot.model.delta import Change
from ingot.ops.delta.draft import Drafted, refused
from ingot.ops.delta.pairs import Pairs
from ingot.ops.delta.strategy import Storage


class Drafts:
    """What is drafted of tensors, as far as it is kept: there may be very many.

    ``changes`` tells of every tensor what becomes of it, ``exact`` has a byte for each of these: whether patching gives
    its values. ``moved`` are the digests of values that only move, ``rounded`` elements and storage of what a quantizer
    chooses the numbers of.
    """

    def __init__(self, pairs: Pairs, format: Format) -> None:
        self._pairs, self._format = pairs, format
        self._refuses = refusing(format)
        self.steps = Steps(pairs.tensors)
        self.changes: dict[str, Change] = {}
        self.exact = bytearray()
        self.moved: dict[str, str] = {}
        self.rounded: list[tuple[int, Storage]] = []
        self._kinds: dict[Hashable, int] = {}
        self._first: dict[int, Change] = {}
        self._changes: dict[Change, Change] = {}

    def same(self, name: str) -> None:
        """Note the next tensor, which is the same in both."""
        self._note(name, Change("same", self._pairs.tuned_dtype(name)), exact=True)

    def add(self, name: str, kind: Hashable, item: Drafted) -> None:
        """Add the next tensor's step; ``kind`` is what ``Pairs.kind`` gives, None where the step is no other's."""
        step, number = item.step, None if kind is None else self._kinds.get(kind)
        if number is not None and _alike(self.steps.first(number), step):
            self.steps.repeat(name, number)
        else:
            number = self.steps.add(step)
            if kind is not None and item.repeats:
                self._kinds.setdefault(kind, number)
                self._first.setdefault(number, item.change)
        if item.digest is not None:
            self.moved[name] = item.digest
        if item.rounded is not None:
            self.rounded.append((step.tensor.size, item.rounded))
        self._note(name, item.change, exact=step.exact)

    def repeat(self, name: str, kind: Hashable) -> None:
        """Add a step like that of the kind, whose tensors' values decide nothing.

        Raises ``UnsupportedError`` ``delta.container`` where the container does not take it under this name.
        """
        number = self._kinds[kind]
        first = self.steps.first(number)
        reason = self._refuses(first.spec, name)
        if reason is not None:
            raise refused(self._format.name, reason).at(name)
        self.steps.repeat(name, number)
        self._note(name, self._first[number], exact=first.exact)

    def _note(self, name: str, change: Change, *, exact: bool) -> None:
        self.changes[name] = self._changes.setdefault(change, change)
        self.exact.append(exact)


def _alike(first: Step, other: Step) -> bool:
    """Whether two steps of tensors of one kind do the same."""
    if not isinstance(first, Diff) or not isinstance(other, Diff):
        return False
    if (first.rule, first.exact, first.codec.id) != (other.rule, other.exact, other.codec.id):
        return False
    left, right = first.spec, other.spec
    same = (left.dtype, left.codec, left.parts) == (right.dtype, right.codec, right.parts)
    return same and dict(left.params) == dict(right.params) and dict(first.options) == dict(other.options)
