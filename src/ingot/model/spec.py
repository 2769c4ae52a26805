"""What will be written, known before its bytes are: prepare first, then run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.core import encodings


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part to be written.

    Parameters
    ----------
    role : str
    dtype : str
        Storage primitive.
    length : int or None
        Stored bytes; None where only the bytes themselves tell (zstd).
    type : str or None
        Logical type, None where equal to ``dtype``.
    encoding : str
    uncompressed_length : int or None
        Bytes before compression; None for ``raw``.
    limit : int or None
        The most bytes that a ``raw`` part of unknown length can take, where its codec can tell.
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
        """Stored bytes, or the most they can be where only the bytes themselves tell."""
        if self.length is not None:
            return self.length
        if self.uncompressed_length is not None:
            return encodings.bound(self.uncompressed_length, self.encoding)
        return self.limit or 0

    @property
    def nbytes(self) -> int | None:
        """Bytes after decoding the encoding."""
        return self.length if self.uncompressed_length is None else self.uncompressed_length


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to be written: what the header or manifest says of it, offsets and digests excepted."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int | None:
        """Stored bytes, None if not all lengths are known."""
        lengths = [part.length for part in self.parts]
        return None if None in lengths else sum(length or 0 for length in lengths)

    @property
    def part_dtypes(self) -> dict[str, str]:
        """Storage type of each part by its role."""
        return {part.role: part.dtype for part in self.parts}

    @property
    def part_nbytes(self) -> dict[str, int | None]:
        """Decoded bytes of each part by its role; None where only the bytes tell."""
        return {part.role: part.nbytes for part in self.parts}

    def named(self, name: str) -> TensorSpec:
        """Return this spec of a tensor of another name."""
        return TensorSpec(name, self.shape, self.dtype, self.codec, self.parts, self.params)

    def part(self, role: str) -> PartSpec:
        """Return the part of that role; KeyError if there is none."""
        for part in self.parts:
            if part.role == role:
                return part
        raise KeyError(role)
