"""What a recipe folds into a model before its matrices are rounded: rotations, and scales of channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.ops.folding.fold import changed_names
from ingot.ops.folding.graph import Graph, graph_of
from ingot.ops.folding.rotate import Rotated, rotated
from ingot.ops.folding.scale import ScaleFolding, Searched, scaled, scales
from ingot.ops.folding.statistics import FoldedStatistics
from ingot.ops.views.rounded import Known
from ingot.quantizers.choice import QuantizerSpec
from ingot.quantizers.tensor import StatisticsSource
from ingot.recipes.recipe import Recipe, Rotate


@dataclass(frozen=True, slots=True)
class Turned:
    """A checkpoint as a recipe turns it, in the element types that it had; itself where it does not."""

    checkpoint: Checkpoint
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Folds:
    """A checkpoint with everything folded in, in f32 where it is to be rounded, and its statistics.

    ``told`` returns lines on the scales once matrices were read; ``dtypes`` are what tensors' element types were.
    """

    checkpoint: Checkpoint
    known: Known
    dtypes: Mapping[str, str]
    told: Callable[[], Sequence[str]] | None = None


def turned_first(recipe: Recipe | None, rotate: str | None) -> Recipe | None:
    """Return a recipe, or none but that, which turns the model first; ``UsageError`` ``recipe.rotate``: twice."""
    if rotate is None:
        return recipe
    if recipe is not None and recipe.rotate is not None:
        raise UsageError(
            f"expected one of --rotate and the table [rotate], found both in {recipe.name}", rule="recipe.rotate"
        )
    return replace(recipe or Recipe("rotate", ()), rotate=Rotate.of(rotate))


def turned(view: Checkpoint, recipe: Recipe | None) -> Turned:
    """Return the checkpoint as a recipe turns it; raises what ``rotate`` raises."""
    if recipe is None or recipe.rotate is None:
        return Turned(view)
    graph = graph_of(view)
    found = _rotated(view, recipe.rotate, graph, _stated(view, graph))
    return Turned(found.checkpoint, found.notes)


def folded(
    view: Checkpoint,
    recipe: Recipe,
    choices: Mapping[str, QuantizerSpec],
    known: Callable[[], StatisticsSource],
    said: str,
) -> Folds:
    """Return a checkpoint with all folded in that a recipe asks for.

    Parameters
    ----------
    view : Checkpoint
        As it was opened.
    recipe : Recipe
    choices : mapping of name to QuantizerSpec
        What is rounded, under the names of the turned checkpoint.
    known : callable
        Returns the statistics of ``view``.
    said : str
        What tells them from others.
    """
    grids = {name: each.grid for name, each in choices.items() if each.scaled}
    if recipe.rotate is None and not grids:
        return Folds(view, known, {})
    graph = graph_of(view)
    stated = _stated(view, graph)
    dtypes = {name: "f32" if name in choices else dtype for name, dtype in stated.items()}
    knowing = known
    if recipe.rotate is not None:
        # What scales are folded into afterwards is not rounded in between.
        between = set(changed_names(graph, lambda stream: scales(graph, grids, stream)))
        whole = {name: "f32" if name in between else dtype for name, dtype in dtypes.items()}
        first = _rotated(view, recipe.rotate, graph, whole)
        view, knowing = first.checkpoint, _through(known, first)
    if not grids:
        return Folds(view, knowing, stated)
    folding = ScaleFolding(view, graph, grids, knowing, dtypes)
    return Folds(
        scaled(folding, said), lambda: FoldedStatistics(knowing(), folding), stated, partial(_told, folding.searched)
    )


def _told(searched: Searched) -> Sequence[str]:
    gains = list(searched.gains.values())
    if not gains:
        return []
    moved, mean = sum(gain < 1 for gain in gains), sum(gains) / len(gains)
    done = f"{moved} of {len(gains)} groups of matrices got scales for their channels, folded into what comes before"
    return [f"{done}; they leave {mean:.1%} of the error of nearest rounding on average"]


def _rotated(view: Checkpoint, asked: Rotate, graph: Graph, dtypes: Mapping[str, str]) -> Rotated:
    return rotated(view, graph, (asked.r1, asked.r2, asked.seed), dtypes)


def _through(known: Callable[[], StatisticsSource], first: Rotated) -> Known:
    return lambda: FoldedStatistics(known(), first.folding)


def _stated(view: Checkpoint, graph: Graph) -> dict[str, str]:
    names = [*graph.sites, graph.head]
    return {name: view[name if name in view else graph.embedding].dtype for name in names}
