"""How the parts of a tensor lie in the constants of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ingot.core.dtypes import DTYPES, file_bytes, from_file, numpy_dtype
from ingot.errors import CodecError
from ingot.formats.numbers import packed_rows, unpacked_rows
from ingot.formats.onnx.tensors import Constant


class Conversion(Protocol):
    """Bytes of a constant to those of a part and back; both lengths are known."""

    @property
    def part_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    def to_part(self, data: bytes) -> bytes: ...
    def to_stored(self, data: bytes, where: str) -> bytes:
        """Raises ``CodecError`` ``onnx.zero-point``."""
        ...


@dataclass(frozen=True, slots=True)
class Points:
    """Zero points: integers of ``bits`` in rows that begin at a byte, floats of ``dtype`` in a part."""

    rows: int
    each: int
    bits: int
    signed: bool
    dtype: str

    @property
    def part_bytes(self) -> int:
        return self.rows * self.each * DTYPES[self.dtype].bits // 8

    @property
    def stored_bytes(self) -> int:
        return self.rows * -(-self.each * self.bits // 8)

    def to_part(self, data: bytes) -> bytes:
        points = unpacked_rows(data, self.rows, self.each, self.bits, signed=self.signed)
        return bytes(file_bytes(points.reshape(-1).astype(numpy_dtype(self.dtype))))

    def to_stored(self, data: bytes, where: str) -> bytes:
        points = from_file(np.frombuffer(data, np.uint8), self.dtype).astype(np.float64)
        low = -(1 << (self.bits - 1)) if self.signed else 0
        whole = (points == np.rint(points)) & (points >= low) & (points < low + (1 << self.bits))
        if not bool(whole.all()):
            raise CodecError(
                "onnx.zero-point",
                f"expected zero points that are whole numbers of {self.bits} bits, found others; choose symmetric "
                "scales",
                where=where,
            )
        return packed_rows(points.astype(np.int16).reshape(self.rows, self.each), self.bits)


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of ``width`` bytes in a part that take ``stored`` bytes each in a constant, the rest of them zeros."""

    rows: int
    width: int
    stored: int

    @property
    def part_bytes(self) -> int:
        return self.rows * self.width

    @property
    def stored_bytes(self) -> int:
        return self.rows * self.stored

    def to_part(self, data: bytes) -> bytes:
        return np.frombuffer(data, np.uint8).reshape(self.rows, self.stored)[:, : self.width].tobytes()

    def to_stored(self, data: bytes, where: str) -> bytes:
        out = np.zeros((self.rows, self.stored), np.uint8)
        out[:, : self.width] = np.frombuffer(data, np.uint8).reshape(self.rows, self.width)
        return out.tobytes()


@dataclass(frozen=True, slots=True)
class Repeated:
    """One scale for each row in a part, written ``times`` times: one for each block of the row."""

    rows: int
    times: int
    size: int

    @property
    def part_bytes(self) -> int:
        return self.rows * self.size

    @property
    def stored_bytes(self) -> int:
        return self.rows * self.times * self.size

    def to_part(self, data: bytes) -> bytes:
        return np.frombuffer(data, np.uint8).reshape(self.rows, self.times, self.size)[:, 0].tobytes()

    def to_stored(self, data: bytes, where: str) -> bytes:
        rows = np.frombuffer(data, np.uint8).reshape(self.rows, 1, self.size)
        return np.repeat(rows, self.times, axis=1).tobytes()


@dataclass(frozen=True, slots=True)
class Same:
    """One zero point for all: rows of ``each`` integers of ``bits``, every row beginning at a byte."""

    point: int
    rows: int
    each: int
    bits: int

    def stored(self) -> bytes:
        """Return the bytes of the constant."""
        return packed_rows(np.full((1, self.each), self.point, np.int16), self.bits) * self.rows


@dataclass(frozen=True, slots=True)
class Slot:
    """The constant behind one part: of storage type ``dtype``, ``logical`` where that says more; converted or not."""

    constant: Constant
    dtype: str
    logical: str = ""
    conversion: Conversion | None = None

    @property
    def length(self) -> int:
        """Bytes of the part."""
        return self.constant.nbytes if self.conversion is None else self.conversion.part_bytes
