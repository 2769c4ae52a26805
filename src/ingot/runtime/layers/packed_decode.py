"""Decoding of the affine family with torch operations, on the device of the parts.

The bits equal those of the native kernels (``spec/affine.md``, "Decoding"): each step rounds to f32, the last to the
target.
"""

from __future__ import annotations

from typing import Any

from ingot.core.extras import require
from ingot.model.layouts.affine import AffineLayout


def decode_rows(params: AffineLayout, cols: int, packed: Any, scales: Any, zeros: Any) -> Any:
    """Return rows [n, cols] in f32.

    Parameters
    ----------
    packed : uint8 tensor, [n, row bytes]
    scales, zeros : float tensors, [n, scales of a row], or [1] for one scale per tensor; ``zeros`` may be None
    """
    q = _integers(_codes(packed, cols, params), params)
    if zeros is None and params.zero_point is not None:
        q = q - float(params.zero_point)
    scale = _broadcast(scales, params, cols)
    if zeros is None:
        return scale * q
    zero = _broadcast(zeros, params, cols)
    return scale * q + zero if params.offset else scale * (q - zero)


def _codes(packed: Any, cols: int, params: AffineLayout) -> Any:
    """Return codes [n, cols], one per byte, from packed [n, row bytes]."""
    torch = require("torch", "torch")
    if params.bits == 8:
        return packed[:, :cols]
    if params.bits == 4:
        pair = [packed & 15, packed >> 4]
        return torch.stack(pair[::-1] if params.msb else pair, dim=2).flatten(1)[:, :cols]
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = packed.unsqueeze(2) >> (shifts.flip(0) if params.msb else shifts) & 1
    bits = stream.flatten(1)[:, : cols * params.bits].unflatten(1, (cols, params.bits))
    weights = shifts[: params.bits]
    return (bits << (weights.flip(0) if params.msb else weights)).sum(dim=2, dtype=torch.uint8)


def _integers(codes: Any, params: AffineLayout) -> Any:
    """Return the integers for codes, as f32."""
    torch = require("torch", "torch")
    if not params.signed:
        return codes.to(torch.float32)
    half = 1 << (params.bits - 1)
    return ((codes ^ half).to(torch.int16) - half).to(torch.float32)


def _broadcast(values: Any, params: AffineLayout, cols: int) -> Any:
    torch = require("torch", "torch")
    wide = values.to(torch.float32)
    if params.group_size is None:
        return wide.reshape(-1, 1)
    return wide.repeat_interleave(min(params.group_columns(cols), cols), dim=1)[:, :cols]
