"""Rounding errors of scaled channels, computed on a device for the search in ``quantization.awq``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.model.tensor import Array
from ingot.quantization.awq import Reader, damp
from ingot.quantization.device.feedback import DeviceMatrix
from ingot.quantization.device.levels import DeviceLevels
from ingot.quantization.device.round import with_less_memory
from ingot.quantization.device.table import learn_on_device


def losses_on_device(reader: Reader, tried: Sequence[Array], device: Any) -> Array:
    """Return the rounding error of a matrix for each candidate of ``tried``: f64 [candidates]; see ``awq.losses``."""
    return with_less_memory(device, lambda elements: _losses(reader, tried, device, elements))


def _losses(reader: Reader, tried: Sequence[Array], device: Any, elements: int) -> Array:
    torch = require("torch", "torch")
    grid = reader.grid

    def move(values: Array) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(device)

    weights = move(reader.weights)
    squares = move(reader.squares)
    levels = learn_on_device(weights, grid, move(damp(reader.squares)), elements) if grid.learnt else grid.levels
    stored = DeviceLevels(grid, levels, device)
    inputs = None if reader.inputs is None else move(reader.inputs)
    rows = []
    for scales in map(reader.expand, tried):
        matrix = DeviceMatrix.start(stored, weights * move(scales))
        matrix.nearest(move(damp(reader.squares / np.square(scales))), elements)
        change = matrix.decode().T / move(scales) - weights
        weighted = change * squares if inputs is None else change @ inputs
        rows.append((change * weighted).sum(1))
    errors: Array = torch.stack(rows).cpu().double().numpy()
    return errors @ reader.heavy
