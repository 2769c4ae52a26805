"""A conversion into the slices of several ranks: a folder each, which appear one after the other."""

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
from ingot.translate.parallel import KEY, MOST, Rank, sliced

_RANK = re.compile(r"rank([0-9]{1,6})")


def ranks_of(options: ConvertOptions) -> Sequence[Rank | None]:
    """Return the ranks that are asked for; one None without. Raises ``UsageError`` ``parallel.size``."""
    if options.tp is None:
        return [None]
    if type(options.tp) is not int or not 1 <= options.tp <= MOST:
        raise UsageError(f"expected 1 to {MOST} ranks (tp), found {options.tp!r}", rule="parallel.size")
    place = destination(Location.parse(options.dst), options.format, options.container)
    if not place.directory or has_model_metadata(place.format.name):
        raise UsageError(
            f"expected a folder of model folders to write slices for several ranks (tp) to, found a destination of "
            f"format {place.format.name}; leave out the suffix, or take --format safetensors",
            rule="parallel.size",
            where=place.display,
        )
    return [Rank(rank, options.tp) for rank in range(options.tp)]


def folder_of(dst: Location, rank: Rank) -> Location:
    """Return the folder of one rank."""
    return dst.child(f"rank{rank.rank}")


def require_folder(dst: Location, size: int) -> None:
    """Create the folder that contains the folders of the ranks.

    Raises ``UsageError`` ``target.exists`` if it contains slices for more ranks.
    """
    dst.make_folder()
    more = [name for name in dst.store().list().folders if (found := _RANK.fullmatch(name)) and int(found[1]) >= size]
    if more:
        raise UsageError(
            f"expected no slices of other ranks than 0 to {size - 1}, found {', '.join(sorted(more)[:4])}; remove them",
            rule="target.exists",
            where=dst.display,
        )


def slice_for(checkpoint: Checkpoint, rank: Rank) -> Checkpoint:
    """Return a rank's slice with each tensor made: what cannot be cut is refused before anything is written.

    Errors as ``sliced``.
    """
    view = sliced(checkpoint, rank)
    for name in view:
        view[name]
    return view


def require_packed(plan: ConvertPlan, source: Checkpoint, recipe: Recipe | None) -> None:
    """Refuse slices that their own format would have to decode: ``UnsupportedError`` ``parallel.cut``."""
    cut = [step.spec.name for step in plan.steps if step.action == DECODED]
    if recipe is None and cut and source.format == plan.format.name:
        raise UnsupportedError(
            f"expected slices that {plan.format.name} has packed, found {len(cut)} whose rows or columns are no whole "
            "words; take fewer ranks (--tp), or another format, such as zt",
            rule="parallel.cut",
            where=cut[0],
        )


def is_there(place: Destination, plan: ConvertPlan, checkpoint: Checkpoint) -> bool:
    """Whether a rank's folder is complete from an earlier run: the tensors that are planned, value by value equal.

    What a recipe rounds never is: only encoding it again would tell.
    """
    try:
        found = open_source(place.location).view()
    except UsageError:
        return False
    with closing(found):
        stated = found.metadata.get(KEY)
        same = stated == checkpoint.metadata[KEY] and set(found) == set(checkpoint)
        same = same and all(found[step.spec.name].codec == step.spec.codec for step in plan.steps)
        return same and all(_equal(found[name], checkpoint[name]) for name in checkpoint)


def _equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and np.array_equal(
        one.numpy().reshape(-1).view(np.uint8), other.numpy().reshape(-1).view(np.uint8)
    )


def as_executed(plan: ConvertPlan, place: Destination) -> Executed:
    """Return what a rank's folder that is there already would have been told of."""
    done = [CompletedStep(step, step.out_bytes, ErrorStats(), {}) for step in plan.steps]
    return Executed(done, [place.name], [], plan.size, len(done))


def of_ranks(reports: Sequence[ConvertReport], dst: Location) -> ConvertReport:
    """Return one report of all ranks, with names of tensors and files as seen from the folder around them."""
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
        commands=(),  # who loads slices is told by a program of its own
    )
