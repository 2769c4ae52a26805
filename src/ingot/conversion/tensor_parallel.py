"""Conversion into slices for the ranks of tensor parallelism: one folder per rank, written one after another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.destination import Destination, destination
from ingot.artifacts.open import open_source
from ingot.conversion.options import ConvertOptions
from ingot.conversion.plan import ConvertPlan
from ingot.conversion.report import ConvertReport
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.execute import Executed
from ingot.engine.steps import DECODED
from ingot.engine.work import CompletedStep
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Tensor
from ingot.recipes.recipe import Recipe
from ingot.stores.location import Location
from ingot.translate.parallel import KEY, MAX_RANKS, Rank, slice_for_rank

_RANK = re.compile(r"rank([0-9]{1,6})")


def ranks_of(options: ConvertOptions) -> Sequence[Rank]:
    """Return the ranks of the option ``tp``, which must be set. Raises ``UsageError`` ``parallel.size``."""
    if type(options.tp) is not int or not 1 <= options.tp <= MAX_RANKS:
        raise UsageError(f"expected 1 to {MAX_RANKS} ranks (tp), found {options.tp!r}", rule="parallel.size")
    target = destination(Location.parse(options.dst), options.format, options.container)
    if not target.directory or has_model_metadata(target.format.name):
        raise UsageError(
            f"expected a folder of model folders to write slices for several ranks (tp) to, found a destination of "
            f"format {target.format.name}; leave out the suffix, or take --format safetensors",
            rule="parallel.size",
            where=target.display,
        )
    return [Rank(rank, options.tp) for rank in range(options.tp)]


def rank_folder(dst: Location, rank: Rank) -> Location:
    """Return the folder of one rank."""
    return dst.child(f"rank{rank.rank}")


def require_folder(dst: Location, size: int) -> None:
    """Create the folder that will contain one folder per rank.

    Raises ``UsageError`` ``target.exists`` if it already contains slices of further ranks.
    """
    dst.make_folder()
    folders = dst.store().list().folders
    extra = [name for name in folders if (match := _RANK.fullmatch(name)) and int(match[1]) >= size]
    if extra:
        raise UsageError(
            f"expected no slices of other ranks than 0 to {size - 1}, found {', '.join(sorted(extra)[:4])}; remove "
            "them",
            rule="target.exists",
            where=dst.display,
        )


def slice_for(checkpoint: Checkpoint, rank: Rank) -> Checkpoint:
    """Return a rank's slice of a checkpoint.

    Every tensor is built once, so that errors are raised before anything is written. Raises the errors of
    ``slice_for_rank``.
    """
    view = slice_for_rank(checkpoint, rank)
    for name in view:
        view[name]
    return view


def require_packed(plan: ConvertPlan, source: Checkpoint, recipe: Recipe | None) -> None:
    """Raise ``parallel.cut`` if slices of packed tensors cannot stay packed in the source's format."""
    decoded = [step.spec.name for step in plan.steps if step.action == DECODED]
    if recipe is None and decoded and source.format == plan.format.name:
        raise UnsupportedError(
            f"{len(decoded)} slices cannot stay packed in {plan.format.name}, because their rows or columns do not "
            "fill its packed integers; take fewer ranks (--tp), or another format, such as zt",
            rule="parallel.cut",
            where=decoded[0],
        )


def is_complete(target: Destination, plan: ConvertPlan, checkpoint: Checkpoint) -> bool:
    """Return whether an earlier run has completed a rank's folder: it has the planned tensors with equal values.

    The result is also False if a recipe rounds a tensor: its values could be compared only by encoding them again.
    """
    try:
        existing = open_source(target.location).view()
    except UsageError:
        return False
    with closing(existing):
        same = existing.metadata.get(KEY) == checkpoint.metadata[KEY] and set(existing) == set(checkpoint)
        same = same and all(existing[step.spec.name].codec == step.spec.codec for step in plan.steps)
        return same and all(_equal(existing[name], checkpoint[name]) for name in checkpoint)


def _equal(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and np.array_equal(
        a.numpy().reshape(-1).view(np.uint8), b.numpy().reshape(-1).view(np.uint8)
    )


def existing_results(plan: ConvertPlan, target: Destination) -> Executed:
    """Return the results of a rank's folder that an earlier run has completed; all steps count as resumed."""
    completed = [CompletedStep(step, step.out_bytes, ErrorStats(), {}) for step in plan.steps]
    return Executed(completed, [target.name], [], plan.size, len(completed))


def merge_rank_reports(reports: Sequence[ConvertReport], dst: Location) -> ConvertReport:
    """Return one report for all ranks; names of tensors and files are prefixed with the rank's folder."""
    first = reports[0]
    names = [f"rank{rank}/" for rank in range(len(reports))]
    pairs = list(zip(names, reports, strict=True))
    return replace(
        first,
        destination=dst.display,
        tensors=[replace(item, name=name + item.name) for name, report in pairs for item in report.tensors],
        size=sum(report.size for report in reports),
        files=[name + file for name, report in pairs for file in report.files],
        companions=[name + file for name, report in pairs for file in report.companions],
        resumed=sum(report.resumed for report in reports),
        commands=(),  # no single command loads slices; this takes a distributed program
    )
