"""Turn the rounding of inputs to 8 bits on and off in packed layers (``compute="int8"``). Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.runtime.layers.packed_linear import PackedLinear


def round_inputs(model: torch.nn.Module) -> int:
    """Make the packed linear layers of a model multiply x in 8 bits; return the number of layers that support it."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear) and module.matrix.rounds]
    for layer in layers:
        layer.rounding = True
    return len(layers)


def rounds_inputs(model: torch.nn.Module) -> bool:
    """Return whether a layer of the model multiplies x in 8 bits."""
    return any(isinstance(module, PackedLinear) and module.rounding for module in model.modules())


@contextmanager
def unrounded(model: torch.nn.Module) -> Iterator[None]:
    """Turn off the rounding of inputs in all layers that multiply x in 8 bits, in this context."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear) and module.rounding]
    for layer in layers:
        layer.rounding = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounding = True
