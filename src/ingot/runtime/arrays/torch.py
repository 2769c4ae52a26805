"""Conversion between NumPy arrays and PyTorch tensors, which share memory on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.numeric.dtypes import DType, native_order, numpy_dtype
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array


def from_numpy(array: Array, device: Any = None) -> Any:
    """Return a ``torch.Tensor`` of the same values, in the same element type.

    Parameters
    ----------
    array : ndarray
        An array of any dtype that torch has, including bfloat16 and 8-bit floats. A read-only array shares its memory
        with the tensor if the underlying buffer is writable (``Tensor.private``, buffers of Ingot). Otherwise it is
        copied, because torch tensors are always writable.
    device : optional
        Any device that ``Tensor.to`` accepts; the CPU by default.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: torch has no such element type.
    """
    torch = require("torch", "torch")

    row = resolve_dtype(array.dtype)
    target = getattr(torch, row.torch, None) if row.torch else None
    if target is None:
        raise UnsupportedError(f"this torch has no element type for {row.name}", rule="adapter.dtype")
    values = native_order(array)
    if values.size == 0:
        tensor = torch.empty(values.shape, dtype=target)
    else:
        # Torch does not know NumPy's extension types, so the bits are passed as integers of the same size.
        carrier = _carrier(row)
        plain = values if carrier is None else values.view(carrier)
        tensor = torch.from_numpy(_writable(plain))
        tensor = tensor if tensor.dtype == target else tensor.view(target)
    return tensor if device is None else tensor.to(device)


def to_numpy(tensor: Any) -> Array:
    """Return the values of a ``torch.Tensor`` as an array, sharing memory if it is dense and on the CPU.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: Ingot has no such element type; ``adapter.layout``: the tensor is sparse, quantized, or on
        device meta and has no values.
    """
    torch = require("torch", "torch")

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedError(
            "expected a dense tensor, found a sparse, quantized or nested tensor", rule="adapter.layout"
        )
    if tensor.device.type == "meta":
        raise UnsupportedError("expected a tensor with values, found a tensor on device meta", rule="adapter.layout")
    row = resolve_dtype(tensor.dtype)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    carrier = _carrier(row)
    array: Array = (plain if carrier is None else plain.view(getattr(torch, carrier))).numpy()
    return array if carrier is None else array.view(numpy_dtype(row.name))


def _carrier(row: DType) -> str | None:
    """Return the torch integer type that passes the bits of bfloat16 or fp8 to and from NumPy; None for other types."""
    return {"bf16": "int16"}.get(row.name) or ("uint8" if row.is_float and row.bits == 8 else None)


def _writable(array: Array) -> Array:
    """Return ``array`` if torch may write to it, else a writable alias of its buffer if possible, else a copy."""
    if any(stride < 0 for stride in array.strides):
        return array.copy()
    if array.flags.writeable:
        return array
    root: Any = array
    while isinstance(root, np.ndarray):
        root = root.base
    # An array without an underlying buffer owns its memory; its creator has made it read-only on purpose.
    if not isinstance(root, memoryview) or root.readonly or not root.contiguous:
        return array.copy()
    # Given a memoryview, NumPy would keep the object below it, and a mapping could be closed. So use an array.
    memory = np.frombuffer(root, np.uint8)
    offset = array.ctypes.data - memory.ctypes.data
    return np.ndarray(array.shape, array.dtype, buffer=memory, offset=offset, strides=array.strides)
