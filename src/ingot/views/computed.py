"""A view that replaces values of small dense tensors by an invertible function of them, in f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, cast
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.views.common import BuildTensor, require_names, view_of

_Function = Callable[[Array], Array]
_NEIGHBOURS = 4
_FUNCTIONS: Mapping[str, tuple[_Function, _Function]] = {
    "negative_exp": (lambda x: -np.exp(x), lambda y: np.log(-y)),
    "plus_one": (lambda x: x + np.float32(1), lambda y: y - np.float32(1)),
    "softplus": (lambda x: np.logaddexp(np.float32(0), x), lambda y: y + np.log(-np.expm1(-y))),
}
"""Each function and its inverse, for f32 values."""
FUNCTIONS = tuple(_FUNCTIONS)


def compute(checkpoint: Checkpoint, names: Mapping[str, tuple[str, bool]]) -> Checkpoint:
    """Return the checkpoint with some tensors replaced by a function of their values, computed in f32.

    Results are cached in memory.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of name to (function, inverse)
        ``function`` is a name of ``FUNCTIONS``. If ``inverse`` is true, its inverse is computed. Results are stored in
        f32. Results of an inverse are rounded to bf16, else to f16, if the function maps the rounded numbers exactly
        to the stored values.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.delta``.
    """
    require_names(checkpoint, names)

    def computed(name: str) -> BuildTensor:
        def make() -> Tensor:
            tensor = checkpoint[name]
            function, inverse = names[name]
            values = tensor.numpy("f32")
            forward, backward = _FUNCTIONS[function]
            with np.errstate(all="ignore"):
                result = _invert(values, forward, backward) if inverse else forward(values).astype(np.float32)
            part = memory_part(np.ascontiguousarray(result), "f32", None)
            codec = CODECS[DenseLayout.codec]
            return Tensor(name, tensor.shape, DTYPES["f32"].name, codec.id, {DATA: part}, {}, codec)

        return make

    entries = [(name, computed(name) if name in names else None, name) for name in checkpoint]
    return view_of(checkpoint, entries, compute, dict(names), {name: list(value) for name, value in names.items()})


def _invert(values: Array, forward: _Function, backward: _Function) -> Array:
    """Return f32 numbers x for which ``forward(x)`` is nearest to ``values``.

    ``backward`` estimates x, and each x is chosen from the estimate and its nearest f32 neighbours. Exception: if
    ``forward`` maps the estimates, rounded to bf16 or f16, exactly to ``values``, the rounded numbers are returned.
    """
    estimate: Array = backward(values).astype(np.float32)
    for dtype in ("bf16", "f16"):
        rounded: Array = cast(cast(estimate, dtype), "f32")
        if np.array_equal(forward(rounded).astype(np.float32), values):
            return rounded
    best = estimate
    error = np.abs(forward(estimate) - values)
    for direction in (np.float32(-np.inf), np.float32(np.inf)):
        candidate = estimate
        for _ in range(_NEIGHBOURS):
            candidate = np.nextafter(candidate, direction)
            distance = np.abs(forward(candidate) - values)
            best = np.where(distance < error, candidate, best)
            error = np.minimum(distance, error)
    return best
