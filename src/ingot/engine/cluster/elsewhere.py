"""The step of a tensor that a worker makes: waits for it, and passes on what it left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ingot.core import checksums
from ingot.engine import cost
from ingot.engine.cluster.crew import Crew
from ingot.engine.cluster.notes import Made
from ingot.engine.watch import Watches
from ingot.engine.work import Chunking, Encoded, Room, Running, Step, Take, Work
from ingot.errors import IntegrityError
from ingot.model.store import Store
from ingot.model.tensor import Tensor

_PIECE = 16 << 20


@dataclass(frozen=True)
class Elsewhere(Step):
    """What ``of`` makes, made by a worker of ``crew``.

    ``store`` is where workers leave files.
    """

    of: Step = field(kw_only=True)
    number: int = field(kw_only=True)
    crew: Crew = field(kw_only=True)
    store: Store = field(kw_only=True)

    encodes_parts: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = True

    @property
    def origin(self) -> Step:
        return replace(self.of, spec=self.spec)

    @property
    def in_bytes(self) -> int:
        return self.of.in_bytes

    @property
    def decodes(self) -> Tensor | None:
        return self.of.decodes

    def chunking(self, room: Room) -> Chunking:
        piece = max(cost.MOVE_LEAST, min(_PIECE, room.budget // room.slots))
        return Chunking(self.out_bytes, 1, piece, min(piece, max(self.out_bytes, 1)))

    def begin(self, shape: Chunking, watches: Watches, *, measured: bool) -> Running:
        assert not watches, "who makes it hashes its values"
        return _Waiting(shape, step=self)


def elsewhere(step: Step, number: int, crew: Crew, store: Store) -> Elsewhere:
    """Return a step of a plan as one that a worker does."""
    told = (step.tensor, step.spec, step.action, step.rule, step.exact)
    return Elsewhere(*told, of=step, number=number, crew=crew, store=store)


@dataclass(kw_only=True)
class _Waiting(Running):
    step: Elsewhere
    _pieces: list[Made] = field(default_factory=list)

    def learn(self) -> Mapping[str, Any] | None:
        """Wait for the worker; return the parameters that it has learnt."""
        self._pieces = self.step.crew.made(self.step.number)
        return self._pieces[0].params

    @property
    def written(self) -> dict[str, Any] | None:
        return self._pieces[0].written

    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        """Pass on what is in files. The crew has told of what was read for it."""
        for made in self._pieces:
            if made.file:
                yield from self._read(made, take)
            if not take():
                return
            yield partial(Encoded, {}, made.error), 0

    def _read(self, made: Made, take: Take) -> Iterator[tuple[Work, int]]:
        source, crc, position = self.step.store.open(made.file), checksums.hasher("crc32c"), made.offset
        try:
            for role, count in made.runs:
                for start in range(0, count, self.shape.chunk_rows):
                    if not take():
                        return
                    data = np.empty(min(self.shape.chunk_rows, count - start), np.uint8)
                    source.readinto(position, data.data)
                    crc.update(data.data)
                    position += data.nbytes
                    yield partial(Encoded, {role: data}), 0
        finally:
            source.close()
        if not checksums.same(made.crc, crc.text()):
            raise IntegrityError(
                "cluster.part",
                "expected the bytes that a worker left for this tensor, found others; run again without --resume",
                where=f"{self.step.store.location}: {self.step.tensor.name}",
            )

    def notes(self) -> dict[str, Any]:
        found = [made.notes for made in self._pieces]
        return dict(found[0] if len(found) == 1 else self.step.of.joined(found))
