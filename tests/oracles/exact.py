"""Codecs without loss: a stored tensor as their references take it. Words of bits, not numbers."""

from __future__ import annotations

from math import prod

import numpy as np

from tests.support.reference import delta_exact as delta_reference
from tests.support.reference import float_entropy as entropy_reference
from tests.support.reference import tca_tbe as tca_reference

from .common import Array, Stored

_BYTES = {"f64": 8, "f32": 4, "i64": 8, "u64": 8, "i32": 4, "u32": 4}
_BYTES |= {"f16": 2, "bf16": 2, "i16": 2, "u16": 2}
_MANTISSA = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}
_MANTISSA |= {"f8_e4m3fn": 3, "f8_e5m2": 2, "f8_e4m3fnuz": 3, "f8_e5m2fnuz": 2}


def _chunks(tensor: Stored) -> tuple[list[int], bytes, int]:
    """Return the sizes of the chunks, their bytes, and the elements of a full chunk."""
    sizes, data = tensor.numbers("sizes").tolist(), tensor.parts["planes"][1]
    assert sum(sizes) == len(data)
    assert len(sizes) == -(-prod(tensor.shape) // tensor.params["chunk"])
    return sizes, data, tensor.params["chunk"]


def float_entropy(tensor: Stored) -> Array:
    """Return the words of all elements."""
    words = entropy_reference.decode(*_chunks(tensor), prod(tensor.shape), _BYTES.get(tensor.dtype, 1))
    return words.reshape(tensor.shape)


def delta_exact(tensor: Stored, base: Array) -> Array:
    """Return the words of the fine-tune from those of the base."""
    shift = _MANTISSA.get(tensor.dtype, 8 * base.dtype.itemsize - 8)
    words = delta_reference.apply(*_chunks(tensor), base.reshape(-1), floats=tensor.dtype in _MANTISSA, shift=shift)
    return words.reshape(tensor.shape)


def tca_tbe(tensor: Stored) -> Array:
    """Return the words of all elements."""
    parts = {role: tensor.numbers(role) for role in tensor.parts}
    parts["counts"] = counts = parts["counts"].reshape(-1, 2)
    for column, role in enumerate(("high", "fallback")):
        assert int(counts[:, column].astype(np.int64).sum()) == parts[role].size
    return tca_reference.decode(parts, tensor.params["start"], tensor.matrix).reshape(tensor.shape)
