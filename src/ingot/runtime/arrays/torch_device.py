"""Stored tensors on a device that has no kernels of Ingot: packed parts are copied there and decoded there.

torch's own operations decode them, which every device has; the bits are those of the kernels. ``model.tensor`` finds
this module in its registry ``ON_DEVICE``. torch is imported when a device is named.
"""

from __future__ import annotations

from typing import Any

from ingot.codecs.affine.matmul import PackedMatrix, stays_packed
from ingot.codecs.base import FLOAT_TARGETS
from ingot.core.border import require
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.model.tensor import Tensor

SCRATCH = 8 << 20
"""Bytes of decoded values and intermediate results that a block of rows takes; never less than a row."""

_STEPS = 16  # the largest number of bytes that decoding needs for each value, of all layouts


def decodes_there(tensor: Tensor, dtype: Any, device: Any) -> bool:
    """Return whether a stored tensor is decoded on a device, in the floating-point type ``dtype`` (default: its own).

    True for matrices of the affine family in rows of whole bytes, as far as their attributes say; others are decoded on
    the CPU. Raises ``MissingExtraError`` without torch.
    """
    if device is None or device == "cpu":
        return False
    torch = require("torch", "torch")
    from ingot.runtime.layers.packed_linear import has_kernels

    if has_kernels(torch.device(device)):
        return False
    target = resolve_dtype(tensor.dtype if dtype is None else dtype).name
    return target in FLOAT_TARGETS and stays_packed(tensor)


def decoded_there(tensor: Tensor, dtype: Any, device: Any) -> Any:
    """Return a tensor's values on a device that decodes its parts; None if ``decodes_there`` is False.

    One block of rows is decoded at a time: besides the values and the parts it takes ``SCRATCH`` bytes, or a row.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    CodecError, IntegrityError
        The errors of ``PackedMatrix.from_tensor``.
    """
    if not decodes_there(tensor, dtype, device):
        return None
    torch = require("torch", "torch")
    from ingot.runtime.layers.packed_linear import PackedWeight

    target = getattr(torch, str(resolve_dtype(tensor.dtype if dtype is None else dtype).torch))
    weight = PackedWeight(PackedMatrix.from_tensor(tensor.private()), target).to(device)
    values = torch.empty(weight.shape, dtype=target, device=device)
    rows, cols = weight.shape
    step = max(1, SCRATCH // max(1, cols * _STEPS))
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        values[block] = weight.decode(block, target)
    return values
