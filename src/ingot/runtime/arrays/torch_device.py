"""Decoding of packed tensors on devices without kernels: the packed parts are copied to the device and decoded there.

Decoding uses torch operations, which are available on every device; the result is bit-identical to that of the kernels.
``model.tensor`` finds this module through its registry ``ON_DEVICE``. torch is imported when a device is used.
"""

from __future__ import annotations

from typing import Any

from ingot.codecs.affine.matmul import PackedMatrix, stays_packed
from ingot.codecs.base import FLOAT_TARGETS
from ingot.core.border import require
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.model.tensor import Tensor

SCRATCH = 8 << 20
"""Maximum number of bytes of decoded values and temporary memory per block of rows; a block is at least a row."""

_STEPS = 16  # maximum bytes of temporary memory per decoded value, over all layouts


def decodes_on_device(tensor: Tensor, dtype: Any, device: Any) -> bool:
    """Return whether a tensor is decoded on a device into the floating-point type ``dtype`` (by default its dtype).

    This is possible for matrices of the affine family whose rows fill complete bytes; other tensors are decoded on the
    CPU. Raises ``MissingExtraError`` if torch is not installed.
    """
    if device is None or device == "cpu":
        return False
    torch = require("torch", "torch")
    from ingot.runtime.layers.packed_linear import has_kernels

    if has_kernels(torch.device(device)):
        return False
    target = resolve_dtype(tensor.dtype if dtype is None else dtype).name
    return target in FLOAT_TARGETS and stays_packed(tensor)


def decode_on_device(tensor: Tensor, dtype: Any, device: Any) -> Any:
    """Return the values of a tensor, decoded on a device; None if ``decodes_on_device`` returns false.

    Blocks of rows are decoded one after another. In addition to the values and the packed parts, decoding needs
    ``SCRATCH`` bytes of memory, or the memory for one row if that is more.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    CodecError, IntegrityError
        The errors of ``PackedMatrix.from_tensor``.
    """
    if not decodes_on_device(tensor, dtype, device):
        return None
    torch = require("torch", "torch")
    from ingot.runtime.layers.packed_linear import PackedWeight

    target = getattr(torch, str(resolve_dtype(tensor.dtype if dtype is None else dtype).torch))
    packed = PackedWeight(PackedMatrix.from_tensor(tensor.private()), target).to(device)
    values = torch.empty(packed.shape, dtype=target, device=device)
    rows, cols = packed.shape
    step = max(1, SCRATCH // max(1, cols * _STEPS))
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        values[block] = packed.decode(block, target)
    return values
