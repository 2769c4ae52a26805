"""Conversion of a checkpoint tensor by tensor in bounded memory; it can be resumed, and only publishes complete
results.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ingot.adapters.view import with_adapters
from ingot.artifacts.account import account_of_conversion, dropped_omissions, unused_patterns
from ingot.artifacts.adapter_files import HOLDS_ANY, note_on_config, refuse_adapter
from ingot.artifacts.companions import companion_config, copy_companions
from ingot.artifacts.destination import CPU, Destination, destination, is_distributed, stage
from ingot.artifacts.open import Source, open_source
from ingot.artifacts.remarks import UNREAD, remarks
from ingot.conversion.block_types import type_notes, with_model_rules
from ingot.conversion.budget.report import BudgetReport
from ingot.conversion.budget.search import resolve_budget
from ingot.conversion.encoding import require_all_used
from ingot.conversion.estimate import Estimate, estimate_rounding
from ingot.conversion.for_runtime import for_runtime, require_accepted, require_held, require_loadable
from ingot.conversion.merging.view import merged_models
from ingot.conversion.model_folder import with_model_folder
from ingot.conversion.modelfile import require_free, write_modelfile
from ingot.conversion.options import ConvertOptions
from ingot.conversion.packed_layers import repeated_scales, require_layers
from ingot.conversion.plan import ConvertPlan, PlanRequest, plan_conversion
from ingot.conversion.prepare_source import (
    TiedHead,
    accepted_defects,
    groups_for,
    omitted_parts,
    resolve_tied_head,
    view_for_target,
    view_weights,
    with_new_names,
    with_overlay_base,
    with_thread_limit,
    write_options,
)
from ingot.conversion.prepared import Prepared, config_change, for_source, refuse_same, with_activations, with_config
from ingot.conversion.report import (
    ConvertReport,
    SourceFacts,
    commands_for,
    dropped_settings_note,
    exactness,
    tensor_reports,
)
from ingot.conversion.round_by_layers import round_by_layers
from ingot.conversion.rounding_view import (
    outcomes_of,
    requested_calibration,
    round_weights,
    rounding_notes,
    with_rotate_option,
)
from ingot.conversion.tensor_parallel import (
    existing_results,
    is_complete,
    merge_rank_reports,
    rank_folder,
    ranks_of,
    require_folder,
    require_packed,
    slice_for,
)
from ingot.core.files.atomic import Staging
from ingot.core.options import takes
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.progress import Progress
from ingot.engine.execute import Executed, Target, execute
from ingot.engine.resources import Resources
from ingot.engine.steps import Repack
from ingot.formats.base import Format
from ingot.formats.packed_folders.base import PACKING_FILES
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model import bytesource
from ingot.model.account import Omission
from ingot.model.calibration import Calibration
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.reading.view import View
from ingot.naming.config import CONFIG
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location
from ingot.translate.companions import RULE
from ingot.translate.completeness import require_complete
from ingot.translate.mlx_families import require_packable
from ingot.translate.parallel import Rank
from ingot.views.regroup import regroup
from ingot.views.rounded_view import Rounding

if TYPE_CHECKING:
    from ingot.cluster.driver.distribute import Cluster


@takes(ConvertOptions, "convert")
def convert(options: ConvertOptions) -> ConvertReport:
    """Convert a checkpoint into another container, by a recipe or unchanged.

    Without a recipe every tensor keeps its storage. If the target accepts its codes only in another layout they are
    repacked, and tensors whose codec the target does not support are decoded. With ``resume`` the output has the same
    bytes as that of an uninterrupted run.

    Returns
    -------
    ConvertReport

    Raises
    ------
    UsageError, UnsupportedError, CodecError, FormatError, IntegrityError, ResourceError
        Nothing is written under the final name; with ``tp``, the folders of finished ranks remain.

    Examples
    --------
    >>> report = ingot.convert("model", "small.zt", recipe="int8")
    >>> report.actions, round(report.bits_per_weight, 2)
    ({'moved': 11, 'encoded': 28}, 9.76)
    """
    started = time.perf_counter()
    is_distributed(options.engine, options.address)  # raises an error for an invalid engine before anything is read
    profile = None if options.runtime is None else runtime_named(options.runtime)
    if profile is not None:
        options = for_runtime(options, profile)
        require_free(profile, Location.parse(options.dst), overwrite=options.overwrite)
    options, budget = _with_searched_recipe(options, publish=True)
    ranks = [None] if options.tp is None else ranks_of(options)
    reports = [_convert(options, rank) for rank in ranks]
    report = reports[0] if options.tp is None else merge_rank_reports(reports, Location.parse(options.dst))
    if options.tp is None and profile is not None:
        require_loadable(profile, report.destination)
        write_modelfile(profile, report.destination, Location.parse(options.src))
    return replace(report, seconds=time.perf_counter() - started, budget=budget)


def _convert(options: ConvertOptions, rank: Rank | None) -> ConvertReport:
    """Convert into one artifact, or into the folder of one rank."""
    with _prepare(with_thread_limit(_for_rank(options, rank)), rank) as prepared:
        require_layers(prepared.plan.steps, prepared.plan.format)
        read = prepared.bytes_read
        rank_bytes = prepared.plan.in_bytes + read
        rank_count, finished = (1, 0) if rank is None else (rank.size, rank.rank)
        progress = Progress(rank_count * rank_bytes, options.progress, processed=finished * rank_bytes + read)
        resources = Resources(options.max_ram, options.threads, progress)
        if rank is not None:
            require_folder(Location.parse(options.dst), rank.size)
        if rank is not None and options.resume and is_complete(prepared.target, prepared.plan, prepared.checkpoint):
            facts = SourceFacts.from_source(prepared.source)
            return _report(prepared, existing_results(prepared.plan, prepared.target), facts)
        cluster = _cluster(prepared, options)
        begin = partial(_round_by_layers, prepared, options) if cluster is None else None
        return run(
            prepared, resources, overwrite=options.overwrite, resume=options.resume, cluster=cluster, begin=begin
        )


def _for_rank(options: ConvertOptions, rank: Rank | None) -> ConvertOptions:
    """Return the options with the folder of one rank as the destination."""
    return options if rank is None else replace(options, dst=rank_folder(Location.parse(options.dst), rank))


def _cluster(prepared: Prepared, options: ConvertOptions) -> Cluster | None:
    """Return the workers that execute the steps; None if this process does. Raises the errors of ``plan_json``."""
    if not is_distributed(options.engine, options.address):
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
    """Open the source, apply the views of the options and plan the conversion, without converting (``--dry-run``).

    Reads headers and samples. Pruning reads the feed-forward networks and reports to ``progress``. With ``tp`` the plan
    is the plan of the first rank; all ranks have the same shapes.
    """
    if options.runtime is not None:
        options = for_runtime(options, runtime_named(options.runtime))
    prepared = _plan_for_budget(options)
    try:
        require_layers(prepared.plan.steps, prepared.plan.format)
    except BaseException:
        prepared.checkpoint.close()
        raise
    return prepared


def _plan_for_budget(options: ConvertOptions) -> Prepared:
    """Plan like ``prepare``, but allow a plan without packed layers, from which the search of a budget starts."""
    options, budget = _with_searched_recipe(options, publish=False)
    rank = None if options.tp is None else ranks_of(options)[0]
    prepared = _prepare(_for_rank(options, rank), rank)
    return replace(prepared, budget=budget)


def _with_searched_recipe(options: ConvertOptions, *, publish: bool) -> tuple[ConvertOptions, BudgetReport | None]:
    """Return the result of ``resolve_budget``; the options and None if no option of a budget is set."""
    values = options.target_size, options.target_bpw, options.max_kl, options.text, options.sequences
    if all(value is None for value in values) and not (options.types or options.recipe_out or options.check_kl):
        return options, None
    return resolve_budget(options, _plan_for_budget, convert, publish=publish)


def _prepare(options: ConvertOptions, rank: Rank | None) -> Prepared:
    target = with_overlay_base(destination(Location.parse(options.dst), options.format, options.container), options)
    recipe = _requested_recipe(options)
    source = open_source(
        Location.parse(options.src),
        io=options.io,
        verify=options.verify,
        max_decompressed=options.max_decompressed,
        trust_index=options.trust_index,
    )
    close = source.close
    try:
        folder_note = ""
        if not options.keep_names:
            source, folder_note = with_model_folder(source, target, options.max_decompressed)
        close = source.close
        refuse_same(source, target)
        target = with_activations(for_source(target, source), None if recipe is None else recipe.activations)
        checkpoint = source.view()
        recipe = with_model_rules(recipe, with_new_names(checkpoint, options), source.config())
        options = replace(options, recipe=recipe)
        opened = _with_changes(source, checkpoint, options)
        close = opened.close
        _require_weights(source, target, recipe, options)
        named = with_new_names(opened, options)
        require_complete(source, named, accepted_defects(options))
        tied, heads = _tied_head(source, named, target)
        without = {**dropped_omissions(opened, options.drop), **omitted_parts(opened, target, options), **heads}
        weights = view_weights(opened, target, options, without)
        rounded, rounding = _rounded(weights.checkpoint, recipe, options, target.format)
        view = weights.then(lambda _: rounded).then(partial(view_for_target, target=target, options=options))
        groups = groups_for(view.checkpoint, target.format, one_group=_is_rounded_by_preset(rounding, recipe))
        view = view.then(partial(regroup, groups=groups)) if groups else view
        checkpoint = view.checkpoint
        close = checkpoint.close
        checkpoint = checkpoint if rank is None else slice_for(checkpoint, rank)
        written = write_options(options, target)
        request = PlanRequest(recipe, options.allow_requantize, written, options.threads, options.measure)
        plan = plan_conversion(checkpoint, target.format, request)
        if options.runtime is not None:
            require_accepted(runtime_named(options.runtime), plan, recipe, target)
        names_read = [step.tensor.name for step in plan.steps]
        _require_packable_for_mlx(plan, checkpoint, target, options)
        account = account_of_conversion(opened, checkpoint, names_read, plan.format, options.drop)
        account.require_complete(source.location)
        plan = with_config(plan, source, checkpoint, target, untie=tied.untie)
        plan = replace(plan, warnings=[*plan.warnings, *unused_patterns(options.drop, account)])
        if options.strict_recipe:
            require_all_used(plan.warnings)
        if rank is not None:
            require_packed(plan, checkpoint, recipe)
        notes = [
            folder_note,
            *account.notes(),
            *(message for rule, message in remarks(source) if rule != UNREAD),  # the account already has notes on these
            note_on_config(source, directory=target.directory),
            *view.notes,
            *plan.notes,
            repeated_scales(plan.steps, groups),
            *type_notes(plan.steps, target.format, recipe),
            "" if rank is None else f"slices of rank {rank.rank} of {rank.size}; each rank has the same shapes",
            _narrower_dtype_note(plan),
            dropped_settings_note(source, plan),
            tied.note,
            source.companions().note() if target.directory else "",
        ]
        return Prepared(
            source,
            checkpoint,
            plan,
            target,
            recipe,
            tied.untie,
            [note for note in notes if note],
            view.bytes_read,
            frozenset(without),
            rounding,
            weights.checkpoint,
            None if rounding is None else rounded.checkpoint,
            inexact=view.inexact,
            account=account,
            runtime=options.runtime,
        )
    except BaseException:
        close()
        raise


def _requested_recipe(options: ConvertOptions) -> Recipe | None:
    """Return the recipe of the options, with the rotations of ``--rotate``."""
    recipe = options.recipe
    if not (recipe is None or isinstance(recipe, Recipe)):
        recipe = load_recipe(recipe)
    return recipe if options.rotate is None else with_rotate_option(recipe, options.rotate)


def _rounded(
    weights: Checkpoint, recipe: Recipe | None, options: ConvertOptions, format: Format
) -> tuple[View, Rounding | None]:
    """Return the view that rounds matrices, and the state of the rounding.

    If no option requires rounding, return a view of the unchanged weights, and None.
    """
    if recipe is not None and recipe.general and recipe.has_quantizer:
        require_held(format, recipe)
    changes = recipe is not None and (recipe.has_quantizer or recipe.rotate is not None)
    if not changes and options.calibration is None and options.device == CPU:
        return View(weights), None
    return round_weights(weights, recipe, options, f16_scales=format.traits.f16_scales)


def _require_packable_for_mlx(
    plan: ConvertPlan, checkpoint: Checkpoint, target: Destination, options: ConvertOptions
) -> None:
    """Raise ``UnsupportedError`` ``architecture.unknown`` if the plan packs a tensor that mlx_lm needs dense."""
    if target.format.name != MlxFormat.name or not target.directory or options.keep_names:
        return
    packed = {step.spec.name for step in plan.steps if step.spec.codec in plan.format.traits.packed_codecs}
    require_packable(companion_config(checkpoint.companions, RULE), packed, checkpoint.location)


def _with_changes(source: Source, checkpoint: Checkpoint, options: ConvertOptions) -> Checkpoint:
    """Return the checkpoint with the changes of the options' adapters, or merged with the options' models.

    Changed tensors are f32. If the recipe rotates the model, they have the base's dtype, because only one view of a
    conversion may return values in f32.
    """
    if not options.adapters and options.models is None:
        return checkpoint
    refuse_adapter(source)
    rotates = isinstance(options.recipe, Recipe) and options.recipe.rotate is not None
    if options.models is not None:
        return merged_models(checkpoint, options.models, exact=not rotates)
    return with_adapters(checkpoint, options.adapters, exact=not rotates)


def _is_rounded_by_preset(rounding: Rounding | None, recipe: Recipe | None) -> bool:
    return rounding is not None and recipe is not None and recipe.general


def _narrower_dtype_note(plan: ConvertPlan) -> str:
    """Return a note on exactly repacked tensors that runtimes of the target compute in another dtype than the source's.

    The other dtype is the dtype of the scales. The note is empty if there are no such tensors.
    """
    if not plan.format.traits.config_keys:
        return ""
    counts: Counter[tuple[str, str]] = Counter()
    for step in plan.steps:
        layout = step.repack.layout if isinstance(step, Repack) else None
        if not isinstance(layout, AffineLayout | PackedIntLayout) or layout.scales not in ("f16", "bf16"):
            continue
        if layout.scales != step.spec.dtype:
            counts[step.spec.dtype, layout.scales] += 1
    return "; ".join(
        f"{count} repacked tensors keep their codes and scales; {plan.format.name} is read in {scales}, the type of "
        f"the scales, not in {dtype}: values are rounded to it once"
        for (dtype, scales), count in counts.items()
    )


def _tied_head(source: Source, named: Checkpoint, target: Destination) -> tuple[TiedHead, dict[str, Omission]]:
    """Return how to treat a stored tied head, and the omissions that this causes.

    Only formats whose readers refuse a tied head need this; for other formats, the head is stored unchanged.

    ``named`` has the names after the option ``rename``; the omissions have the names of the source.
    """
    if not (target.format.traits.one_head and target.directory and source.is_folder):
        return TiedHead(), {}
    tied = resolve_tied_head(source.config(), named)
    return tied, {origin: reason for name, reason in tied.without.items() for origin in named.origins_of(name)}


def _require_weights(source: Source, target: Destination, recipe: Recipe | None, options: ConvertOptions) -> None:
    """Raise an error for weights that another program packed and Ingot cannot decode, and for adapters.

    Packed weights are allowed if they are moved unchanged together with the config.json that declares them. Adapters
    are allowed if the target accepts tensors of any name.
    """
    if target.format.name not in HOLDS_ANY:
        refuse_adapter(source)
    packer = source.packer()
    keeps_all = recipe is None or (recipe.mixture is None and all(rule.choice is None for rule in recipe.rules))
    as_stored = keeps_all and options.prune is None
    travels = target.directory and source.is_folder and not target.format.traits.config_keys
    if packer is not None and not (as_stored and travels):
        raise packer.refusal()


def run(
    prepared: Prepared,
    resources: Resources,
    *,
    overwrite: bool,
    resume: bool,
    cluster: Cluster | None = None,
    begin: Callable[[Staging], None] | None = None,
) -> ConvertReport:
    """Execute a prepared conversion on a ``cluster`` or in this process; return its report.

    ``begin`` is called with the staging folder before the first step. Raises the errors of ``convert``.
    """
    facts = SourceFacts.from_source(prepared.source)
    names = prepared.checkpoint.companions if prepared.target.directory else ()
    with stage(prepared.target, overwrite=overwrite, resume=resume, names=names) as staging:
        target = Target(staging, prepared.target.name, partial(_copy_companions, prepared))
        inputs = (prepared.checkpoint,)
        if begin is not None:
            begin(staging)
        if cluster is None:
            return _report(prepared, execute(prepared.plan, inputs, target, resources), facts)
        from ingot.cluster.driver.distribute import distribute

        return _report(prepared, distribute(prepared.plan, inputs, target, resources, cluster), facts)


def _round_by_layers(prepared: Prepared, options: ConvertOptions, staging: Staging) -> None:
    """Calibrate the model and round it layer by layer, if planned matrices need statistics that do not exist yet."""
    rounding = prepared.rounding
    if rounding is None or rounding.replace_statistics is None or prepared.rounded is None:
        return
    calibration = requested_calibration(options)
    if options.announce is not None and prepared.recipe is not None:
        options.announce(_estimate(prepared.source.view(), prepared.recipe, calibration, options.threads))
    round_by_layers(
        prepared.rounded,
        rounding,
        calibration,
        staging.scratch,
        resume=options.resume,
        max_ram=options.max_ram,
        threads=options.threads,
    )


def _estimate(model: Checkpoint, recipe: Recipe, calibration: Calibration, threads: int | None) -> Estimate:
    """Return the estimated time and memory of calibrating and rounding a model."""
    seconds, memory = estimate_rounding(model, recipe, threads)
    plan = calibration.plan()
    if plan is None:
        return Estimate("", 0.0, seconds, memory)
    return Estimate("", plan.seconds, seconds, max(plan.memory, memory), plan.disk)


def _copy_companions(prepared: Prepared, target: bytesource.Target, written: Sequence[str]) -> list[str]:
    """Copy the companions, except for files that the format's writer has already written; return their names."""
    if not prepared.target.directory:
        return []
    change = config_change(prepared.source, prepared.plan, untie=prepared.untie)
    companions = _valid_companions(prepared.source, prepared.checkpoint)
    remaining = {name: path for name, path in companions.items() if name not in written}
    copied = copy_companions(remaining, target, change)
    return [name for name in companions if name in copied or name == CONFIG]


def _valid_companions(source: Source, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the companions without files that describe the packing of a packed source."""
    if not source.format.traits.config_keys:
        return checkpoint.companions
    return {name: path for name, path in checkpoint.companions.items() if name not in PACKING_FILES}


def _report(prepared: Prepared, executed: Executed, facts: SourceFacts) -> ConvertReport:
    plan = prepared.plan
    rounding = prepared.rounding
    with gc_paused():  # many small objects are created, and none of them is garbage
        tensors = tensor_reports(
            executed.completed, lambda step: exactness(step.planned, plan.format, prepared.inexact)
        )
    return ConvertReport(
        source=facts.location,
        destination=prepared.target.display,
        format=plan.format.name,
        recipe=plan.recipe,
        tensors=tensors,
        source_nbytes=facts.nbytes,
        source_size=facts.size,
        size=executed.size,
        seconds=0.0,
        files=executed.files,
        companions=executed.companions,
        resumed=executed.resumed,
        notes=prepared.notes if rounding is None else [*prepared.notes, *rounding_notes(rounding)],
        warnings=plan.warnings,
        commands=commands_for(prepared.target, plan, executed, facts, prepared.runtime),
        rounded=() if rounding is None else outcomes_of(rounding),
        superseded=prepared.account.superseded,
        dropped=prepared.account.dropped,
    )
