"""What a step is, what it becomes while it runs, and what the pipeline's threads hand each other."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ingot.codecs.base import BaseEncoder
from ingot.core.stats import ErrorStats
from ingot.engine.watch import Feed, Watches
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a worker made of one chunk. ``settle`` is called by the thread that writes, chunk after chunk in order."""

    parts: Mapping[str, Any]
    error: ErrorStats | None = None
    settle: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a step's tensor is cut: ``rows`` of ``cols`` elements, ``chunk_rows`` at a time; bytes of budget each.

    Of a step that is done in several pieces, one begins at row ``first`` and ends before row ``last``.
    """

    rows: int
    cols: int
    chunk_rows: int
    cost: int
    first: int = 0
    last: int | None = None

    @property
    def end(self) -> int:
        """The row to end before."""
        return self.rows if self.last is None else self.last


@dataclass(frozen=True, slots=True)
class Room:
    """What a step's chunks may take: ``budget`` bytes, in which ``slots`` of them should fit; whether the error of
    what is not exact is measured."""

    budget: int
    slots: int
    measured: bool = False


Work = Callable[[], Encoded]
Take = Callable[[], bool]


@dataclass(frozen=True)
class Step(ABC):
    """What happens to one tensor.

    ``tensor`` is what is read, the one that the result is like where several are. ``spec`` says what is written,
    ``rule`` why, ``exact`` whether every value survives. ``action`` names what happens: ``moved`` (stored bytes copied
    as they are), ``repacked`` (the same integers in another layout), ``decoded`` (a stored codec becomes dense values)
    or ``encoded``. ``encodes_parts`` tells whether the bytes that it makes still have to be compressed as the spec
    says.
    """

    tensor: Tensor
    spec: TensorSpec
    action: str
    rule: str
    exact: bool = True

    encodes_parts: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    """Whether another process does it, so that no values pass here."""

    @property
    def origin(self) -> Step:
        """The step that a plan has: this one, unless it stands for one that is done elsewhere."""
        return self

    @property
    def in_bytes(self) -> int:
        """Stored bytes that are read."""
        return self.tensor.nbytes

    @property
    def out_bytes(self) -> int:
        """Bytes that will be stored; the most they can be where only the bytes themselves tell."""
        return sum(part.at_most for part in self.spec.parts)

    @property
    def decodes(self) -> Tensor | None:
        """The tensor whose values are decoded, if there is one."""
        return self.tensor

    @property
    def encoders(self) -> Sequence[BaseEncoder]:
        """What encodes here, and may need packages for it or hold memory."""
        return ()

    @property
    def held(self) -> int:
        """Bytes held from the fit passes until the tensor is written."""
        return sum(encoder.retained_bytes() for encoder in self.encoders)

    @property
    def scratch(self) -> int:
        """Bytes that one thread needs beside its chunk."""
        return 0

    def pieces(self, hashed: Collection[int] = ()) -> tuple[int, int] | None:
        """Return the rows, and the number at whose multiples they may be cut into pieces that several processes do.

        None where they may not. The digests of what passes at the points ``hashed`` are wanted: who cuts finds them out
        otherwise.
        """
        return None

    def joined(self, notes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the notes of a step that was done in pieces."""
        return notes[0]

    def ready(self) -> None:
        """Ask for the optional packages that are needed; raises ``MissingExtraError``."""
        for encoder in self.encoders:
            encoder.ready()

    def forget(self) -> None:
        """Let go of what fit passes found, when the tensor is written."""
        for encoder in self.encoders:
            encoder.forget()

    @abstractmethod
    def chunking(self, room: Room) -> Chunking:
        """Choose a chunk that fits in ``room``, as far as that can be."""

    @abstractmethod
    def begin(self, shape: Chunking, watches: Watches, *, measured: bool) -> Running:
        """Return the step under way; ``watches`` hash what passes."""


@dataclass
class Running(ABC):
    """A step under way: its state from the first byte that is read to the last one written."""

    shape: Chunking
    feeds: dict[int, Feed] = field(default_factory=dict)

    def learn(self) -> Mapping[str, Any] | None:
        """Make the passes that come before encoding; return the parameters that they complete."""
        return None

    @property
    def written(self) -> dict[str, Any] | None:
        """The writer's record of a tensor that another process has written in its place; asked after ``learn``."""
        return None

    @abstractmethod
    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        """Read chunk after chunk in the thread that calls; yield each one's work and the bytes read for it.

        ``take`` waits for a chunk's memory; False means to stop.
        """

    def notes(self) -> dict[str, Any]:
        """Return what the chunks told, as JSON takes it: digests by point, and what else the step found out."""
        return {"digests": {str(point): feed.hex for point, feed in self.feeds.items() if feed.own}}


class Sequencer:
    """Lets the chunks of one tensor, worked on by several threads, pass one point in order.

    A pool begins its work in order, so whoever waits knows the one before it running or done.
    """

    def __init__(self) -> None:
        self._next = 0
        self._failed = False
        self._changed = threading.Condition()

    def run(self, number: int, action: Callable[[], None]) -> None:
        """Wait until all numbers below have run ``action``, then run it; after a failure nothing runs any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)
            failed = self._failed
        done = False
        try:
            if not failed:
                action()
                done = True
        finally:
            with self._changed:
                self._next += 1
                self._failed = not done
                self._changed.notify_all()
        if failed:
            raise RuntimeError("an earlier chunk of this tensor failed")
