"""A chain of deltas: the tensors after each delta, and how each tensor is computed.

*Stage* 0 is the base, stage ``i`` the result of the first ``i`` deltas. Only headers are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ingot.codecs.delta.base import DELTAS, delta_codec
from ingot.codecs.delta.rows import added_dtype
from ingot.codecs.table import CODECS, DELTA_ROWS
from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.engine.fit import differ_in_rows, is_opaque
from ingot.engine.patch_step import Layer, PatchChain
from ingot.errors import FormatError, IngotError, IntegrityError, UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint, tensor_map_of
from ingot.model.delta import KEY, Change, DeltaInfo, delta_of
from ingot.model.reading.lazy import ComputedMap, TensorMap, as_tensor_map
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Tensor

Routes = TensorMap[PatchChain]
"""The chains of the tensors of a stage, by name. Each chain is built on access and not cached."""


@dataclass(frozen=True, slots=True)
class Link:
    """A delta in a chain: its opened file, and the description in the file's metadata."""

    checkpoint: Checkpoint
    info: DeltaInfo

    @property
    def location(self) -> str:
        return self.checkpoint.location


def link_of(checkpoint: Checkpoint) -> Link:
    """Return the link of an opened delta.

    Raises
    ------
    UsageError
        ``delta.none``: an ordinary checkpoint.
    FormatError
        ``delta.metadata``, ``delta.version``, ``delta.op``.
    """
    info = delta_of(checkpoint.metadata, checkpoint.location)
    if info is None:
        raise UsageError(
            "expected a delta, found ordinary weights; `ingot diff BASE TUNED -o delta.zt` makes one",
            rule="delta.none",
            where=checkpoint.location,
        )
    return Link(checkpoint, info)


def base_routes(base: Mapping[str, Tensor]) -> Routes:
    """Return the chains of stage 0: each contains a tensor of the base, and no delta.

    Raises ``UnsupportedError`` ``codec.unknown`` for a tensor without a decoder.
    """
    require_decoders(base)
    tensors = tensor_map_of(base)
    return ComputedMap(tensors, lambda name: PatchChain(tensors.get_uncached(name), 0))


def require_decoders(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``UnsupportedError`` ``codec.unknown`` for a tensor without a decoder, or the error of a codec's check."""
    for tensor in tensor_map_of(tensors).uncached():
        _require_decoder(tensor, tensor.name)


def stages(base: Checkpoint, links: Sequence[Link]) -> list[Routes]:
    """Return the chains of all stages: of the base, and after each delta.

    The names of a stage have the order of the delta's description.

    Raises
    ------
    UsageError
        ``delta.of-delta``: the base is a delta.
    IntegrityError
        ``delta.base``: names, shapes or element types differ from those of the delta's base.
    FormatError
        ``delta.tensor``, ``delta.dtype``: the delta contradicts its description.
    """
    if KEY in base.metadata:
        raise UsageError(
            "expected the base's weights, found a delta; give the base first, then its deltas in order",
            rule="delta.of-delta",
            where=base.location,
        )
    routes = [base_routes(base)]
    for stage, link in enumerate(links, 1):
        routes.append(next_stage(routes[-1], link, stage))
    return routes


def next_stage(before: Mapping[str, PatchChain], link: Link, stage: int) -> Routes:
    """Return the chains of the tensors at ``stage``, after the delta ``link``.

    ``before`` are the chains at the stage before it. Raises the errors of ``stages``.
    """
    info = link.info
    routes = as_tensor_map(before)
    stray = next((name for name in link.checkpoint if _op(info, name) in (None, "same")), None)
    if stray is not None:
        raise FormatError(
            "delta.tensor", f"expected no tensor {stray[:200]!r}, which the delta does not list", where=link.location
        )
    unlisted = [name for name in before if name not in info.tensors]

    def make(name: str) -> PatchChain:
        change = info.tensors.get(name)
        route = routes.get_uncached(name) if name in routes else None
        if change is None:
            assert route is not None
            return route
        return _route(route, link, stage, name, change)

    for name in info.tensors:
        try:
            make(name)
        except IngotError as error:
            raise error.add_location(f"{link.location}: tensor {name[:200]!r}") from None
    if info.base.content is None:  # the base's identity covers only the delta's tensors
        removed = set(info.removed)
        unlisted = [name for name in unlisted if name not in removed]
        return ComputedMap(dict.fromkeys((*info.tensors, *unlisted)) if unlisted else info.tensors, make)
    mismatched = set(unlisted) ^ set(info.removed)
    if mismatched:
        problem = f"{min(mismatched)[:200]!r} in only one of them"
        raise _base_error("the same names", problem).add_location(link.location)
    return ComputedMap(info.tensors, make)


def _op(info: DeltaInfo, name: str) -> str | None:
    change = info.tensors.get(name)
    return None if change is None else change.op


def _route(before: PatchChain | None, link: Link, stage: int, name: str, change: Change) -> PatchChain:
    op = change.op
    dtype = change.dtype
    if op == "replace":
        tensor = _stored(link, name)
        _require_decoder(tensor, name)
        if tensor.dtype != dtype:
            raise FormatError("delta.dtype", f"expected {dtype[:40]!r} as listed, found {tensor.dtype[:40]!r}")
        return PatchChain(tensor, stage)
    if before is None:
        raise _base_error("this tensor in the base", "none")
    if op == "same":
        if before.dtype != dtype:
            raise _base_error(f"element type {dtype[:40]}", before.dtype)
        return before
    tensor = _stored(link, name)
    _require_codec(tensor)
    if change.base_dtype not in (None, before.dtype):
        raise _base_error(f"element type {change.base_dtype[:40]}", before.dtype)
    shape = before.shape if change.base_shape is None else tensor.shape
    if change.base_shape is not None:
        _require_rows(before, tensor, change.base_shape)
    _require_fit(before, tensor, change, shape)
    return replace(before, layers=(*before.layers, Layer(stage, tensor, dtype, shape)))


def _require_codec(tensor: Tensor) -> None:
    if tensor.codec not in DELTAS and tensor.codec not in CODECS:
        raise UnsupportedError(
            f"there is no codec {tensor.codec[:80]!r} in this version; a newer Ingot may have it", rule="codec.unknown"
        )


def _require_rows(before: PatchChain, tensor: Tensor, base_shape: tuple[int, ...]) -> None:
    """Raise an error unless a delta that changes the shape of a tensor changes only its number of rows.

    Also raises an error if a vector's codecs do not support chunks of any length. Raises ``ResourceError`` if the size
    of the result is out of proportion to the stored bytes.
    """
    if before.shape != base_shape:
        raise _base_error(f"shape {list(base_shape)[:8]}", str(list(before.shape)))
    if not differ_in_rows(base_shape, tensor.shape):
        raise FormatError(
            "delta.shape",
            f"expected a base shape that differs from {list(tensor.shape)[:8]} in the number of rows, found "
            f"{list(base_shape)[:8]}",
        )
    elementwise = CODECS[before.origin.codec].elementwise and all(layer.codec.elementwise for layer in before.layers)
    if len(tensor.shape) < 2 and not (elementwise and delta_codec(tensor.codec).elementwise):
        raise UnsupportedError(
            "expected values of the base that can be cut anywhere; patch with one delta at a time", rule="delta.shape"
        )
    require_in_proportion([tensor], tensor.name)


def _require_fit(before: PatchChain, tensor: Tensor, change: Change, shape: tuple[int, ...]) -> None:
    dtype = change.dtype
    codec = delta_codec(tensor.codec)
    if not codec.fits(tensor, shape):
        raise _base_error(f"shape {list(tensor.shape)}", str(list(shape)))
    codec.check(tensor)
    floats = {before.dtype, dtype} <= set(FLOATS)
    if codec.exact and before.dtype != dtype and (change.base_dtype is None or not floats):
        raise _base_error(f"element type {dtype[:40]}", before.dtype)
    if codec.exact and tensor.dtype not in (dtype, before.dtype):
        raise FormatError("delta.dtype", f"expected a difference in {dtype[:40]}, found one in {tensor.dtype[:40]}")
    if not codec.exact and not floats:
        raise FormatError("delta.dtype", f"expected floats to add to, found {before.dtype} and {dtype[:40]}")
    if tensor.codec == DELTA_ROWS and (shape == before.shape or added_dtype(tensor) != dtype):
        raise FormatError("delta.dtype", f"expected added rows of {dtype[:40]}, the element type of the result")


def _stored(link: Link, name: str) -> Tensor:
    if name not in link.checkpoint:
        raise FormatError("delta.tensor", "the delta lists this tensor, but does not contain it")
    return link.checkpoint.tensor_map.get_uncached(name)


def _require_decoder(tensor: Tensor, name: str) -> None:
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    if not is_opaque(tensor) and (tensor.codec not in CODECS or tensor.dtype not in DTYPES):
        raise UnsupportedError(
            f"no decoder for codec {tensor.codec!r} and dtype {tensor.dtype!r}", rule="codec.unknown", where=name
        )


def _base_error(expected: str, actual: str) -> IntegrityError:
    return IntegrityError("delta.base", f"this is not the delta's base: expected {expected}, found {actual}")
