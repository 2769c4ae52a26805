"""Convert a checkpoint: tensor by tensor, in bounded memory, resumable, published whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ingot.core.atomic import Staging
from ingot.core.config import CONFIG, MAX_CONFIG
from ingot.core.options import takes
from ingot.core.parallel import default_workers
from ingot.core.progress import ProgressEvent
from ingot.core.stats import ErrorStats
from ingot.engine.drive import chunk_budget, drive
from ingot.engine.journal import Journal, fingerprint, intact
from ingot.engine.pipeline import Pipeline, chunking
from ingot.engine.work import Chunking
from ingot.errors import UsageError
from ingot.formats.base import ConfigKeys, FormatWriter, OneHead
from ingot.model.attachments import NOTHING
from ingot.model.checkpoint import Checkpoint
from ingot.model.limits import require_in_proportion
from ingot.ops.attachments import Gathered, gather
from ingot.ops.companions import ConfigChange, copy_companions
from ingot.ops.convert.idle import require_effect
from ingot.ops.convert.options import ConvertOptions
from ingot.ops.convert.plan import ConvertPlan, PlanRequest, Step, plan_conversion
from ingot.ops.convert.prune import NOT_PRUNED, PrunePlan, prepare_pruning
from ingot.ops.convert.report import ConvertReport, TensorReport, retyped, tensor_report
from ingot.ops.convert.requests import importance_of, prune_request, within, write_options
from ingot.ops.convert.tied import Tied, untangle
from ingot.ops.destination import Destination, destination, require_room, stage
from ingot.ops.open import Source, checkpoint_of, open_source
from ingot.ops.remarks import remarks
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.stores.local import LocalStore, LocalTarget, url_of


@takes(ConvertOptions, "convert")
def convert(options: ConvertOptions) -> ConvertReport:
    """Convert a checkpoint into another container, by a recipe or as it is.

    Without a recipe every tensor is kept as it is stored; integers that the target takes in another layout only are
    repacked, and what it cannot carry is decoded. With ``resume`` the output is byte for byte that of an uninterrupted
    run.

    Returns
    -------
    ConvertReport

    Raises
    ------
    UsageError, UnsupportedError, CodecError, FormatError, IntegrityError, ResourceError
        Nothing is left under the final name.
    """
    started = time.perf_counter()
    with prepare(within(options)) as prepared:
        report = _Job(prepared, options).run()
    return replace(report, seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion that has been planned and not begun: the opened source, the plan, the destination.

    ``untie``: the result's config.json is to say that the head is not the embedding. ``notes`` are for the report.
    """

    source: Source
    checkpoint: Checkpoint
    plan: ConvertPlan
    place: Destination
    recipe: Recipe | None = None
    pruning: PrunePlan = NOT_PRUNED
    gathered: Gathered = field(default_factory=Gathered)
    untie: bool = False
    notes: Sequence[str] = ()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.gathered.close()
        self.source.close()


@takes(ConvertOptions, "convert")
def prepare(options: ConvertOptions) -> Prepared:
    """Open the source and plan the conversion, from headers and samples; what ``--dry-run`` prints.

    Pruning reads the feed-forward networks, and tells ``progress``.
    """
    place, recipe = destination(options.dst, options.format), options.recipe
    if not (recipe is None or isinstance(recipe, Recipe)):
        recipe = load_recipe(recipe)
    source = open_source(options.src, io=options.io, verify=options.verify)
    gathered = Gathered()
    try:
        refuse_same(source, place)
        checkpoint = checkpoint_of(source)
        _require_weights(source, place, recipe, options)
        tied = _tied(source, checkpoint, place)
        pruning = prepare_pruning(checkpoint, prune_request(options), options.progress)
        gathered = gather(checkpoint.attachments, place.format, options.draft, options.coreml, options.program)
        options_of_writer = replace(write_options(options, place), attachments=gathered.attachments)
        request = PlanRequest(
            recipe,
            options.allow_requantize,
            options_of_writer,
            options.threads,
            pruning.tensors,
            importance_of(options, checkpoint),
            tied.without,
        )
        plan = plan_conversion(checkpoint, place.format, request)
        if options.strict_recipe:
            require_effect(plan.warnings)
        behind = source.companions().note() if place.directory else ""
        told = [*(message for _, message in remarks(source)), *pruning.notes, *gathered.notes, tied.note, behind]
        notes = [note for note in told if note]
        return Prepared(source, checkpoint, plan, place, recipe, pruning, gathered, tied.untie, notes)
    except BaseException:
        gathered.close()
        source.close()
        raise


def _tied(source: Source, checkpoint: Checkpoint, place: Destination) -> Tied:
    """Decide on a head beside tied embeddings, for formats whose readers take no such thing."""
    if not (isinstance(place.format, OneHead) and place.directory and source.is_folder):
        return Tied()
    return untangle(source.config(), checkpoint)


def _require_weights(source: Source, place: Destination, recipe: Recipe | None, options: ConvertOptions) -> None:
    """Refuse words that another program packed, unless they move as they are, beside the config.json that says so."""
    dialect = source.dialect()
    as_stored = (recipe is None or all(rule.choice is None for rule in recipe.rules)) and options.prune is None
    travels = place.directory and source.is_folder and not isinstance(place.format, ConfigKeys)
    if dialect is not None and not (as_stored and travels):
        raise dialect.refusal()


def refuse_same(source: Source, place: Destination) -> None:
    """Refuse a destination that is a file of the source, or a folder around one: publishing would remove it."""
    if source.is_lost(url_of(place.path), folder=place.directory):
        raise UsageError(
            "the destination is the source, or holds it and would replace it; choose another destination",
            rule="convert.same-path",
            where=str(place.path),
        )


def _silent(_: ProgressEvent) -> None:
    pass


class _Job:
    """One run of a prepared conversion."""

    def __init__(self, prepared: Prepared, options: ConvertOptions) -> None:
        self._source, self._plan, self._place = prepared.source, prepared.plan, prepared.place
        self._checkpoint, self._recipe = prepared.checkpoint, prepared.recipe
        self._options, self._progress = options, options.progress or _silent
        self._workers = options.threads or default_workers()
        self._reports: list[TensorReport] = []
        self._pruning, self._gathered = prepared.pruning, prepared.gathered
        self._untie, self._notes = prepared.untie, prepared.notes
        self._done = prepared.pruning.read

    def run(self) -> ConvertReport:
        decoded = (step.tensor for step in self._plan.steps if step.encoder is not None)
        require_in_proportion(decoded, self._source.location)
        resume = self._options.resume
        budget = chunk_budget(self._options.max_ram, self._plan.steps, self._workers)
        slots = self._workers + 3  # one being read, one being written, one of a fit pass
        chunkings = [chunking(step, budget, slots, self._options.measure) for step in self._plan.steps]
        place = self._place
        names = self._checkpoint.companions if place.directory else ()
        with stage(place, overwrite=self._options.overwrite, resume=resume, names=names) as staging:
            try:
                resumed, files = self._write(staging, chunkings, budget)
                companions = self._companions(LocalStore(staging.files), files) if place.directory else []
                self._source.require_whole()
                self._source.require_unchanged()
                self._gathered.require_unchanged()
                staging.publish([*files, *(name for name in companions if name not in files)])
            except BaseException:
                if resume:
                    staging.keep()
                raise
        return self._report(files, companions, resumed)

    def _companions(self, staged: LocalStore, written: list[str]) -> list[str]:
        """Copy the companions; what the writer made under the name of one stands, but ``config.json`` is merged."""
        packed = self._source.format
        drop = packed.config_keys if isinstance(packed, ConfigKeys) else ()
        change = ConfigChange(drop, *retyped(self._plan.steps), self._untie)
        every = self._checkpoint.companions
        found = {name: path for name, path in every.items() if name not in written or name == CONFIG}
        own = staged.read(CONFIG, MAX_CONFIG, "companions.config") if CONFIG in written else None
        return copy_companions(found, LocalTarget(staged.local_path()), own, change)

    def _write(self, staging: Staging, chunkings: list[Chunking], budget: int) -> tuple[int, list[str]]:
        journal = Journal(staging.journal, fingerprint(self._source, self._identity()))
        records = self._intact(journal.earlier(), staging.files) if self._options.resume else []
        writer = self._restore(records, staging.files)
        require_room(self._place, self._plan.least, staging.files)
        journal.start(records)
        steps = list(self._plan.steps[len(records) :])
        try:
            with Pipeline(
                steps, chunkings[len(records) :], workers=self._workers, budget=budget, measured=self._options.measure
            ) as pipeline:
                total = self._plan.in_bytes + self._pruning.read

                def advanced(nbytes: int, name: str) -> None:
                    self._done += nbytes
                    self._progress(ProgressEvent(self._done, total, name))

                drive(pipeline, writer, self._workers, partial(self._finished, journal), advanced)
            return len(records), writer.finish()
        except BaseException:
            writer.abort()
            raise
        finally:
            journal.close()

    def _identity(self) -> dict[str, Any]:
        """Return what, beside the source, determines the output's bytes."""
        plan = self._plan
        steps = [
            [step.action, step.spec.codec, dict(step.spec.params), [asdict(part) for part in step.spec.parts]]
            for step in plan.steps
        ]
        options = asdict(replace(plan.options, attachments=NOTHING))
        return {
            "format": plan.format.name,
            "name": ascii(self._place.name),
            "rules": self._recipe.fingerprint() if self._recipe else None,
            "options": options,
            "steps": steps,
            "masks": dict(plan.masks),
            "importance": dict(plan.importance),
            "attachments": [sorted(plan.options.attachments.kinds()), self._gathered.identity],
        }

    def _intact(self, earlier: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
        """Return the leading records whose bytes are all there."""
        good: list[dict[str, Any]] = []
        for record, step in zip(earlier, self._plan.steps, strict=False):
            if record["written"]["name"] != step.tensor.name or not intact(record["written"], folder):
                break
            good.append(record)
        return good

    def _restore(self, records: list[dict[str, Any]], folder: Path) -> FormatWriter:
        """Cut the files behind the restored tensors and start a writer that knows them."""
        ends: dict[str, int] = {}
        for record in records:
            for name, offset, length, _ in record["written"]["blobs"]:
                ends[name] = max(ends.get(name, 0), offset + length)
        kept = {parent for name in ends for parent in Path(name).parents}
        for path in sorted(folder.rglob("*"), reverse=True):  # a folder comes after what lies in it
            name = path.relative_to(folder)
            if name.as_posix() in ends:
                os.truncate(path, ends[name.as_posix()])
            elif not path.is_dir() or path.is_symlink():  # companions of the earlier run
                path.unlink()
            elif name not in kept:
                path.rmdir()
        plan = self._plan
        learnt = [replace(spec, params=record["params"]) for record, spec in zip(records, plan.specs, strict=False)]
        specs = [*learnt, *plan.specs[len(records) :]]
        writer = plan.format.writer(LocalTarget(folder), self._place.name, specs, plan.metadata, plan.options)
        for record, step in zip(records, plan.steps, strict=False):
            writer.restore(record["written"])
            self._reports.append(tensor_report(step, record["nbytes"], ErrorStats(**record["error"])))
            self._done += step.in_bytes
        return writer

    def _finished(self, journal: Journal, step: Step, record: dict[str, Any], error: ErrorStats) -> None:
        nbytes = sum(blob[2] for blob in record["blobs"])
        params = dict(step.spec.params)  # with what fit passes learnt, which no plan knows
        journal.append({"written": record, "nbytes": nbytes, "error": asdict(error), "params": params})
        self._reports.append(tensor_report(step, nbytes, error))

    def _report(self, files: list[str], companions: list[str], resumed: int) -> ConvertReport:
        folder = self._place.path if self._place.directory else self._place.path.parent
        return ConvertReport(
            source=self._source.location,
            destination=str(self._place.path),
            format=self._plan.format.name,
            recipe=self._plan.recipe,
            tensors=self._reports,
            source_nbytes=self._checkpoint.nbytes,
            source_size=self._source.stored(),
            size=sum((folder / name).stat().st_size for name in files),
            seconds=0.0,
            files=files,
            companions=companions,
            resumed=resumed,
            notes=self._notes,
            warnings=self._plan.warnings,
        )
