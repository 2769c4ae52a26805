"""Orthogonal matrices whose entries have similar magnitudes: Hadamard matrices, if Ingot can construct the size.

The matrix of a size is the Kronecker product of Sylvester's matrix of 2^k and a small matrix. Small Hadamard matrices
are Paley's (J. Math. Phys. 12, 1933). They have size ``q + 1`` for a prime ``q`` of the form 4j + 3, and ``2 (q + 1)``
for a prime of the form 4j + 1: 12, 20, 28, 36, 44, 60, 68 and so on. If Paley's constructions give no small matrix, the
small matrix is the Hartley transform of the size's odd factor. Its entries are at most sqrt(2) times as large.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ingot.model.tensor import Array
from ingot.quantization.products import multiply

_LARGEST = 1 << 20
LARGEST_SMALL = 1 << 12
"""The size of the largest small matrix, which is stored in full."""


@dataclass(frozen=True, slots=True)
class HadamardOrder:
    """The decomposition of a matrix of size ``small * power``, where ``power`` is a power of 2.

    The matrix is the Kronecker product of a small matrix and Sylvester's matrix. ``hadamard`` is true if the small
    matrix is a Hadamard matrix, and false if it is a Hartley transform.
    """

    small: int
    power: int
    hadamard: bool

    def __str__(self) -> str:
        family = "Hadamard" if self.hadamard else "Hartley"
        if self.small == 1:
            return f"Hadamard {self.power}"
        return f"{family} {self.small}" + (f" x Hadamard {self.power}" if self.power > 1 else "")


@lru_cache(maxsize=64)
def order_of(size: int) -> HadamardOrder:
    """Return the decomposition of a matrix of a size from 1 to 2^20, with the smallest possible small matrix."""
    assert 1 <= size <= _LARGEST
    twos = size & -size
    odd_factor = size // twos
    small = size // twos
    while small <= size:
        if small == 1 or (small <= LARGEST_SMALL and _paley(small) is not None):
            return HadamardOrder(small, size // small, True)
        small *= 2
        if size % small:
            break
    return HadamardOrder(odd_factor, twos, False)


@lru_cache(maxsize=16)
def small_matrix(small: int, hadamard: bool) -> Array:
    """Return the small factor of a matrix: f32 [small, small], orthogonal with rows of length sqrt(small)."""
    if small == 1:
        return np.ones((1, 1), np.float32)
    if hadamard:
        matrix = _paley(small)
        assert matrix is not None
        return np.ascontiguousarray(matrix, np.float32)
    angles = np.outer(np.arange(small), np.arange(small)) % small * (2 * np.pi / small)
    return np.ascontiguousarray(np.cos(angles) + np.sin(angles), np.float32)


def signs_of(size: int, seed: int, label: str) -> Array:
    """Return random signs, +1 or -1, that a seed and a label determine on every machine: f32 [size]."""
    drawn = hashlib.shake_256(f"ingot rotation {seed} {label}".encode()).digest(-(-size // 8))
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8))[:size]
    return 1 - 2 * bits.astype(np.float32)


def transform(rows: Array, order: HadamardOrder) -> Array:
    """Return each row multiplied by the matrix of ``order`` and divided by the root of its size: f32 [rows, size]."""
    count, size = rows.shape
    result = _sylvester(np.ascontiguousarray(rows, np.float32).reshape(count * order.small, order.power))
    if order.small > 1:
        swapped = result.reshape(count, order.small, order.power).transpose(1, 0, 2)
        mixed = multiply(small_matrix(order.small, order.hadamard), swapped.reshape(order.small, -1))
        result = mixed.reshape(order.small, count, order.power).transpose(1, 0, 2)
    out: Array = result.reshape(count, size) * np.float32(size**-0.5)
    return out


def _sylvester(rows: Array) -> Array:
    """Return the rows after a fast Walsh-Hadamard transform: only additions and subtractions, in a fixed order."""
    count, size = rows.shape
    half = 1
    while half < size:
        pairs = rows.reshape(count, size // (2 * half), 2, half)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return rows.reshape(count, size)


def _paley(order: int) -> Array | None:
    """Return Paley's Hadamard matrix, i8 [order, order]; None if neither of his constructions gives this order."""
    if order % 4:
        return None
    first = order - 1
    second = order // 2 - 1
    if first % 4 == 3 and _is_prime(first):
        skew = np.zeros((order, order), np.int8)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, _residues(first)
        return skew + np.eye(order, dtype=np.int8)
    if second % 4 == 1 and _is_prime(second):
        core = np.zeros((order // 2, order // 2), np.int8)
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1, 1, _residues(second)
        identity = np.eye(len(core), dtype=np.int8)
        plain = np.array([[1, 1], [1, -1]], np.int8)
        diagonal = np.array([[1, -1], [-1, -1]], np.int8)
        matrix: Array = np.kron(core, plain) + np.kron(identity, diagonal)
        return matrix
    return None


def _residues(prime: int) -> Array:
    """Return Jacobsthal's matrix: 1 if row minus column is a square modulo the prime, -1 if not, 0 on the diagonal."""
    squares = np.full(prime, -1, np.int8)
    squares[np.arange(1, prime, dtype=np.int64) ** 2 % prime] = 1
    squares[0] = 0
    numbers = np.arange(prime)
    residues: Array = squares[(numbers[:, None] - numbers) % prime]
    return residues


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
