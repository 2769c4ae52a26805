"""Open what a plan has written with the format's own reader, before anything is published.

Headers, shapes and the sizes of parts are compared with the plan; no weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.engine.plan import Plan
from ingot.errors import IngotError, IntegrityError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_many
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor

RULE, EMPTY = "written.unreadable", "written.empty"
_REPORT = "nothing was published; this is a defect of Ingot, please report it"


def require_readable(plan: Plan, store: Store, name: str, files: Sequence[str], location: str) -> None:
    """Raise ``IntegrityError`` ``written.unreadable`` unless the finished files hold just what was planned.

    ``UnsupportedError`` ``written.empty``: there is no file.

    Parameters
    ----------
    plan : Plan
    store : Store
        The folder with the finished files, companions included.
    name : str
        The weight file that the plan was to create.
    files : sequence of str
        The weight files that were created: ``name``, or an index and shards.
    location : str
        The destination, for messages.
    """
    if not files:
        raise UnsupportedError(
            f"{plan.format.name} has a file per tensor, and there is no tensor to write: choose another format",
            rule=EMPTY,
            where=location,
        )
    entry = name if name in files else plan.format.entry(sorted(files)) or name
    try:
        catalog = plan.format.read(store, entry)
    except IngotError as error:
        raise _failure(location, f"the reader of {plan.format.name} refuses the finished file: {error}") from error
    try:
        _compare(plan, catalog, location)
    finally:
        for source in catalog.sources:
            source.close()


def _compare(plan: Plan, catalog: Catalog, location: str) -> None:
    specs, format = plan.specs, plan.format
    tensors = as_many(catalog.tensors)
    for spec in specs:
        if spec.name not in tensors:
            raise _failure(location, f"the finished file lacks the tensor {spec.name!r:.200}")
        difference = _difference(tensors.passing(spec.name), spec)
        if difference:
            raise _failure(location, f"the tensor {spec.name!r:.200} has {difference}")
    if len(tensors) == len(specs):
        return
    planned_names = {spec.name for spec in specs}
    for name in tensors:
        if name not in planned_names and not format.has_constant(name):
            raise _failure(location, f"the finished file has a tensor that was not planned: {name!r:.200}")


def _difference(tensor: Tensor, spec: TensorSpec) -> str:
    """Return how a tensor that was read differs from its plan; empty if it does not.

    Formats of packed layers state the dtype of decoded values for the folder, or by the dtype of scales: it is compared
    for dense tensors only. Part sizes are compared if the tensor has the planned layout; a format may store equal
    numbers in another, such as a scale per row as equal scales of its blocks.
    """
    if (tensor.shape, tensor.codec) != (spec.shape, spec.codec):
        return f"shape and codec {(tensor.shape, tensor.codec)}, planned {(spec.shape, spec.codec)}"
    if spec.codec == DenseLayout.codec and tensor.dtype != spec.dtype:
        return f"dtype {tensor.dtype}, planned {spec.dtype}"
    if _without_dtype(tensor.params) != _without_dtype(spec.params):
        return ""
    for part in spec.parts:
        stored = tensor.parts.get(part.role)
        if stored is None:
            return f"no part {part.role!r}"
        if part.nbytes is not None and stored.dtype == part.dtype and stored.nbytes != part.nbytes:
            return f"{stored.nbytes} bytes in its part {part.role!r}, planned {part.nbytes}"
    return ""


def _without_dtype(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "dtype"}


def _failure(location: str, message: str) -> IntegrityError:
    return IntegrityError(RULE, f"{message}; {_REPORT}", where=location)
