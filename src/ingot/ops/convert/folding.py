"""Rotations and channel scales that a recipe folds into a model before its matrices are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.view import View
from ingot.ops.folding.fold import Folding, changed_names
from ingot.ops.folding.graph import Graph, graph_of
from ingot.ops.folding.rotate import rotated
from ingot.ops.folding.scale import ScaleFolding, Searched, scaled, scales
from ingot.ops.folding.statistics import FoldedStatistics
from ingot.ops.views.rounded import Known, Rounding
from ingot.recipes.recipe import Recipe, Rotate


def with_rotate_option(recipe: Recipe | None, rotate: str | None) -> Recipe | None:
    """Return the recipe with the rotations of ``--rotate``; the recipe itself if the option is not set.

    Raises ``UsageError`` ``recipe.rotate`` if the recipe has a table ``[rotate]`` too.
    """
    if rotate is None:
        return recipe
    if recipe is not None and recipe.rotate is not None:
        raise UsageError(
            f"expected one of --rotate and the table [rotate], found both in {recipe.name}", rule="recipe.rotate"
        )
    return replace(recipe or Recipe("rotate", ()), rotate=Rotate.of(rotate))


def rotate_by_recipe(checkpoint: Checkpoint, recipe: Recipe | None) -> View:
    """Return the model rotated as the recipe requires, in its own element types; raises the errors of ``rotate``."""
    if recipe is None or recipe.rotate is None:
        return View(checkpoint)
    graph = graph_of(checkpoint)
    return rotated(checkpoint, graph, _options(recipe.rotate), _dtypes_of(checkpoint, graph))[0]


def fold_model(checkpoint: Checkpoint, recipe: Recipe, rounding: Rounding) -> tuple[Checkpoint, Rounding]:
    """Return the model with the recipe's rotations and scales folded in, and the rounding of its matrices.

    Matrices to round are in f32. The returned rounding has statistics of the changed model, the element types that the
    matrices had, and notes on the scales.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model without any of the changes.
    recipe : Recipe
    rounding : Rounding
        Choices by the names of the rotated model; statistics of ``checkpoint``.
    """
    choices = rounding.choices
    grids = {name: choice.grid for name, choice in choices.items() if choice.scaled}
    if recipe.rotate is None and not grids:
        return checkpoint, rounding
    graph = graph_of(checkpoint)
    stored = _dtypes_of(checkpoint, graph)
    dtypes = {name: "f32" if name in choices else dtype for name, dtype in stored.items()}
    rounding = replace(rounding, dtypes=stored)
    if recipe.rotate is not None:
        # Tensors that scales are folded into afterwards are not rounded in between.
        scaled_names = set(changed_names(graph, lambda stream: scales(graph, grids, stream)))
        exact = {name: "f32" if name in scaled_names else dtype for name, dtype in dtypes.items()}
        view, rotations = rotated(checkpoint, graph, _options(recipe.rotate), exact)
        checkpoint = view.checkpoint
        rounding = replace(rounding, known=_folded_statistics(rounding.known, rotations))
    if not grids:
        return checkpoint, rounding
    folding = ScaleFolding(checkpoint, graph, grids, rounding.known, dtypes)
    rounding = replace(
        rounding, known=_folded_statistics(rounding.known, folding), more=partial(_scale_notes, folding.searched)
    )
    return scaled(folding, rounding.said), rounding


def _scale_notes(searched: Searched) -> Sequence[str]:
    gains = list(searched.gains.values())
    if not gains:
        return []
    changed, mean = sum(gain < 1 for gain in gains), sum(gains) / len(gains)
    groups = (
        f"{changed} of {len(gains)} groups of matrices got scales for their channels, folded into what comes before"
    )
    return [f"{groups}; they leave {mean:.1%} of the error of nearest rounding on average"]


def _options(rotate: Rotate) -> tuple[bool, bool, int]:
    return rotate.r1, rotate.r2, rotate.seed


def _folded_statistics(statistics: Known, folding: Folding) -> Known:
    return lambda: FoldedStatistics(statistics(), folding)


def _dtypes_of(checkpoint: Checkpoint, graph: Graph) -> dict[str, str]:
    """Return the element types of the graph's tensors; a head without a tensor has that of the embedding."""
    names = [*graph.sites, graph.head]
    return {name: checkpoint[name if name in checkpoint else graph.embedding].dtype for name in names}
