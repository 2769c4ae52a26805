"""Opening statistics of a model's matrices: Ingot's own file, or an importance matrix of llama.cpp."""

from __future__ import annotations

from os import PathLike

from ingot.errors import UsageError
from ingot.formats.gguf.format import GgufFormat
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import Statistics
from ingot.ops import imatrix
from ingot.ops.identity import content_id
from ingot.ops.open import open as open_checkpoint
from ingot.stores.table import location_of, read_start


def open_statistics(path: str | PathLike[str], model: Checkpoint | None = None) -> Statistics:
    """As ``Statistics.open``, which see."""
    location = location_of(path)
    if imatrix.is_binary(read_start(path, imatrix.HEAD), path):
        found = imatrix.from_binary(path)
    else:
        checkpoint = open_checkpoint(path)
        try:
            if checkpoint.format == GgufFormat.name:
                found = imatrix.from_gguf(checkpoint)
            else:
                found = Statistics(checkpoint, checkpoint.metadata, location, checkpoint.close)
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


def _of(found: Statistics, model: Checkpoint) -> Statistics:
    """Return statistics under the model's names; raises ``statistics.model``, ``statistics.shape``."""
    if found.model_id is not None:
        found.require_model(content_id(model))
    elif not _any_of(found, model):
        found = found.renamed(imatrix.names_of(model))
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
