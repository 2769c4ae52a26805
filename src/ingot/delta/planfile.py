"""Plans of diffs and patches as JSON, from which other processes execute steps (``spec/operations.md``, "Plans")."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from ingot.artifacts.destination import Destination
from ingot.artifacts.open import open_delta, open_source, weights_of
from ingot.cluster.driver.distribute import StepsType
from ingot.conversion.planfile import RULE, VERSION, SourceData, TargetData, read_plan, require_same
from ingot.core.parsing.strictjson import preload
from ingot.engine.data import StepData, bind_steps, from_json_value, parse_specs, step_data, to_json_value
from ingot.engine.delta_chain import link_of, stages
from ingot.engine.patch_step import PatchChain
from ingot.engine.work import Plan, Step
from ingot.errors import INGOT_VERSION, FormatError
from ingot.formats.base import Format, FormatWriter, WriteOptions
from ingot.formats.detect import FORMATS
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.checkpoint import Checkpoint
from ingot.stores.location import Location

Operation = Literal["diff", "patch"]


@preload
class DeltaPlanData(Struct, frozen=True, forbid_unknown_fields=True, rename={"operation": "kind"}):
    """The plan of a diff (base and fine-tune) or of a patch (base and deltas)."""

    ingot: str
    version: int
    operation: Operation
    sources: list[SourceData]
    target: TargetData
    metadata: dict[str, Any]
    measured: bool
    steps: list[StepData]


def source_data(checkpoint: Checkpoint, url: str, io: str, verify: bool, limit: int | str | None) -> SourceData:
    """Return a plan's entry for the opened source ``checkpoint``; ``limit`` is ``max_decompressed``."""
    return SourceData(url, io, verify, limit, checkpoint.identity())


def delta_plan_json(
    operation: Operation,
    plan: Plan,
    sources: Sequence[SourceData],
    destination: Destination,
    hashed: Callable[[Step], Sequence[int]],
) -> bytes:
    """Return a plan as JSON.

    The JSON contains the locations of the sources, and everything else that determines the output bytes of the steps.
    ``hashed`` returns the points of a step at which values are hashed.
    """
    options = plan.options
    data = {
        "ingot": INGOT_VERSION,
        "version": VERSION,
        "kind": operation,
        "sources": [
            {
                "url": source.url,
                "io": source.io,
                "verify": source.verify,
                "max_decompressed": source.max_decompressed,
                "identity": source.identity,
            }
            for source in sources
        ],
        "target": {
            "path": destination.name,
            "format": destination.format.name,
            "digest": options.digest,
            "max_shard": options.max_shard,
            "compact": options.compact,
        },
        "metadata": to_json_value(plan.metadata),
        "measured": plan.measured,
        "steps": [{**step_data(step), "hashed": list(hashed(step))} for step in plan.steps],
    }
    return json.dumps(data, indent=1).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class OpenedDeltaPlan:
    """A plan with open sources that were compared with the plan. Implements ``Shared``."""

    data: DeltaPlanData
    format: Format
    checkpoints: Sequence[Checkpoint]
    routes: Mapping[str, PatchChain]
    stack: ExitStack

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the steps' tensors (``cluster.driver.distribute.Shared.names``)."""
        return [str(step.spec.get("name")) for step in self.data.steps]

    def plan(self, numbers: range) -> Plan:
        """Return the plan of a range of steps (``Shared.plan``)."""
        data = self.data.steps[numbers.start : numbers.stop]
        steps = list(bind_steps(data, self.checkpoints, self.format, self.routes))
        return Plan(steps, self.format, self._metadata(), self._writing(), self.data.measured)

    def hashed(self, numbers: range) -> Sequence[Sequence[int]]:
        """Return the points at which each step of a range hashes values (``Shared.hashed``)."""
        return [step.hashed for step in self.data.steps[numbers.start : numbers.stop]]

    def writer(self, target: Target) -> FormatWriter:
        """Return a writer of the plan's artifact (``Shared.writer``)."""
        artifact = Artifact(parse_specs(self.data.steps), self._metadata())
        return self.format.writer(target, self.data.target.path, artifact, self._writing())

    def require_unchanged(self) -> None:
        """Raise an error if a source was modified (``Shared.require_unchanged``)."""
        for checkpoint in self.checkpoints:
            checkpoint.require_unchanged()

    def close(self) -> None:
        """Close the sources (``Shared.close``)."""
        self.stack.close()

    def _metadata(self) -> dict[str, Any]:
        try:
            metadata = from_json_value(self.data.metadata)
        except (ValueError, TypeError) as error:
            raise FormatError(RULE, f"expected metadata as plans have them: {error}") from error
        if not isinstance(metadata, dict):
            raise FormatError(RULE, f"expected metadata by name, found {type(metadata).__name__}")
        return metadata

    def _writing(self) -> WriteOptions:
        target = self.data.target
        return WriteOptions(target.digest, target.max_shard, target.compact)


def shared(location: Location) -> OpenedDeltaPlan:
    """Open a plan, in a worker's process.

    Raises
    ------
    FormatError
        ``plan.json``, ``plan.version``: no plan, or a plan of another version of Ingot.
    IntegrityError
        ``plan.source``: a source differs from the one that was planned.
    """
    data = read_plan(location, DeltaPlanData)
    with ExitStack() as stack:
        checkpoints = []
        for index, item in enumerate(data.sources):
            is_delta = index > 0 and data.operation == "patch"
            opened = open_delta if is_delta else open_source
            source = opened(
                Location.parse(item.url), io=item.io, verify=item.verify, max_decompressed=item.max_decompressed
            )
            stack.callback(source.close)
            checkpoint = source.view() if is_delta else weights_of(source)
            require_same(checkpoint.identity(), item.identity, source.location)
            checkpoints.append(checkpoint)
        routes: Mapping[str, PatchChain] = {}
        if data.operation == "patch":
            routes = stages(checkpoints[0], [link_of(checkpoint) for checkpoint in checkpoints[1:]])[-1]
        format = FORMATS.get_or_refuse(data.target.format)
        return OpenedDeltaPlan(data, format, checkpoints, routes, stack.pop_all())


TASKS = StepsType(shared)
"""The tasks of a plan; a worker keeps its latest plan open."""
