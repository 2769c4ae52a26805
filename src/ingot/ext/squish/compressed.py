"""Load models of Squish directories with functions named as in squish's document (Squish Architecture, section 7)."""

from __future__ import annotations

from typing import Any

from ingot.core.border import bordered
from ingot.runtime.loading import mlx_load, transformers
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import AnyPath


@bordered
def load_compressed_model(
    compressed_dir: AnyPath, model_dir: AnyPath | None = None, *, return_stats: bool = False, **options: Any
) -> Any:
    """Load the best tier of a Squish directory; the first load also builds a tier that later loads use.

    Parameters
    ----------
    compressed_dir : path
        The directory, or any other location that ``load_model`` accepts.
    model_dir : path, optional
        The folder with config.json and the tokenizer; by default the directory.
    return_stats : bool
        Whether to return a ``LoadReport`` too.
    **options :
        Options of ``ingot.load_model``.

    Returns
    -------
    (model, tokenizer), or (model, tokenizer, LoadReport) if ``return_stats`` is set

    Raises
    ------
    IngotError
        Any error of ``load_model``; ``FormatError`` ``model.tokenizer``.

    Examples
    --------
    >>> report = ingot.convert("model", "squish", format="npydir", recipe="squish-int8")
    >>> model, tokenizer = ingot.load_compressed_model("squish")
    """
    reports: list[LoadReport] = []
    model = transformers.load_model(compressed_dir, model_dir=model_dir, report=reports.append, **options)
    tokenizer = load_tokenizer(compressed_dir if model_dir is None else model_dir)
    return (model, tokenizer, reports[0]) if return_stats else (model, tokenizer)


@bordered
def load_compressed_mlx(
    compressed_dir: AnyPath, model_dir: AnyPath | None = None, *, return_stats: bool = False, **options: Any
) -> Any:
    """Load the best tier for MLX, with the options of ``ingot.mlx.load_model``; see ``load_compressed_model``.

    Examples
    --------
    >>> report = ingot.convert("model", "squish", format="npydir", recipe="squish-int8")
    >>> model, tokenizer = ingot.mlx.load_compressed_model("squish")
    """
    reports: list[LoadReport] = []
    loaded = mlx_load.load_model(compressed_dir, model_dir=model_dir, report=reports.append, **options)
    return (*loaded, reports[0]) if return_stats else loaded
