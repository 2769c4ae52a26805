"""Opening statistics of a model's matrices: Ingot's own file, or an importance matrix of llama.cpp."""

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
    """Open statistics; see ``Statistics.open``."""
    location = Location.parse(path)
    if imatrix.is_binary(location.head(imatrix.HEAD)):
        found = imatrix.from_binary(location)
    else:
        checkpoint = open_checkpoint(location)
        try:
            if checkpoint.format == GgufFormat.name:
                found = imatrix.from_gguf(checkpoint)
            else:
                found = Statistics(checkpoint, checkpoint.metadata, location.display, checkpoint.close)
        except BaseException:
            checkpoint.close()
            raise
    if model is None:
        return found
    try:
        return _of(found, model)
    except BaseException:
        found.close()
        raise


def statistics_of_one(stated: AnyPath | Statistics, models: Sequence[Checkpoint]) -> Statistics:
    """Return statistics that are of one of several models with matrices of the same names: that which they state.

    Statistics that state none are taken to be of the first one.

    Raises
    ------
    UsageError
        ``statistics.model``: they were taken of none of the models.
    FormatError
        ``statistics.shape``, and as ``Statistics.open``.
    """
    found = stated if isinstance(stated, Statistics) else open_statistics(stated)
    try:
        return _fitting(found, _stated(found, models))
    except BaseException:
        if found is not stated:
            found.close()
        raise


def _stated(found: Statistics, models: Sequence[Checkpoint]) -> Checkpoint:
    """Return the model that statistics state."""
    if found.model_id is None:
        return models[0]
    ids = [content_id(each) for each in models]
    if found.model_id in ids:
        return models[ids.index(found.model_id)]
    raise UsageError(
        f"expected statistics of {' or '.join(ids)}, found those of {found.model_id}: calibrate one of these models",
        rule="statistics.model",
        where=found.location,
    )


def _of(found: Statistics, model: Checkpoint) -> Statistics:
    """Return statistics under the model's names; raises ``statistics.model``, ``statistics.shape``."""
    if found.model_id is not None:
        found.require_model(content_id(model))
    return _fitting(found, model)


def _fitting(found: Statistics, model: Checkpoint) -> Statistics:
    if found.model_id is None and not _any_of(found, model):
        found = found.with_names(imatrix.names_of(model))
    if not _any_of(found, model):
        raise UsageError(
            "expected statistics of the model's matrices, found none under their names",
            rule="statistics.model",
            where=found.location,
        )
    for name, tensor in model.items():
        known = found.for_matrix(name)
        if known is not None:
            known.require_shape(*tensor.matrix_shape)
    return found


def _any_of(found: Statistics, model: Checkpoint) -> bool:
    return any(name.partition(":expert.")[0] in model for name in found.names)
