"""Which layers of a model multiply their input in 8 bits (``compute="int8"``). Needs torch to be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.runtime.layers.packed_linear import PackedLinear


def round_inputs(model: torch.nn.Module) -> int:
    """Have the packed linear layers of a model multiply x in 8 bits; return how many there are that do."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear) and module.matrix.rounds]
    for layer in layers:
        layer.rounding = True
    return len(layers)


def rounds_inputs(model: torch.nn.Module) -> bool:
    """Whether a layer of the model multiplies x in 8 bits."""
    return any(isinstance(module, PackedLinear) and module.rounding for module in model.modules())


@contextmanager
def unrounded(model: torch.nn.Module) -> Iterator[None]:
    """Have the layers that multiply x in 8 bits take it as it is, for a while."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear) and module.rounding]
    for layer in layers:
        layer.rounding = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounding = True
