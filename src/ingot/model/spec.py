"""Specs of tensors that will be written: shapes, types and sizes, known before any byte is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.core.bytes import encodings


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part that will be written.

    Parameters
    ----------
    role : str
    dtype : str
        Storage primitive.
    length : int or None
        Stored bytes; None if the length depends on the values (zstd).
    type : str or None
        Logical type; None if equal to ``dtype``.
    encoding : str
    uncompressed_length : int or None
        Bytes before compression; None for ``raw``.
    limit : int or None
        Upper bound of the bytes of a ``raw`` part whose length is unknown; None if its codec states none.
    """

    role: str
    dtype: str
    length: int | None
    type: str | None = None
    encoding: str = "raw"
    uncompressed_length: int | None = None
    limit: int | None = None

    @property
    def at_most(self) -> int:
        """The number of stored bytes, or an upper bound if the length depends on the values."""
        if self.length is not None:
            return self.length
        if self.uncompressed_length is not None:
            return encodings.bound(self.uncompressed_length, self.encoding)
        return self.limit or 0

    @property
    def nbytes(self) -> int | None:
        """The number of bytes after decoding the encoding."""
        return self.length if self.uncompressed_length is None else self.uncompressed_length


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that will be written: its entry in the header or manifest, without offsets and digests."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int | None:
        """The number of stored bytes, None if not all lengths are known."""
        lengths = [part.length for part in self.parts]
        return None if None in lengths else sum(length or 0 for length in lengths)

    @property
    def part_dtypes(self) -> dict[str, str]:
        """Storage type of each part by its role."""
        return {part.role: part.dtype for part in self.parts}

    @property
    def part_nbytes(self) -> dict[str, int | None]:
        """Decoded bytes of each part by its role; None if the size depends on the values."""
        return {part.role: part.nbytes for part in self.parts}

    def part(self, role: str) -> PartSpec:
        """Return the part ``role``. Raises ``KeyError`` if there is none."""
        for part in self.parts:
            if part.role == role:
                return part
        raise KeyError(role)
