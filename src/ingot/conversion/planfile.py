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
from ingot.conversion.prepared import Prepared, for_source, refuse_same
from ingot.core.parsing.strictjson import strict_json, warm
from ingot.engine.data import StepData, bound_steps, specs_of, step_data
from ingot.errors import INGOT_VERSION, FormatError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import Format, FormatWriter, WriteOptions
from ingot.model.account import Omission
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.stores.location import AnyPath, Location

VERSION = 6
"""Of the fields and of what they mean; another one is refused, never guessed at."""
RULE = "plan.json"
_LARGEST = 1 << 30
_VIEWED = ("prune", "prune_block", "metadata", "keep_names", "no_tokenizer")
P = TypeVar("P", bound=Struct)
_ADDRESSES = ("activations", "importance", "draft", "coreml", "program", "graph")


@warm
class SourceData(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan reads: where it is, how it is read, and what tells it from another."""

    url: str
    io: str
    verify: bool
    max_decompressed: int | str | None
    identity: list[Any]
    trust_index: bool = False


@warm
class TargetData(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan writes: path, format, and the options of its writer."""

    path: str
    format: str
    digest: str | None
    max_shard: int | None
    compact: bool


@warm
class ViewData(Struct, frozen=True, forbid_unknown_fields=True):
    """How the source is viewed: the options of the conversion that say so, and tensors that are left out."""

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


@warm
class PlanData(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan of a conversion."""

    ingot: str
    version: int
    source: SourceData
    target: TargetData
    view: ViewData
    recipe: str
    measured: bool
    untie: bool
    superseded: dict[str, str]
    dropped: dict[str, str]
    notes: list[str]
    warnings: list[str]
    steps: list[StepData]


def plan_json(prepared: Prepared, options: ConvertOptions) -> bytes:
    """Return a prepared conversion as JSON: everything that determines the result's bytes, and where the source is.

    Raises ``UsageError`` ``plan.tp``: slices of several ranks are a plan each; ``plan.overlay``. ``UnsupportedError``
    ``plan.quantizer``.
    """
    if options.tp is not None:
        raise UsageError(
            "expected a conversion into one artifact, found slices for several ranks (tp), which no plan holds: "
            "convert at once, here",
            rule="plan.tp",
        )
    if options.overlay is not None:
        raise UsageError(
            "expected a conversion into a file of its own, found an overlay, which no plan holds: convert at once, "
            "here",
            rule="plan.overlay",
        )
    plan, place, source = prepared.plan, prepared.place, prepared.source
    if prepared.encoding.encoders:
        raise UnsupportedError(
            f"integers for {prepared.place.format.name} are encoded and repacked where the conversion runs, and plans "
            "do not say how: convert at once, here, or convert to a .zt first",
            rule="plan.quantizer",
        )
    if prepared.rounding is not None or (prepared.recipe is not None and prepared.recipe.rotate is not None):
        raise UnsupportedError(
            "a recipe with a quantizer or a rotation computes matrices where it runs, and plans do not say how: "
            "convert at once, here",
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
            "path": _target_text(place),
            "format": place.format.name,
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
        },
        "recipe": plan.recipe,
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


def _target_text(place: Destination) -> str:
    return f"{place.url.rstrip('/')}/" if place.directory else place.url


def _address(path: AnyPath | None) -> str | None:
    """Return the address at which another process finds a file or folder."""
    if path is None:
        return None
    store, name = Location.parse(path).find()
    return store.url_of(name)


def read_plan(location: Location, kind: type[P]) -> P:
    """Return a plan of the given type; raise the errors of ``execute`` and ``Location.find``."""
    where = location.display
    store, name = location.find()
    if not name:
        raise UsageError("this is a folder; name the file of a plan", rule="open.missing", where=where)
    found = strict_json(store.read(name, _LARGEST, RULE), RULE, RULE, where)
    if found.get("version") != VERSION or found.get("ingot") != INGOT_VERSION:
        raise FormatError(
            "plan.version",
            f"expected a plan of version {VERSION} made by Ingot {INGOT_VERSION}, which encodes alike; found "
            f"{found.get('version')!r:.20} of {found.get('ingot')!r:.20}: make it again",
            where=where,
        )
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise FormatError(RULE, f"expected a plan of this kind: {error}", where=where) from error


@dataclass(frozen=True, slots=True)
class OpenedPlan:
    """A plan whose source is open and identical to the one that the plan was made for, and the view of the source."""

    data: PlanData
    source: Source
    view: View
    place: Destination
    format: Format
    writing: WriteOptions

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the steps read."""
        return self.view.checkpoint

    def plan(self, numbers: range) -> ConvertPlan:
        """Return the plan of some of its steps; raises ``FormatError`` ``plan.step``."""
        steps = list(bound_steps(self.data.steps[numbers.start : numbers.stop], [self.checkpoint], self.format))
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
        """As ``cluster.driver.distribute.Shared.names``."""
        return [str(step.spec.get("name")) for step in self.data.steps]

    def hashed(self, numbers: range) -> Sequence[Sequence[int]]:
        """As ``Shared.hashed``: nothing is."""
        return [()] * len(numbers)

    def writer(self, target: Target) -> FormatWriter:
        """As ``Shared.writer``."""
        plan = self.plan(range(0))
        artifact = Artifact(specs_of(self.data.steps), plan.metadata, plan.attachments)
        return self.format.writer(target, self.place.name, artifact, self.writing)

    def require_unchanged(self) -> None:
        """As ``Shared.require_unchanged``."""
        self.checkpoint.require_unchanged()

    def close(self) -> None:
        """As ``Shared.close``."""
        self.checkpoint.close()


def shared(location: Location) -> OpenedPlan:
    """Open a plan, in a worker's process; errors as ``execute``."""
    return open_plan(read_plan(location, PlanData))


def open_plan(data: PlanData, out: Location | None = None) -> OpenedPlan:
    """Open what a plan reads, as it says; errors as ``execute``. Who calls closes the checkpoint."""
    place = destination(Location.parse(data.target.path) if out is None else out, data.target.format)
    told = data.source
    source = open_source(
        Location.parse(told.url),
        io=told.io,
        verify=told.verify,
        max_decompressed=told.max_decompressed,
        trust_index=told.trust_index,
    )
    close = source.close
    try:
        refuse_same(source, place)
        place = for_source(place, source)
        named = {name: getattr(data.view, name) for name in (*_VIEWED, *_ADDRESSES)}
        options = ConvertOptions(data.source.url, place.location, **named)
        planned = [str(step.spec.get("name")) for step in data.steps]
        without = dict.fromkeys(data.view.without, Omission(""))
        view = prepare_source(source.view(), place, options, without, planned)
        checkpoint, close = view.checkpoint, view.checkpoint.close
        require_same(checkpoint.identity(), data.source.identity, source.location)
        writing = WriteOptions(data.target.digest, data.target.max_shard, data.target.compact, place.directory)
        format = place.format.for_attachments(checkpoint.attachments)
        format = format.compacted() if writing.compact else format
        return OpenedPlan(data, source, view, place, format, writing)
    except BaseException:
        close()
        raise


def require_same(found: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    """Refuse a source that is not the one whose identity a plan states: ``IntegrityError`` ``plan.source``."""
    if not same_identity(found, expected):
        raise IntegrityError(
            "plan.source",
            "expected what the plan was made for, found another, or one that was written to since; plan again",
            where=where,
        )


TASKS = StepsType(shared)
"""The tasks of a plan; workers keep the last plan open."""
