"""The storage of a tensor's parts in the constants of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, file_bytes, from_file, numpy_dtype
from ingot.errors import CodecError
from ingot.formats.onnx.tensors import Constant
from ingot.formats.onnx.types import OnnxType
from ingot.formats.shared.numbers import pack_rows, unpack_rows


class Conversion(Protocol):
    """A conversion between the contents of a constant and of a part; both lengths are known."""

    @property
    def part_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    def to_part(self, data: bytes) -> bytes: ...
    def to_stored(self, data: bytes, location: str) -> bytes:
        """Return the constant's contents for ``data``, the part's contents.

        Raises ``CodecError`` ``onnx.zero-point``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Points:
    """A conversion of zero points: packed integers in the constant, floats of ``dtype`` in the part.

    The integers have ``bits`` bits; rows begin at bytes.
    """

    rows: int
    per_row: int
    bits: int
    signed: bool
    dtype: str

    @property
    def part_bytes(self) -> int:
        return self.rows * self.per_row * DTYPES[self.dtype].bits // 8

    @property
    def stored_bytes(self) -> int:
        return self.rows * -(-self.per_row * self.bits // 8)

    def to_part(self, data: bytes) -> bytes:
        points = unpack_rows(data, self.rows, self.per_row, self.bits, signed=self.signed)
        return bytes(file_bytes(points.reshape(-1).astype(numpy_dtype(self.dtype))))

    def to_stored(self, data: bytes, location: str) -> bytes:
        points = from_file(np.frombuffer(data, np.uint8), self.dtype).astype(np.float64)
        low = -(1 << (self.bits - 1)) if self.signed else 0
        is_integer = (points == np.rint(points)) & (points >= low) & (points < low + (1 << self.bits))
        if not bool(is_integer.all()):
            raise CodecError(
                "onnx.zero-point",
                f"expected zero points that are integers of {self.bits} bits, found other values; choose symmetric "
                "scales",
                where=location,
            )
        return pack_rows(points.astype(np.int16).reshape(self.rows, self.per_row), self.bits)


@dataclass(frozen=True, slots=True)
class Padded:
    """A conversion of rows: ``width`` bytes in the part, padded with zeros to ``stored`` bytes in the constant."""

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

    def to_stored(self, data: bytes, location: str) -> bytes:
        out = np.zeros((self.rows, self.stored), np.uint8)
        out[:, : self.width] = np.frombuffer(data, np.uint8).reshape(self.rows, self.width)
        return out.tobytes()


@dataclass(frozen=True, slots=True)
class Repeated:
    """A conversion of scales: one per row in the part, repeated ``times`` times in the constant, once per block."""

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

    def to_stored(self, data: bytes, location: str) -> bytes:
        rows = np.frombuffer(data, np.uint8).reshape(self.rows, 1, self.size)
        return np.repeat(rows, self.times, axis=1).tobytes()


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A conversion of positions: i64 element by element in the constant, u64 dimension by dimension in the part.

    If ``linear`` is set, the constant has one integer per element, the position in row-major order.
    """

    dims: tuple[int, ...]
    count: int
    linear: bool

    @property
    def part_bytes(self) -> int:
        return 8 * self.count * len(self.dims)

    @property
    def stored_bytes(self) -> int:
        return 8 * self.count * (1 if self.linear else len(self.dims))

    def to_part(self, data: bytes) -> bytes:
        stored = np.frombuffer(data, "<i8")
        if not self.linear:
            return np.ascontiguousarray(stored.reshape(self.count, len(self.dims)).T).tobytes()
        axes = np.empty((len(self.dims), self.count), "<i8")
        positions = stored
        for axis in range(len(self.dims) - 1, 0, -1):
            positions, axes[axis] = np.divmod(positions, max(self.dims[axis], 1))
        axes[0] = positions
        return axes.tobytes()

    def to_stored(self, data: bytes, location: str) -> bytes:
        axes = np.frombuffer(data, "<i8").reshape(len(self.dims), self.count)
        if not self.linear:
            return np.ascontiguousarray(axes.T).tobytes()
        positions = np.zeros(self.count, "<i8")
        for axis, size in zip(axes, self.dims, strict=True):
            positions = positions * size + axis
        return positions.astype("<i8").tobytes()


@dataclass(frozen=True, slots=True)
class DequantizedValues:
    """The values that ``DequantizeLinear`` computes: ``(codes - zero) * scales`` in f32, rounded to ``type``.

    ``axis`` is the axis along which scales differ, or None if one scale applies to all elements. If scales have the
    rank of the codes, ``block`` elements along ``axis`` share a scale; otherwise ``block`` is 0. ``factor`` is a single
    scale that multiplies all ``scales``, or None.
    """

    codes: Constant
    scales: Constant
    zero: Constant | None
    type: OnnxType
    axis: int | None = None
    block: int = 0
    factor: Constant | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of the values."""
        return self.type.nbytes(self.codes.count)

    @property
    def stored(self) -> int:
        """The number of bytes of the constants from which the values are computed."""
        constants = (self.codes, self.scales, self.zero, self.factor)
        return sum(constant.nbytes for constant in constants if constant is not None)

    @property
    def making(self) -> int:
        """Maximum bytes of memory for the computation."""
        return 24 * self.codes.count + 2 * self.stored

    def compute(self, read: Callable[[Constant], bytes]) -> bytes:
        """Compute the values; ``read`` returns the stored bytes of a constant."""
        result = _floats(self.codes, read)
        if self.zero is not None:
            result = result - self._spread(_floats(self.zero, read))
        with np.errstate(all="ignore"):
            scales = _floats(self.scales, read)
            if self.factor is not None:
                scales = scales * _floats(self.factor, read).reshape(())
            result = result * self._spread(scales)
            return bytes(file_bytes(result.astype(numpy_dtype(self.type.dtype))))

    def _spread(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.axis is None:
            return values.reshape(())
        if self.block:
            return np.repeat(values, self.block, self.axis)[tuple(slice(size) for size in self.codes.dims)]
        return values.reshape([-1 if axis == self.axis else 1 for axis in range(len(self.codes.dims))])


def _floats(constant: Constant, read: Callable[[Constant], bytes]) -> np.ndarray[Any, Any]:
    """Return a constant's values, converted to f32."""
    data = read(constant)
    type = constant.type
    if type.integer and type.bits < 8:
        values = unpack_rows(data, 1, constant.count, type.bits, signed=type.signed).astype(np.float32)
    else:
        values = from_file(np.frombuffer(data, np.uint8), type.dtype).astype(np.float32)
    return values.reshape(constant.dims)


@dataclass(frozen=True, slots=True)
class ConstantPoint:
    """A repeated zero point in a constant: ``rows`` rows of ``per_row`` integers of ``bits`` bits.

    Every row begins at a byte.
    """

    point: int
    rows: int
    per_row: int
    bits: int

    def stored(self) -> bytes:
        """Return the bytes of the constant."""
        return pack_rows(np.full((1, self.per_row), self.point, np.int16), self.bits) * self.rows


@dataclass(frozen=True, slots=True)
class Slot:
    """The constant from which a part is read, and the storage type ``dtype`` and logical type of the part.

    ``conversion`` converts the constant's contents to the part's. ``values`` is set if the part contains values that
    the model computes from the constant.
    """

    constant: Constant
    dtype: str
    logical: str = ""
    conversion: Conversion | None = None
    values: DequantizedValues | None = None

    @property
    def length(self) -> int:
        """The number of bytes of the part."""
        if self.values is not None:
            return self.values.nbytes
        return self.constant.nbytes if self.conversion is None else self.conversion.part_bytes
