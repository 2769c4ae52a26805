"""Element types of MIL, with their different numbers in ``MIL.proto``'s ``DataType`` and in blob storage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MilType:
    """An element type of MIL, with its two numbers and Ingot's name.

    ``code`` is the number in MIL.proto, ``blob`` is the number in blob storage version 2, ``bits`` is the size of an
    element. ``dtype`` is Ingot's name; None for types of less than a byte, which are packed into one stream, low bits
    first. ``signed`` applies to integers.
    """

    name: str
    code: int
    blob: int
    bits: int
    dtype: str | None
    signed: bool = False

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` elements."""
        return (count * self.bits + 7) // 8

    @property
    def integer(self) -> bool:
        """Whether the elements are integers."""
        return "int" in self.name


_TYPES = (
    MilType("fp16", 10, 1, 16, "f16"),
    MilType("fp32", 11, 2, 32, "f32"),
    MilType("bf16", 13, 5, 16, "bf16"),
    MilType("int8", 21, 4, 8, "i8", True),
    MilType("int16", 22, 6, 16, "i16", True),
    MilType("int32", 23, 14, 32, "i32", True),
    MilType("int4", 25, 8, 4, None, True),
    MilType("uint8", 31, 3, 8, "u8"),
    MilType("uint16", 32, 7, 16, "u16"),
    MilType("uint32", 33, 15, 32, "u32"),
    MilType("uint4", 35, 11, 4, None),
    MilType("uint2", 36, 10, 2, None),
    MilType("uint1", 37, 9, 1, None),
    MilType("uint6", 38, 13, 6, None),
    MilType("uint3", 39, 12, 3, None),
    MilType("fp8e4m3fn", 40, 16, 8, "f8_e4m3fn"),
    MilType("fp8e5m2", 41, 17, 8, "f8_e5m2"),
)

BY_CODE = {row.code: row for row in _TYPES}
BY_NAME = {row.name: row for row in _TYPES}
BY_DTYPE = {row.dtype: row for row in _TYPES if row.dtype}
STRING = 2
BOOL = MilType("bool", 1, 0, 8, None)
"""The type of text settings of operations; tensors never have it."""


def integer_type(bits: int, signed: bool) -> MilType | None:
    """Return the integer type of ``bits`` bits; None if MIL has none."""
    return BY_NAME.get(f"{'' if signed else 'u'}int{bits}")
