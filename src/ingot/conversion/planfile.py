"""Plans of conversions as JSON, which another process can execute (``spec/operations.md``, "Plans")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ingot.artifacts.destination import Destination, destination
from ingot.artifacts.identity import same_identity
from ingot.artifacts.open import Source, open_source
from ingot.cluster.driver.distribute import StepsType
from ingot.conversion.options import ConvertOptions
from ingot.conversion.plan import ConvertPlan
from ingot.conversion.prepare_source import prepare_source
from ingot.conversion.prepared import Prepared, for_source, refuse_same, with_activations
from ingot.core.parsing.strictjson import preload, strict_json
from ingot.engine.data import StepData, bind_steps, parse_specs, step_data
from ingot.errors import INGOT_VERSION, FormatError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import Format, FormatWriter, WriteOptions
from ingot.model.account import Omission
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.stores.location import AnyPath, Location

VERSION = 9
"""The version of the file's fields and their meaning; plans of other versions are refused."""
RULE = "plan.json"
_MAX_BYTES = 1 << 30
_VIEW_OPTIONS = ("prune", "prune_block", "metadata", "keep_names", "no_tokenizer", "rename", "part")
P = TypeVar("P", bound=Struct)
_ADDRESSES = ("activations", "importance", "draft", "coreml", "program", "graph")


@preload
class SourceData(Struct, frozen=True, forbid_unknown_fields=True):
    """The source of a plan: its address, how it is read, and its identity."""

    url: str
    io: str
    verify: bool
    max_decompressed: int | str | None
    identity: list[Any]
    trust_index: bool = False


@preload
class TargetData(Struct, frozen=True, forbid_unknown_fields=True):
    """The target of a plan: path, format, and the options of the writer."""

    path: str
    format: str
    digest: str | None
    max_shard: int | None
    compact: bool


@preload
class ViewData(Struct, frozen=True, forbid_unknown_fields=True):
    """The views of the source: the options of the conversion that define them, and the omitted tensors."""

    prune: float | None
    prune_block: int | None
    activations: str | None
    importance: str | None
    draft: str | None
    coreml: str | None
    program: str | None
    graph: str | None
    metadata: dict[str, Any]
    without: list[str]
    keep_names: bool
    no_tokenizer: bool
    rename: list[str]
    part: str | None


@preload
class PlanData(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan of a conversion as its JSON file contains it."""

    ingot: str
    version: int
    source: SourceData
    target: TargetData
    view: ViewData
    recipe: str
    quantized_inputs: str | None
    measured: bool
    untie: bool
    superseded: dict[str, str]
    dropped: dict[str, str]
    notes: list[str]
    warnings: list[str]
    steps: list[StepData]


def plan_json(prepared: Prepared, options: ConvertOptions) -> bytes:
    """Return a prepared conversion as JSON: the addresses of its files, and everything that determines the result's
    bytes.

    Raises
    ------
    UsageError
        ``plan.tp``: the conversion writes slices for several ranks; ``plan.overlay``: it writes an overlay. Plans
        cannot contain either.
    UnsupportedError
        ``plan.quantizer``: the conversion has quantizers or rotations, which plans cannot contain.
    """
    if options.tp is not None:
        raise UsageError(
            "a plan cannot contain slices for several ranks (tp); convert without --plan-out and --engine",
            rule="plan.tp",
        )
    if options.overlay is not None:
        raise UsageError(
            "a plan cannot contain an overlay; convert without --plan-out and --engine", rule="plan.overlay"
        )
    plan = prepared.plan
    target = prepared.target
    source = prepared.source
    if prepared.rounding is not None or (prepared.recipe is not None and prepared.recipe.rotate is not None):
        raise UnsupportedError(
            "a plan cannot contain the matrices that a quantizer or a rotation computes; convert without --plan-out "
            "and --engine",
            rule="plan.quantizer",
        )
    data = {
        "ingot": INGOT_VERSION,
        "version": VERSION,
        "source": {
            "url": source.url,
            "io": options.io,
            "verify": options.verify,
            "max_decompressed": options.max_decompressed,
            "trust_index": options.trust_index,
            "identity": prepared.checkpoint.identity(),
        },
        "target": {
            "path": _target_text(target),
            "format": target.format.name,
            "digest": plan.options.digest,
            "max_shard": plan.options.max_shard,
            "compact": plan.options.compact,
        },
        "view": {
            "prune": options.prune,
            "prune_block": options.prune_block,
            **{name: _address(getattr(options, name)) for name in _ADDRESSES},
            "metadata": dict(options.metadata),
            "without": sorted(prepared.without),
            "keep_names": options.keep_names,
            "no_tokenizer": options.no_tokenizer,
            "rename": list(options.rename),
            "part": options.part,
        },
        "recipe": plan.recipe,
        "quantized_inputs": prepared.recipe.activations if prepared.recipe is not None else None,
        "measured": plan.measured,
        "untie": prepared.untie,
        "superseded": dict(prepared.account.superseded),
        "dropped": dict(prepared.account.dropped),
        "notes": list(prepared.notes),
        "warnings": list(plan.warnings),
        "steps": [step_data(step) for step in plan.steps],
    }
    return json.dumps(data, indent=1).encode() + b"\n"


def save_plan(prepared: Prepared, options: ConvertOptions, path: AnyPath) -> None:
    """Write a prepared conversion to a file; an existing file is replaced.

    Raises the errors of ``plan_json`` and ``Location.write``.
    """
    Location.parse(path).write(plan_json(prepared, options))


def _target_text(target: Destination) -> str:
    return f"{target.url.rstrip('/')}/" if target.directory else target.url


def _address(path: AnyPath | None) -> str | None:
    """Return the address of a file or folder in absolute form, so that other processes can use it."""
    if path is None:
        return None
    store, name = Location.parse(path).find()
    return store.url_of(name)


def read_plan(location: Location, plan_type: type[P]) -> P:
    """Read a plan of the given type; raise the errors of ``execute`` and ``Location.find``."""
    path = location.display
    store, name = location.find()
    if not name:
        raise UsageError("this is a folder; name the file of a plan", rule="open.missing", where=path)
    data = strict_json(store.read(name, _MAX_BYTES, RULE), RULE, RULE, path)
    if data.get("version") != VERSION or data.get("ingot") != INGOT_VERSION:
        raise FormatError(
            "plan.version",
            f"expected a plan of version {VERSION} made by Ingot {INGOT_VERSION}, found version "
            f"{data.get('version')!r:.20} of Ingot {data.get('ingot')!r:.20}: other versions may encode differently, "
            "so make the plan again",
            where=path,
        )
    try:
        return msgspec.convert(data, plan_type)
    except msgspec.ValidationError as error:
        raise FormatError(RULE, f"expected a valid plan: {error}", where=path) from error


@dataclass(frozen=True, slots=True)
class OpenedPlan:
    """A plan whose source is open: the view of the source, and the target.

    The source has the identity that the plan declares.
    """

    data: PlanData
    source: Source
    view: View
    target: Destination
    format: Format
    writing: WriteOptions

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the steps read."""
        return self.view.checkpoint

    def plan(self, indices: range) -> ConvertPlan:
        """Return a plan with only the steps at ``indices``; raises ``FormatError`` ``plan.step``."""
        steps = list(bind_steps(self.data.steps[indices.start : indices.stop], [self.checkpoint], self.format))
        return ConvertPlan(
            steps=steps,
            format=self.format,
            metadata=self.format.metadata(self.checkpoint.metadata),
            options=self.writing,
            measured=self.data.measured,
            attachments=self.checkpoint.attachments,
            recipe=self.data.recipe,
            warnings=self.data.warnings,
        )

    @property
    def names(self) -> Sequence[str]:
        """The names of the planned tensors; see ``cluster.driver.distribute.Shared.names``."""
        return [str(step.spec.get("name")) for step in self.data.steps]

    def hashed(self, indices: range) -> Sequence[Sequence[int]]:
        """Return for each step the inputs to hash: none; see ``Shared.hashed``."""
        return [()] * len(indices)

    def writer(self, target: Target) -> FormatWriter:
        """Return the writer of the artifact; see ``Shared.writer``."""
        plan = self.plan(range(0))
        artifact = Artifact(parse_specs(self.data.steps), plan.metadata, plan.attachments)
        return self.format.writer(target, self.target.name, artifact, self.writing)

    def require_unchanged(self) -> None:
        """Raise an error if a file of the source has changed since it was opened; see ``Shared.require_unchanged``."""
        self.checkpoint.require_unchanged()

    def close(self) -> None:
        """Close the checkpoint and its source."""
        self.checkpoint.close()


def open_shared_plan(location: Location) -> OpenedPlan:
    """Open a plan in a worker's process; raise the errors of ``execute``."""
    return open_plan(read_plan(location, PlanData))


def open_plan(data: PlanData, out: Location | None = None) -> OpenedPlan:
    """Open the source of a plan and its view; the caller closes the result. Raises the errors of ``execute``."""
    target = destination(Location.parse(data.target.path) if out is None else out, data.target.format)
    source = open_source(
        Location.parse(data.source.url),
        io=data.source.io,
        verify=data.source.verify,
        max_decompressed=data.source.max_decompressed,
        trust_index=data.source.trust_index,
    )
    close = source.close
    try:
        refuse_same(source, target)
        target = with_activations(for_source(target, source), data.quantized_inputs)
        view_options = {name: getattr(data.view, name) for name in (*_VIEW_OPTIONS, *_ADDRESSES)}
        options = ConvertOptions(data.source.url, target.location, **view_options)
        planned = [str(step.spec.get("name")) for step in data.steps]
        without = dict.fromkeys(data.view.without, Omission(""))
        view = prepare_source(source.view(), target, options, without, planned)
        checkpoint = view.checkpoint
        close = checkpoint.close
        require_same(checkpoint.identity(), data.source.identity, source.location)
        writing = WriteOptions(data.target.digest, data.target.max_shard, data.target.compact, target.directory)
        format = target.format.for_attachments(checkpoint.attachments)
        format = format.compacted() if writing.compact else format
        return OpenedPlan(data, source, view, target, format, writing)
    except BaseException:
        close()
        raise


def require_same(identity: Sequence[Any], expected: Sequence[Any], location: str) -> None:
    """Raise ``IntegrityError`` ``plan.source`` if a source does not have the identity that the plan declares."""
    if not same_identity(identity, expected):
        raise IntegrityError(
            "plan.source",
            "the source is not the one that the plan was made for, or has changed since; plan again",
            where=location,
        )


TASKS = StepsType(open_shared_plan)
"""The tasks of a plan; workers cache the opened plan."""
