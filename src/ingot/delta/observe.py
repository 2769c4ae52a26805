"""What a diff hashes while it runs: the identities of base and result, which a delta states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ingot.artifacts.identity import TensorId, content_of
from ingot.core.runtime.parallel import Workers
from ingot.core.runtime.progress import Progress
from ingot.delta.parent import parent_hash
from ingot.engine.diff_step import Diff
from ingot.engine.execute import Observer
from ingot.engine.hashing import BASE, RESULT, HashFactories, HashFactory, HashThread, ParentHash, TensorHashes
from ingot.engine.pipeline import HashSelector
from ingot.engine.steps import Encode
from ingot.engine.work import CompletedStep, Plan, Step
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import DeltaInfo, Identity

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
    digests : callable
        Returns the digests of tensors of the base (0) or the fine-tune (1), by name: of what did not pass.
    require : callable
        Refuses a delta whose parts take so many bytes.
    """

    base: Checkpoint
    tuned: Checkpoint
    info: DeltaInfo
    known: Mapping[str, str]
    same: Mapping[str, str]
    metadata: Callable[[DeltaInfo], Mapping[str, Any]]
    digests: Callable[[int, Sequence[str]], Mapping[str, str]]
    require: Callable[[int], None]
    progress: Progress
    wdelta: bool = False
    shards: Sequence[str] | None = None
    _parent: Callable[[], str] = field(default=str, init=False)

    def points(self, step: Step) -> Sequence[int]:
        match step:
            case Diff():
                return () if self.wdelta and self.shards is None else (BASE,) if self.wdelta else (BASE, RESULT)
            case Encode():
                return () if self.wdelta else (RESULT,)
        return ()

    @contextmanager
    def hash_selector(self, plan: Plan, resumed: int) -> Iterator[HashSelector]:
        with HashThread("base") as base, HashThread("tuned") as tuned, Workers(1, "ingot-parent") as pool:
            hash_factories: dict[int, HashFactory] = {BASE: TensorHashes(base), RESULT: TensorHashes(tuned)}
            parent: ParentHash | None = None
            here = not resumed and all(step.planned is step for step in plan.steps)
            if self.wdelta and self.shards is None and here:
                parent = ParentHash(base)
                self._parent = lambda: parent.hex
            elif self.wdelta:  # not in the order of steps, not from the first one on, or not here
                order = self.shards if self.shards is not None else sorted(self.tuned)
                beside: Future[str] = pool.submit(parent_hash, self.base, order)
                self._parent = beside.result

            def of_step(step: Step) -> HashFactories:
                if step.planned is not step:  # the worker hashes the values
                    return {}
                if parent is not None and isinstance(step, Diff):
                    return {BASE: parent}
                return {point: hash_factories[point] for point in self.points(step)}

            yield of_step

    def conclude(self, done: Sequence[CompletedStep]) -> Mapping[str, Any]:
        self.require(sum(item.nbytes for item in done))
        if self.wdelta:
            content = self._base_content(done) if self.shards is not None else None
            self.info = structs.replace(self.info, base=Identity(content, {PARENT: self._parent()}))
        else:
            base = Identity(self._base_content(done))
            result = Identity(self._result_content(done))
            self.info = structs.replace(self.info, base=base, result=result)
        return self.metadata(self.info)

    def _base_content(self, done: Sequence[CompletedStep]) -> str:
        digests = {item.step.spec.name: item.digest(BASE) for item in done} | dict(self.same)
        found = {
            name: TensorId(self.base[name].dtype, self.base[name].shape, digest)
            for name, digest in digests.items()
            if digest is not None
        }
        rest = [tensor for name, tensor in self.base.items() if name not in found]
        others = self.digests(BASE, [tensor.name for tensor in rest])
        for tensor in rest:
            found[tensor.name] = TensorId(tensor.dtype, tensor.shape, others[tensor.name])
            self.progress.advance(tensor.nbytes, tensor.name)
        return content_of(found)

    def _result_content(self, done: Sequence[CompletedStep]) -> str:
        passed = {item.step.spec.name: item.digest(RESULT) for item in done}
        digests = {name: digest for name, digest in passed.items() if digest is not None} | dict(self.known)
        # Of what was done in pieces, which gives the fine-tune's values bit for bit (``Diff.pieces``).
        digests |= self.digests(RESULT, [name for name in self.tuned if name not in digests])
        return content_of({name: TensorId(item.dtype, item.shape, digests[name]) for name, item in self.tuned.items()})
