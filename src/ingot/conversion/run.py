"""Convert a checkpoint: tensor by tensor, in bounded memory, resumable, published whole or not at all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ingot.artifacts.account import account_of_conversion, dropped, unused_patterns
from ingot.artifacts.adapter_files import HOLDS_ANY, note_on_config, refuse_adapter
from ingot.artifacts.companions import copy_companions
from ingot.artifacts.destination import Destination, destination, is_elsewhere, stage
from ingot.artifacts.open import Source, open_source
from ingot.artifacts.remarks import UNREAD, remarks
from ingot.conversion.budget.search import budgeted
from ingot.conversion.encode_first import compute_weights, with_errors
from ingot.conversion.encoding import require_effect
from ingot.conversion.for_runtime import checked_plan, for_runtime, require_loadable
from ingot.conversion.model_folder import with_model_folder
from ingot.conversion.options import ConvertOptions
from ingot.conversion.packed_layers import repeated_scales, require_layers
from ingot.conversion.plan import ConvertPlan, PlanRequest, plan_conversion
from ingot.conversion.prepare_source import (
    Tied,
    groups_for,
    laid_over,
    untangle,
    view_for_target,
    view_weights,
    within,
    write_options,
)
from ingot.conversion.prepared import Prepared, config_change, for_source, refuse_same, with_config
from ingot.conversion.report import ConvertReport, SourceFacts, commands_for, equality, tensor_reports, unsaid
from ingot.conversion.rounding_view import outcomes_of, told, with_rotate_option
from ingot.conversion.tensor_parallel import (
    as_executed,
    folder_of,
    is_there,
    of_ranks,
    ranks_of,
    require_folder,
    require_packed,
    slice_for,
)
from ingot.core.options import takes
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.progress import Progress
from ingot.engine.execute import Executed, Target, execute
from ingot.engine.resources import Resources
from ingot.engine.steps import Repack
from ingot.formats.packed_folders.base import PACKING_FILES
from ingot.model import bytesource
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.packed_words import WordsLayout
from ingot.naming.config import CONFIG
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Patterns, Recipe
from ingot.stores.location import Location
from ingot.translate.completeness import require_complete
from ingot.translate.parallel import Rank
from ingot.views.regrouped import regroup

if TYPE_CHECKING:
    from ingot.cluster.driver.distribute import Cluster


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
        Nothing is left under the final name; with ``tp`` folders of ranks that are complete are.
    """
    started = time.perf_counter()
    is_elsewhere(options.engine, options.address)  # refused before anything is read
    options = for_runtime(options)
    options, budget = budgeted(options, _planned, convert, publish=True)
    ranks = ranks_of(options)
    reports = [_convert(options, rank) for rank in ranks]
    report = reports[0] if options.tp is None else of_ranks(reports, Location.parse(options.dst))
    if options.tp is None:
        require_loadable(options, report.destination)
    return replace(report, seconds=time.perf_counter() - started, budget=budget)


def _convert(options: ConvertOptions, rank: Rank | None) -> ConvertReport:
    with _prepare(within(_for_rank(options, rank)), rank) as prepared:
        require_layers(prepared.plan.steps, prepared.plan.format)
        planned, read = prepared.plan.in_bytes, prepared.read
        every, before = (1, 0) if rank is None else (rank.size, rank.rank)
        total, done = every * (planned + read), before * (planned + read) + read
        resources = Resources(options.max_ram, options.threads, Progress(total, options.progress, done=done))
        if rank is not None:
            require_folder(Location.parse(options.dst), rank.size)
        if rank is not None and options.resume and is_there(prepared.place, prepared.plan, prepared.checkpoint):
            facts = SourceFacts.from_source(prepared.source)
            return _report(prepared, as_executed(prepared.plan, prepared.place), facts)
        cluster = _cluster(prepared, options)
        return run(prepared, resources, overwrite=options.overwrite, resume=options.resume, cluster=cluster)


def _for_rank(options: ConvertOptions, rank: Rank | None) -> ConvertOptions:
    """Return the options with the folder of one rank as the destination."""
    return options if rank is None else replace(options, dst=folder_of(Location.parse(options.dst), rank))


def _cluster(prepared: Prepared, options: ConvertOptions) -> Cluster | None:
    """Return the workers of the steps; None if this process does them. Errors as ``plan_json``."""
    if not is_elsewhere(options.engine, options.address):
        return None
    from ingot.cluster.driver.distribute import Cluster
    from ingot.cluster.pool import pool_of
    from ingot.conversion.planfile import plan_json

    plan = plan_json(prepared, options)
    threads = options.threads or 1
    pool = partial(pool_of, options.engine, options.address, threads)
    return Cluster(pool, options.max_ram, threads, plan, "convert")


@takes(ConvertOptions, "convert")
def prepare(options: ConvertOptions) -> Prepared:
    """Open the source, view it as the options ask and plan the conversion; what ``--dry-run`` prints.

    Reads headers and samples. Pruning reads the feed-forward networks, and tells ``progress``. With ``tp`` it is the
    first rank's; all have the same shapes.
    """
    prepared = _planned(for_runtime(options))
    try:
        require_layers(prepared.plan.steps, prepared.plan.format)
    except BaseException:
        prepared.checkpoint.close()
        raise
    return prepared


def _planned(options: ConvertOptions) -> Prepared:
    """Return what ``prepare`` does, also of a folder in which nothing is packed: a budget begins with that."""
    options, budget = budgeted(options, _planned, convert, publish=False)
    rank = ranks_of(options)[0]
    prepared = _prepare(_for_rank(options, rank), rank)
    return replace(prepared, budget=budget)


def _prepare(options: ConvertOptions, rank: Rank | None) -> Prepared:
    place = destination(Location.parse(options.dst), options.format, options.container)
    recipe = options.recipe
    target = laid_over(place, options)
    if not (recipe is None or isinstance(recipe, Recipe)):
        recipe = load_recipe(recipe)
    recipe = with_rotate_option(recipe, options.rotate)
    options = replace(options, recipe=recipe)
    source = open_source(
        Location.parse(options.src),
        io=options.io,
        verify=options.verify,
        max_decompressed=options.max_decompressed,
        trust_index=options.trust_index,
    )
    close = source.close
    try:
        source, used = (
            (source, "") if options.keep_names else with_model_folder(source, target, options.max_decompressed)
        )
        close = source.close
        refuse_same(source, target)
        target = for_source(target, source)
        checkpoint = source.view()
        _require_weights(source, target, recipe, options)
        require_complete(source, checkpoint, Patterns(tuple(options.drop)))
        opened, tied = checkpoint, _tied(source, checkpoint, target)
        without = {**dropped(opened, options.drop), **tied.without}
        weights = view_weights(checkpoint, target, options, without)
        computed, rounding, encoding = compute_weights(weights.checkpoint, target.format, options)
        view = weights.then(lambda _: computed).then(partial(view_for_target, target=target, options=options))
        groups = groups_for(view.checkpoint, target.format)
        view = view.then(partial(regroup, groups=groups))
        checkpoint, close = view.checkpoint, view.checkpoint.close
        checkpoint = checkpoint if rank is None else slice_for(checkpoint, rank)
        written = write_options(options, target)
        request = PlanRequest(recipe, options.allow_requantize, written, options.threads, options.measure)
        plan = checked_plan(plan_conversion(checkpoint, target.format, request), options, target)
        names_read = [step.tensor.name for step in plan.steps]
        account = account_of_conversion(opened, checkpoint, names_read, plan.format, options.drop)
        account.require_complete(source.location)
        plan = with_config(plan, source, checkpoint, target, untie=tied.untie)
        plan = replace(plan, warnings=[*plan.warnings, *unused_patterns(options.drop, account)])
        if options.strict_recipe:
            require_effect(plan.warnings)
        behind = source.companions().note() if target.directory else ""
        if rank is not None:
            require_packed(plan, checkpoint, recipe)
        part = "" if rank is None else f"slices of rank {rank.rank} of {rank.size}; each rank has the same shapes"
        read = _read_narrower(plan)
        lost = unsaid(source, plan)
        shown = [message for rule, message in remarks(source) if rule != UNREAD]  # the account has those
        settings = note_on_config(source, directory=target.directory)
        packed = [*plan.notes, repeated_scales(plan.steps, groups)]
        told = [used, *account.notes(), *shown, settings, *view.notes, *packed, part, read, lost, tied.note, behind]
        notes = [note for note in told if note]
        return Prepared(
            source,
            checkpoint,
            plan,
            target,
            recipe,
            tied.untie,
            notes,
            view.bytes_read,
            frozenset(without),
            rounding,
            weights.checkpoint,
            inexact=view.inexact,
            account=account,
            runtime=options.runtime,
            encoding=encoding,
        )
    except BaseException:
        close()
        raise


def _read_narrower(plan: ConvertPlan) -> str:
    """Tell of numbers that are kept exactly, and that readers of the target round to the type of their scales."""
    if not plan.format.traits.config_keys:
        return ""
    counts: Counter[tuple[str, str]] = Counter()
    for step in plan.steps:
        layout = step.repack.layout if isinstance(step, Repack) else None
        if not isinstance(layout, AffineLayout | WordsLayout) or layout.scales not in ("f16", "bf16"):
            continue
        if layout.scales != step.spec.dtype:
            counts[step.spec.dtype, layout.scales] += 1
    return "; ".join(
        f"{count} repacked tensors keep their codes and scales; {plan.format.name} is read in {scales}, the type of "
        f"the scales, not in {dtype}: values are rounded to it once"
        for (dtype, scales), count in counts.items()
    )


def _tied(source: Source, checkpoint: Checkpoint, target: Destination) -> Tied:
    """Decide on a head beside tied embeddings, for formats whose readers take no such thing."""
    if not (target.format.traits.one_head and target.directory and source.is_folder):
        return Tied()
    return untangle(source.config(), checkpoint)


def _require_weights(source: Source, target: Destination, recipe: Recipe | None, options: ConvertOptions) -> None:
    """Refuse words that another program packed, unless they move as they are, beside the config.json that says so.

    Refuse adapters too, unless the target holds tensors of any names.
    """
    if target.format.name not in HOLDS_ANY:
        refuse_adapter(source)
    dialect = source.dialect()
    as_stored = (recipe is None or all(rule.choice is None for rule in recipe.rules)) and options.prune is None
    travels = target.directory and source.is_folder and not target.format.traits.config_keys
    if dialect is not None and not (as_stored and travels):
        raise dialect.refusal()


def run(
    prepared: Prepared, resources: Resources, *, overwrite: bool, resume: bool, cluster: Cluster | None = None
) -> ConvertReport:
    """Execute a prepared conversion, by a ``cluster`` or here, and tell what it did; errors as ``convert``."""
    place = prepared.place
    facts = SourceFacts.from_source(prepared.source)
    names = prepared.checkpoint.companions if place.directory else ()
    with stage(place, overwrite=overwrite, resume=resume, names=names) as staging:
        target = Target(staging, place.name, partial(_companions, prepared))
        inputs = (prepared.checkpoint,)
        if cluster is None:
            return _report(prepared, execute(prepared.plan, inputs, target, resources), facts)
        from ingot.cluster.driver.distribute import distribute

        return _report(prepared, distribute(prepared.plan, inputs, target, resources, cluster), facts)


def _companions(prepared: Prepared, target: bytesource.Target, written: Sequence[str]) -> list[str]:
    """Copy the companions; what the writer made under the name of one stands, with what it took of ``config.json``."""
    if not prepared.place.directory:
        return []
    change = config_change(prepared.source, prepared.plan, untie=prepared.untie)
    every = _true_companions(prepared.source, prepared.checkpoint)
    left = {name: path for name, path in every.items() if name not in written}
    copied = copy_companions(left, target, change)
    return [name for name in every if name in copied or name == CONFIG]


def _true_companions(source: Source, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the companions without files that describe how a folder was packed, if it is packed otherwise now."""
    if not source.format.traits.config_keys:
        return checkpoint.companions
    return {name: path for name, path in checkpoint.companions.items() if name not in PACKING_FILES}


def _report(prepared: Prepared, executed: Executed, facts: SourceFacts) -> ConvertReport:
    plan = prepared.plan
    with gc_paused():  # many small objects, none of them garbage
        tensors = tensor_reports(executed.done, lambda step: equality(step.planned, plan.format, prepared.inexact))
    return ConvertReport(
        source=facts.location,
        destination=prepared.place.display,
        format=plan.format.name,
        recipe=plan.recipe,
        tensors=with_errors(tensors, prepared.encoding),
        source_nbytes=facts.nbytes,
        source_size=facts.size,
        size=executed.size,
        seconds=0.0,
        files=executed.files,
        companions=executed.companions,
        resumed=executed.resumed,
        notes=[*prepared.notes, *told(prepared.rounding)],
        warnings=plan.warnings,
        commands=commands_for(prepared.place, plan, executed, facts, prepared.runtime),
        rounded=outcomes_of(prepared.rounding),
        superseded=prepared.account.superseded,
        dropped=prepared.account.dropped,
    )
