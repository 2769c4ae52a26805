"""Opening of statistics of a model's matrices: a file of ``ingot calibrate``, or an importance matrix of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import UsageError
from ingot.formats.gguf.format import GgufFormat
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import Statistics
from ingot.stores.location import AnyPath, Location
from ingot.translate import imatrix


def open_statistics(path: AnyPath, model: Checkpoint | None = None) -> Statistics:
    """Open statistics; parameters and errors are those of ``Statistics.open``."""
    location = Location.parse(path)
    if imatrix.is_binary(location.head(imatrix.HEAD)):
        statistics = imatrix.from_binary(location)
    else:
        checkpoint = open_checkpoint(location)
        try:
            if checkpoint.format == GgufFormat.name:
                statistics = imatrix.from_gguf(checkpoint)
            else:
                statistics = Statistics(checkpoint, checkpoint.metadata, location.display, checkpoint.close)
        except BaseException:
            checkpoint.close()
            raise
    if model is None:
        return statistics
    try:
        if statistics.model_id is not None:
            statistics.require_model(content_id(model))
        return _fit_to_model(statistics, model)
    except BaseException:
        statistics.close()
        raise


def statistics_of_one(source: AnyPath | Statistics, models: Sequence[Checkpoint]) -> Statistics:
    """Return statistics of one of several models whose matrices have the same names.

    If the statistics do not declare their model, they must fit the first one.

    Raises
    ------
    UsageError
        ``statistics.model``: the statistics declare another model, or have none of the model's matrices.
    FormatError
        ``statistics.shape``, and the errors of ``Statistics.open``.
    """
    statistics = source if isinstance(source, Statistics) else open_statistics(source)
    try:
        return _fit_to_model(statistics, _declared_model(statistics, models))
    except BaseException:
        if statistics is not source:
            statistics.close()
        raise


def _declared_model(statistics: Statistics, models: Sequence[Checkpoint]) -> Checkpoint:
    """Return the model that the statistics declare; the first one if they declare none."""
    if statistics.model_id is None:
        return models[0]
    ids = [content_id(model) for model in models]
    if statistics.model_id in ids:
        return models[ids.index(statistics.model_id)]
    raise UsageError(
        f"expected statistics of {' or '.join(ids)}, found those of {statistics.model_id}: calibrate one of these "
        "models",
        rule="statistics.model",
        where=statistics.location,
    )


def _fit_to_model(statistics: Statistics, model: Checkpoint) -> Statistics:
    """Return the statistics renamed to the model's names; raise ``statistics.model`` or ``statistics.shape``."""
    if statistics.model_id is None and not _any_matrix(statistics, model):
        statistics = statistics.with_names(imatrix.names_of(model))
    if not _any_matrix(statistics, model):
        raise UsageError(
            "the statistics contain none of the model's matrices; take statistics of this model",
            rule="statistics.model",
            where=statistics.location,
        )
    for name, tensor in model.items():
        matrix = statistics.for_matrix(name)
        if matrix is not None:
            matrix.require_shape(*tensor.matrix_shape)
    return statistics


def _any_matrix(statistics: Statistics, model: Checkpoint) -> bool:
    """Return whether the statistics contain any tensor of the model."""
    return any(name.partition(":expert.")[0] in model for name in statistics.names)
