"""Randomized subspace iteration on a device of torch, for ``adapters.low_rank_fit``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.device import is_out_of_memory, no_device_memory, widest_float
from ingot.model.tensor import Array


def span_on_device(rows: Array, start: Array, iterations: int, device: Any) -> tuple[Array, Array]:
    """Return an orthonormal basis of the dominant column space, f32 [rows, r], and the projection on it, f32 [r, cols].

    Parameters
    ----------
    rows : f32 [rows, cols]
        The matrix.
    start : f32 [cols, r]
        The random matrix with which the iteration starts.
    iterations : int
    device : torch.device
        Multiplies in f32 and computes bases in f64, on the CPU if it has no f64. Only matrices with r columns are
        copied from it.

    Raises ``ResourceError`` ``device.memory``.
    """
    torch = require("torch", "torch")
    exact = device if widest_float(torch, device) == torch.float64 else torch.device("cpu")

    def span(columns: Any) -> Any:
        return torch.linalg.qr(columns.to(exact).double()).Q.float().to(device)

    try:
        matrix = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
        basis = span(matrix @ torch.from_numpy(start).to(device))
        for _ in range(iterations):
            basis = span(matrix @ span(matrix.T @ basis))
        projected = (basis.T @ matrix).cpu().numpy()
        columns = basis.cpu().numpy()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise no_device_memory(device, error) from error
    return columns, projected
