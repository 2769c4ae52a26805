"""What a diff hashes while it runs: the identities of base and result, which a delta states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ingot.core.parallel import Workers
from ingot.core.progress import Progress
from ingot.engine.execute import Done, Observer
from ingot.engine.pair import Diff
from ingot.engine.pipeline import Watching
from ingot.engine.plan import Plan
from ingot.engine.steps import Move
from ingot.engine.watch import BASE, RESULT, ContentWatch, Lane, ParentWatch, Watch, Watches
from ingot.engine.work import Step
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import DeltaInfo, Identity
from ingot.ops.delta.parent import parent_hash
from ingot.ops.identity import TensorId, content_of, tensor_ids

PARENT = "wdelta"
"""The name of ``.wdelta``'s parent hash in ``Identity.hashes``, and of the format."""


@dataclass
class Identify(Observer):
    """Hashes base and result of a diff on the way.

    Parameters
    ----------
    base, tuned : Checkpoint
    info : DeltaInfo
        What the delta says of itself; complete after ``conclude``.
    known : mapping
        Digests of tensors that no step reads: those that are the same in both, and those that only move.
    same : mapping
        Of ``known`` those that the base has too.
    metadata : callable
        Makes the metadata of a description.
    wdelta : bool
        Whether the parent hash of a ``.wdelta`` is asked for in place of contents.
    shards : sequence of str, optional
        The order in which the parent hash of a sharded base goes.
    """

    base: Checkpoint
    tuned: Checkpoint
    info: DeltaInfo
    known: Mapping[str, str]
    same: Mapping[str, str]
    metadata: Callable[[DeltaInfo], Mapping[str, Any]]
    workers: int
    progress: Progress
    wdelta: bool = False
    shards: Sequence[str] | None = None
    _parent: Callable[[], str] = field(default=str, init=False)

    @contextmanager
    def watching(self, plan: Plan, resumed: int) -> Iterator[Watching]:
        with Lane("base") as base, Lane("tuned") as tuned, Workers(1, "ingot-parent") as pool:
            watches: dict[int, Watch] = {BASE: ContentWatch(base)}
            if not self.wdelta:
                watches[RESULT] = ContentWatch(tuned)
            elif self.shards is not None or resumed:  # not in the order of steps, or not from the first one on
                order = self.shards if self.shards is not None else sorted(self.tuned)
                beside: Future[str] = pool.submit(parent_hash, self.base, order)
                self._parent = beside.result
                watches = watches if self.shards is not None else {}
            else:
                parent = ParentWatch(base)
                watches, self._parent = {BASE: parent}, lambda: parent.hex

            def of_step(step: Step) -> Watches:
                return watches if isinstance(step, Diff) else {key: watches[key] for key in watches if key == RESULT}

            yield of_step

    def conclude(self, done: Sequence[Done]) -> Mapping[str, Any]:
        if self.wdelta:
            content = self._base_content(done) if self.shards is not None else None
            self.info = structs.replace(self.info, base=Identity(content, {PARENT: self._parent()}))
        else:
            base, result = Identity(self._base_content(done)), Identity(self._result_content(done))
            self.info = structs.replace(self.info, base=base, result=result)
        return self.metadata(self.info)

    def _base_content(self, done: Sequence[Done]) -> str:
        digests = {item.step.spec.name: item.digest(BASE) for item in done} | dict(self.same)
        found = {
            name: TensorId(self.base[name].dtype, self.base[name].shape, digest)
            for name, digest in digests.items()
            if digest is not None
        }
        rest = [tensor for name, tensor in self.base.items() if name not in found]
        found |= tensor_ids(rest, workers=self.workers)
        for tensor in rest:
            self.progress.advance(tensor.nbytes, tensor.name)
        return content_of(found)

    def _result_content(self, done: Sequence[Done]) -> str:
        written = {item.step.spec.name: item.digest(RESULT) or "" for item in done if not isinstance(item.step, Move)}
        digests = written | dict(self.known)
        return content_of({name: TensorId(item.dtype, item.shape, digests[name]) for name, item in self.tuned.items()})
