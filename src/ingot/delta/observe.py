"""An observer that hashes base and result during a diff, for the identities stated in the delta."""

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
    """Hashes base and result while a diff reads them.

    Parameters
    ----------
    base, tuned : Checkpoint
    info : DeltaInfo
        The delta's description; complete after ``conclude``.
    digests : mapping
        Digests of tensors that no step reads: equal tensors, and tensors that are only copied.
    same : mapping
        The entries of ``digests`` for equal tensors.
    metadata : callable
        Builds the metadata from a description.
    wdelta : bool
        Whether to compute the parent hash of a ``.wdelta`` instead of content ids.
    shards : sequence of str, optional
        The order of tensors in the parent hash of a sharded base.
    compute_digests : callable
        Computes digests, by name, of tensors of the base (0) or the fine-tune (1) that no step hashed.
    require_size : callable
        Raises an error for a delta with this number of bytes, if that is too large.
    """

    base: Checkpoint
    tuned: Checkpoint
    info: DeltaInfo
    digests: Mapping[str, str]
    same: Mapping[str, str]
    metadata: Callable[[DeltaInfo], Mapping[str, Any]]
    compute_digests: Callable[[int, Sequence[str]], Mapping[str, str]]
    require_size: Callable[[int], None]
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
            in_order = not resumed and all(step.planned is step for step in plan.steps)
            if self.wdelta and self.shards is None and in_order:
                parent = ParentHash(base)
                self._parent = lambda: parent.hex
            elif self.wdelta:  # the steps run in another order, only some of them run, or workers run them
                order = self.shards if self.shards is not None else sorted(self.tuned)
                future: Future[str] = pool.submit(parent_hash, self.base, order)
                self._parent = future.result

            def of_step(step: Step) -> HashFactories:
                if step.planned is not step:  # the worker hashes the values
                    return {}
                if parent is not None and isinstance(step, Diff):
                    return {BASE: parent}
                return {point: hash_factories[point] for point in self.points(step)}

            yield of_step

    def conclude(self, completed: Sequence[CompletedStep]) -> Mapping[str, Any]:
        self.require_size(sum(item.nbytes for item in completed))
        if self.wdelta:
            content = self._base_content(completed) if self.shards is not None else None
            self.info = structs.replace(self.info, base=Identity(content, {PARENT: self._parent()}))
        else:
            base = Identity(self._base_content(completed))
            result = Identity(self._result_content(completed))
            self.info = structs.replace(self.info, base=base, result=result)
        return self.metadata(self.info)

    def _base_content(self, completed: Sequence[CompletedStep]) -> str:
        digests = {item.step.spec.name: item.digest(BASE) for item in completed} | dict(self.same)
        ids = {
            name: TensorId(self.base[name].dtype, self.base[name].shape, digest)
            for name, digest in digests.items()
            if digest is not None
        }
        remaining = [tensor for name, tensor in self.base.items() if name not in ids]
        computed = self.compute_digests(BASE, [tensor.name for tensor in remaining])
        for tensor in remaining:
            ids[tensor.name] = TensorId(tensor.dtype, tensor.shape, computed[tensor.name])
            self.progress.advance(tensor.nbytes, tensor.name)
        return content_of(ids)

    def _result_content(self, completed: Sequence[CompletedStep]) -> str:
        passed = {item.step.spec.name: item.digest(RESULT) for item in completed}
        digests = {name: digest for name, digest in passed.items() if digest is not None} | dict(self.digests)
        # Tasks for slices of a tensor do not hash it.
        digests |= self.compute_digests(RESULT, [name for name in self.tuned if name not in digests])
        return content_of({name: TensorId(item.dtype, item.shape, digests[name]) for name, item in self.tuned.items()})
