"""Proving that a base, each parent in a chain, and the result are those that the deltas name.

Most is hashed while the patch reads and makes the tensors; what does not pass there (tensors that are removed or
replaced later, other orders of a parent hash) is hashed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ingot.artifacts.identity import TensorId, content_of, tensor_digest
from ingot.core.bytes.checksums import Blake3, Sha256, hex_of
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.runtime.parallel import ordered
from ingot.delta.chain import Link, Routes
from ingot.delta.observe import PARENT
from ingot.delta.parent import matching_order, parent_orders
from ingot.engine.execute import Observer
from ingot.engine.hashing import HashFactories, HashFactory, HashThread, ParentHash, TensorHashes
from ingot.engine.patch_step import Patch, PatchChain
from ingot.engine.pipeline import HashSelector
from ingot.engine.work import CompletedStep, Plan, Step
from ingot.errors import CodecError, IntegrityError, UsageError
from ingot.model.reading.lazy import ComputedMap, TensorMap
from ingot.model.tensor import Tensor


class Proof(Observer):
    """Which stages are hashed, how, and what they must be.

    Parameters
    ----------
    links : sequence of Link
    stages : sequence of mappings
        Of ``delta_chain.stages``.
    base : bool
        Whether every link's parent is to be proven. What one link promises and the next expects is compared here.
    result : bool or None
        Whether the result is to be proven. None: where the last link states one and the base is proven, since from
        another base something else must come.
    workers : int
        Threads that hash what does not pass.

    Raises
    ------
    IntegrityError
        ``delta.base``: the links do not fit together.
    UsageError
        ``delta.no-identity``, ``delta.no-result``: a delta does not say what is to be proven.
    """

    def __init__(
        self,
        links: Sequence[Link],
        stages: Sequence[Routes],
        *,
        base: bool,
        result: bool | None,
        workers: int,
    ) -> None:
        self._links = links
        self._stages = stages
        self._contents: dict[int, str] = {}
        self._orders: dict[int, Sequence[str]] = {}
        self._parents: dict[int, str] = {}
        self._hash_factories: dict[int, HashFactory] = {}
        self._workers = workers
        self.result_id: str | None = None
        for stage in range(len(links)) if base else ():
            self._expect_base(stage)
        promised = links[-1].info.result.content
        if result or (result is None and base and promised is not None):
            if promised is None:
                raise UsageError(
                    "the delta does not say what its result is: nothing to verify against",
                    rule="delta.no-result",
                    where=links[-1].location,
                )
            self._contents[len(links)] = promised

    @property
    def order(self) -> Sequence[str] | None:
        """The order in which tensors are best made, as a parent hash wants them; None where none does."""
        return self._order(min(self._parents)) if self._parents else None

    def _order(self, stage: int) -> Sequence[str]:
        """Return the order in which a stage's parent hash is most likely to be over its tensors."""
        if stage in self._orders:
            return self._orders[stage]
        names = list(self._links[stage].checkpoint)
        if stage:
            self._orders[stage] = sorted(names)
        else:
            orders = parent_orders(_origins(self._stages[0]), names)
            self._orders[stage] = orders.get("shards", orders["sorted"])
        return self._orders[stage]

    def points(self, step: Step) -> Sequence[int]:
        if not isinstance(step, Patch):
            return ()
        return [stage for stage in sorted(self._contents) if self._on_the_way(stage, step)]

    @contextmanager
    def hash_selector(self, plan: Plan, resumed: int) -> Iterator[HashSelector]:
        with ExitStack() as stack:
            for stage in sorted({*self._contents, *self._parents}):
                thread = stack.enter_context(HashThread(f"hash{stage}"))
                if stage in self._contents:
                    self._hash_factories[stage] = TensorHashes(thread)
                elif not resumed and self._passes(stage, plan.steps):
                    self._hash_factories[stage] = ParentHash(thread)

            def of_step(step: Step) -> HashFactories:
                if not isinstance(step, Patch):
                    return {}
                return {
                    stage: factory for stage, factory in self._hash_factories.items() if self._on_the_way(stage, step)
                }

            yield of_step

    def conclude(self, done: Sequence[CompletedStep]) -> Mapping[str, Any] | None:
        """Compare all hashes with what they must be; raises ``IntegrityError`` ``delta.base`` or ``delta.result``."""
        for stage, expected in self._contents.items():
            found = content_of(self._ids(stage, done))
            if stage == len(self._links):
                self.result_id = found
                if found != expected:
                    raise IntegrityError(
                        "delta.result",
                        f"the result is not the one that the delta promises: expected {expected}, found {found}",
                        where=self._links[-1].location,
                    )
            elif found != expected:
                raise self._wrong(stage, expected, found)
        for stage, expected in self._parents.items():
            factory = self._hash_factories.get(stage)
            found = factory.hex if isinstance(factory, ParentHash) else self._parent(stage)
            if found != expected and not self._in_another_order(stage, expected):
                raise self._wrong(stage, expected, found)
        return None

    def explain(self, error: CodecError) -> None:
        """Look whether a delta could not be applied because its base is another one.

        Raises ``IntegrityError`` ``delta.base`` if so.
        """
        for stage in sorted({*self._contents, *self._parents} - {len(self._links)}):
            expected = self._contents.get(stage) or self._parents[stage]
            try:
                found = content_of(self._ids(stage, ())) if stage in self._contents else self._parent(stage)
            except CodecError:  # it comes from an earlier stage then
                return
            if found != expected and (stage in self._contents or not self._in_another_order(stage, expected)):
                raise self._wrong(stage, expected, found) from error

    def _expect_base(self, stage: int) -> None:
        link = self._links[stage]
        expected = link.info.base
        if expected.content is not None:
            before = self._links[stage - 1].info.result.content if stage else None
            if before is None:
                self._contents[stage] = expected.content
            elif before != expected.content:
                raise self._wrong(stage, expected.content, before)
        elif PARENT in expected.hashes:
            self._parents[stage] = expected.hashes[PARENT]
        else:
            raise UsageError(
                "the delta does not say what its base is; pass --no-verify-base (verify_base=False) to trust yours",
                rule="delta.no-identity",
                where=link.location,
            )

    def _on_the_way(self, stage: int, step: Patch) -> bool:
        """Whether the step makes just the values that its tensor has at ``stage``."""
        covered = stage in self._contents or step.spec.name in self._links[stage].info.tensors
        return covered and step.route.first_stage <= stage  # it was not replaced since

    def _passes(self, stage: int, steps: Sequence[Step]) -> bool:
        """Whether all tensors of a parent hash are read one after the other, in its order: then it comes on the way."""
        if stage:
            return False
        known = self._links[stage].info.tensors
        covered = [step for step in steps if step.spec.name in known]
        if [step.spec.name for step in covered] != list(self._order(stage)):
            return False
        return all(isinstance(step, Patch) and step.route.first_stage <= stage for step in covered)

    def _ids(self, stage: int, done: Sequence[CompletedStep]) -> dict[str, TensorId]:
        passed = {item.step.spec.name: item.digest(stage) for item in done}
        digests = {name: digest for name, digest in passed.items() if digest is not None}
        rest = [route for name, route in self._stages[stage].items() if name not in digests]
        workers = self._workers if done else 0
        digests |= dict(ordered(lambda route: (route.name, _digest(route)), rest, workers))
        return {name: TensorId(route.dtype, route.shape, digests[name]) for name, route in self._stages[stage].items()}

    def _parent(self, stage: int, order: Sequence[str] | None = None) -> str:
        """Return the parent hash of a stage, over tensors in the likeliest order by default, by a pass of its own."""
        running = Sha256()
        for name in self._order(stage) if order is None else order:
            running.update(name.encode("utf-8", "surrogatepass"))
            for rows in self._stages[stage][name].chunks():
                running.update(file_bytes(rows))
        return hex_of(running)

    def _in_another_order(self, stage: int, expected: str) -> bool:
        """Whether the base has this parent hash in one of the other orders that its tool has hashed in.

        Of a link's parent its tool has hashed what the link before gave: the tensors that this one covers, no others.
        """
        if stage:
            before = sorted(self._links[stage - 1].checkpoint)
            there = all(name in self._stages[stage] for name in before)
            return there and before != self._order(stage) and self._parent(stage, before) == expected
        base = _origins(self._stages[0])
        return matching_order(base, list(self._links[0].checkpoint), expected) is not None

    def _wrong(self, stage: int, expected: str, found: str) -> IntegrityError:
        who = "the base" if not stage else f"what delta {stage} gives"
        return IntegrityError(
            "delta.base",
            f"{who} is not what this delta was made from: expected {expected}, found {found}; "
            "give the right base, and deltas in the order in which they were made",
            where=self._links[stage].location,
        )


def _origins(routes: Routes) -> TensorMap[Tensor]:
    """Return what routes begin with."""
    return ComputedMap(routes, lambda name: routes[name].origin)


def _digest(route: PatchChain) -> str:
    """Return the hex of the BLAKE3 of a route's values."""
    if not route.layers:
        return tensor_digest(route.origin)
    running = Blake3()
    for rows in route.chunks():
        running.update(file_bytes(rows))
    return hex_of(running)
