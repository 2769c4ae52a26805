"""Check that a base, each parent in a chain, and the result have the identities stated in the deltas.

Most tensors are hashed while the patch reads and computes them. Tensors that a later delta removes or replaces are
hashed separately. A parent hash whose order differs from the order of the steps is computed in an extra pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ingot.artifacts.identity import TensorId, content_of, tensor_digest
from ingot.core.bytes.checksums import Blake3, Sha256, hex_of
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.runtime.parallel import ordered
from ingot.delta.observe import PARENT
from ingot.delta.parent import matching_order, parent_orders
from ingot.engine.delta_chain import Link, Routes
from ingot.engine.execute import Observer
from ingot.engine.hashing import HashFactories, HashFactory, HashThread, ParentHash, TensorHashes
from ingot.engine.patch_step import Patch, PatchChain
from ingot.engine.pipeline import HashSelector
from ingot.engine.work import CompletedStep, Plan, Step
from ingot.errors import CodecError, IntegrityError, UsageError
from ingot.model.reading.lazy import ComputedMap, TensorMap
from ingot.model.tensor import Tensor


class Proof(Observer):
    """An observer that hashes stages of a chain and compares them with the stated identities.

    Parameters
    ----------
    links : sequence of Link
    stages : sequence of mappings
        The result of ``chain.stages``.
    base : bool
        Whether to check the parent of every link. The constructor compares the identities that neighbouring links
        state.
    result : bool or None
        Whether to check the result. None checks it if the last link states it and ``base`` is true.
    workers : int
        Number of threads that hash tensors separately.

    Raises
    ------
    IntegrityError
        ``delta.base``: neighbouring links state different identities.
    UsageError
        ``delta.no-identity``, ``delta.no-result``: a delta does not state an identity that should be checked.
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
        self._watches: dict[int, HashFactory] = {}
        self._workers = workers
        self.result_id: str | None = None
        for stage in range(len(links)) if base else ():
            self._expect_base(stage)
        promised = links[-1].info.result.content
        if result or (result is None and base and promised is not None):
            if promised is None:
                raise UsageError(
                    "the delta does not state its result: nothing to verify against",
                    rule="delta.no-result",
                    where=links[-1].location,
                )
            self._contents[len(links)] = promised

    @property
    def order(self) -> Sequence[str] | None:
        """The order in which tensors must be read to compute the first parent hash that is checked.

        It is None if no parent hash is checked.
        """
        return self._order(min(self._parents)) if self._parents else None

    def _order(self, stage: int) -> Sequence[str]:
        """Return the names in the order in which the writer of a stage's parent hash most likely hashed them."""
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
        return [stage for stage in sorted(self._contents) if self._is_value_of(stage, step)]

    @contextmanager
    def hash_selector(self, plan: Plan, resumed: int) -> Iterator[HashSelector]:
        with ExitStack() as stack:
            for stage in sorted({*self._contents, *self._parents}):
                lane = stack.enter_context(HashThread(f"hash{stage}"))
                if stage in self._contents:
                    self._watches[stage] = TensorHashes(lane)
                elif not resumed and self._needs_no_pass(stage, plan.steps):
                    self._watches[stage] = ParentHash(lane)

            def of_step(step: Step) -> HashFactories:
                if not isinstance(step, Patch):
                    return {}
                return {stage: watch for stage, watch in self._watches.items() if self._is_value_of(stage, step)}

            yield of_step

    def conclude(self, completed: Sequence[CompletedStep]) -> Mapping[str, Any] | None:
        """Compare all hashes with the hashes stated in the deltas.

        Raises ``IntegrityError`` ``delta.base`` or ``delta.result`` if one differs.
        """
        for stage, expected in self._contents.items():
            actual = content_of(self._ids(stage, completed))
            if stage == len(self._links):
                self.result_id = actual
                if actual != expected:
                    raise IntegrityError(
                        "delta.result",
                        f"the result is not the one that the delta states: expected {expected}, found {actual}",
                        where=self._links[-1].location,
                    )
            elif actual != expected:
                raise self._base_error(stage, expected, actual)
        for stage, expected in self._parents.items():
            watch = self._watches.get(stage)
            actual = watch.hex if isinstance(watch, ParentHash) else self._parent(stage)
            if actual != expected and not self._matches_other_order(stage, expected):
                raise self._base_error(stage, expected, actual)
        return None

    def explain(self, error: CodecError) -> None:
        """Raise ``IntegrityError`` ``delta.base`` if a wrong base caused ``error`` while a delta was applied.

        The base is hashed to find out; if it is right, the function returns.
        """
        for stage in sorted({*self._contents, *self._parents} - {len(self._links)}):
            expected = self._contents.get(stage) or self._parents[stage]
            try:
                actual = content_of(self._ids(stage, ())) if stage in self._contents else self._parent(stage)
            except CodecError:  # the error is from an earlier stage
                return
            if actual != expected and (stage in self._contents or not self._matches_other_order(stage, expected)):
                raise self._base_error(stage, expected, actual) from error

    def _expect_base(self, stage: int) -> None:
        link = self._links[stage]
        expected = link.info.base
        if expected.content is not None:
            before = self._links[stage - 1].info.result.content if stage else None
            if before is None:
                self._contents[stage] = expected.content
            elif before != expected.content:
                raise self._base_error(stage, expected.content, before)
        elif PARENT in expected.hashes:
            self._parents[stage] = expected.hashes[PARENT]
        else:
            raise UsageError(
                "the delta does not state its base; pass --no-verify-base (verify_base=False) to trust yours",
                rule="delta.no-identity",
                where=link.location,
            )

    def _is_value_of(self, stage: int, step: Patch) -> bool:
        """Return whether ``step`` computes values that the identity of ``stage`` covers."""
        covered = stage in self._contents or step.spec.name in self._links[stage].info.tensors
        return covered and step.route.first_stage <= stage  # no later delta replaces the tensor

    def _needs_no_pass(self, stage: int, steps: Sequence[Step]) -> bool:
        """Return whether the steps read all tensors of the stage's parent hash in its order.

        If they do, the hash needs no extra pass. Only the base (stage 0) can be hashed in this way.
        """
        if stage:
            return False
        changes = self._links[stage].info.tensors
        covered = [step for step in steps if step.spec.name in changes]
        if [step.spec.name for step in covered] != list(self._order(stage)):
            return False
        return all(isinstance(step, Patch) and step.route.first_stage <= stage for step in covered)

    def _ids(self, stage: int, completed: Sequence[CompletedStep]) -> dict[str, TensorId]:
        passed = {item.step.spec.name: item.digest(stage) for item in completed}
        digests = {name: digest for name, digest in passed.items() if digest is not None}
        unhashed = [route for name, route in self._stages[stage].items() if name not in digests]
        workers = self._workers if completed else 0
        digests |= dict(ordered(lambda route: (route.name, _digest(route)), unhashed, workers))
        return {name: TensorId(route.dtype, route.shape, digests[name]) for name, route in self._stages[stage].items()}

    def _parent(self, stage: int, order: Sequence[str] | None = None) -> str:
        """Return the parent hash of a stage, computed in an extra pass over its tensors.

        ``order`` are the names in the order in which they are hashed; by default the likeliest order.
        """
        running = Sha256()
        for name in self._order(stage) if order is None else order:
            running.update(name.encode("utf-8", "surrogatepass"))
            for rows in self._stages[stage][name].chunks():
                running.update(file_bytes(rows))
        return hex_of(running)

    def _matches_other_order(self, stage: int, expected: str) -> bool:
        """Return whether the parent hash of ``stage`` is ``expected`` in another order that deltatensors uses.

        For the parent of a later link, deltatensors hashes only the tensors of the link before it.
        """
        if stage:
            before = sorted(self._links[stage - 1].checkpoint)
            exists = all(name in self._stages[stage] for name in before)
            return exists and before != self._order(stage) and self._parent(stage, before) == expected
        base = _origins(self._stages[0])
        return matching_order(base, list(self._links[0].checkpoint), expected) is not None

    def _base_error(self, stage: int, expected: str, actual: str) -> IntegrityError:
        subject = "the base" if not stage else f"the result of delta {stage}"
        return IntegrityError(
            "delta.base",
            f"{subject} is not what this delta was made from: expected {expected}, found {actual}; "
            "give the right base, and deltas in the order in which they were made",
            where=self._links[stage].location,
        )


def _origins(routes: Routes) -> TensorMap[Tensor]:
    """Return the first tensors of chains of patches, by name."""
    return ComputedMap(routes, lambda name: routes[name].origin)


def _digest(route: PatchChain) -> str:
    """Return the BLAKE3 digest, in hex, of a tensor's values after its chain of patches."""
    if not route.layers:
        return tensor_digest(route.origin)
    running = Blake3()
    for rows in route.chunks():
        running.update(file_bytes(rows))
    return hex_of(running)
