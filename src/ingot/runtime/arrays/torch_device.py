"""Stored tensors on a device for which there are no kernels here: their parts go over packed, and are decoded there.

By torch's own operations, which any device has; the bits are those of the kernels. This module needs torch to be
imported (``core.extras.require`` names the extra); nothing else imports it at the top.
"""

from __future__ import annotations

from typing import Any

import torch

from ingot.codecs.affine.matmul import PackedMatrix, stays_packed
from ingot.codecs.base import FLOAT_TARGETS
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.model.tensor import Tensor
from ingot.runtime.layers.packed_linear import SCRATCH, PackedWeight, has_kernels

_STEPS = 16  # bytes that decoding takes in between for each value, at the most of all layouts


def decodes_there(tensor: Tensor, dtype: Any, device: Any) -> bool:
    """Whether a stored tensor is decoded on a device, in the floating-point type ``dtype`` (by default its own).

    Matrices of the affine family in rows of whole bytes, as far as their attributes tell; others are decoded here.
    """
    if has_kernels(torch.device(device)):
        return False
    target = resolve_dtype(tensor.dtype if dtype is None else dtype).name
    return target in FLOAT_TARGETS and stays_packed(tensor)


def decoded_there(tensor: Tensor, dtype: Any, device: Any) -> Any:
    """Return a tensor's values on a device, whose parts were decoded there; None where it ``decodes_there`` not.

    A block of rows at a time is decoded: beside the values and the parts it takes ``SCRATCH``, or a row.

    Raises
    ------
    CodecError, IntegrityError
        As ``PackedMatrix.from_tensor``.
    """
    if not decodes_there(tensor, dtype, device):
        return None
    target: torch.dtype = getattr(torch, str(resolve_dtype(tensor.dtype if dtype is None else dtype).torch))
    held = PackedWeight(PackedMatrix.from_tensor(tensor.private()), target).to(device)
    values = torch.empty(held.shape, dtype=target, device=device)
    rows, cols = held.shape
    step = max(1, SCRATCH // max(1, cols * _STEPS))
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        values[block] = held.decode(block, target)
    return values
