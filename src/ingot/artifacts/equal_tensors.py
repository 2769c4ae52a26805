"""Whether two tensors have the same values, bit for bit."""

from __future__ import annotations

import numpy as np

from ingot.artifacts.identity import tensor_digest
from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.dtypes import DTYPES, file_bytes
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.fit import is_opaque
from ingot.model.tensor import Tensor

COMPARED_AT_ONCE = 1 << 20
"""Elements of a chunk in which two tensors are compared."""


def alike(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and element type."""
    return first.shape == other.shape and first.dtype == other.dtype


def equal_values(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type have the same values, bit for bit; stops at the first difference."""
    return common_digest(first, other) is not None


def common_digest(first: Tensor, other: Tensor) -> str | None:
    """Return the digest of two tensors of one shape and type that have the same values, bit for bit, else None."""
    if is_opaque(first) or is_opaque(other) or DTYPES[first.dtype].bits < 8:  # packed bytes, which chunks are not
        digest = tensor_digest(first)
        return digest if digest == tensor_digest(other) else None
    matrix = matrix_of(first, other.codec)
    step = max(1, COMPARED_AT_ONCE // max(matrix[1], 1))
    running = Blake3()
    for left, right in zip(chunks(first, matrix, step), chunks(other, matrix, step), strict=True):
        mine = file_bytes(left)
        if not np.array_equal(np.frombuffer(mine, np.uint8), np.frombuffer(file_bytes(right), np.uint8)):
            return None
        running.update(mine)
    return hex_of(running)
