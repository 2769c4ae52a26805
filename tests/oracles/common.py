"""What the oracles share: a stored tensor as plain values, numbers from bytes, bits, rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tests.support.reference import affine

Array = np.ndarray[Any, np.dtype[Any]]

LARGEST = {"f16": 65504.0, "bf16": float.fromhex("0x1.fep127"), "f32": float.fromhex("0x1.fffffep127")}
_PLAIN = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "u8": "u1", "i8": "i1", "bool": "u1"}
_PLAIN |= {f"{kind}{bits}": f"<{kind}{bits // 8}" for kind in "iu" for bits in (16, 32, 64)}


class RefusedError(Exception):
    """The spec says that these bytes, or this target, are refused."""


@dataclass(frozen=True)
class Stored:
    """A tensor as a container hands it over; ``parts`` are a storage type and the decompressed bytes by role."""

    shape: tuple[int, ...]
    dtype: str
    codec: str
    params: Mapping[str, Any]
    parts: Mapping[str, tuple[str, bytes]]

    @property
    def matrix(self) -> tuple[int, int]:
        return (prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    def within(self, **changes: Any) -> Stored:
        return replace(self, **changes)

    def numbers(self, role: str) -> Array:
        """The part's elements; bf16 as f32."""
        dtype, data = self.parts[role]
        if dtype == "bf16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.frombuffer(data, _PLAIN[dtype])

    def wide(self, role: str) -> Array:
        """The part's elements as f32."""
        return self.numbers(role).astype(np.float32)


def stream(data: bytes, bits: int, count: int, *, high_first: bool = False) -> Array:
    """Unsigned codes of one bit stream: the first in the lowest bits of the first byte, or in the highest."""
    row = np.frombuffer(data, np.uint8)[None]
    return affine.unpack(row, count, bits, msb=high_first)[0].astype(np.int64)


def rounded(values: Array, dtype: str) -> Array:
    """f32 values as f16 or bf16 bits (u16), or as they are: to nearest, ties to even."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        with np.errstate(all="ignore"):
            return values.astype(np.float16).view(np.uint16)
    words = values.view(np.uint32)
    up = (words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), words >> np.uint32(16) | np.uint32(0x40), up).astype(np.uint16)


def as_float(words: Array, dtype: str) -> Array:
    """Undo ``rounded``: f32."""
    if dtype == "f32":
        return words
    if dtype == "f16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def require_range(values: Array, sound: Array | bool, dtype: str) -> None:
    """Refuse a value that is finite by its parts and not in ``dtype``."""
    if bool((sound & ~np.isfinite(as_float(rounded(values, dtype), dtype))).any()):
        raise RefusedError
