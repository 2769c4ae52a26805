"""Element types of ONNX by number (onnx.proto3, ``TensorProto.DataType``)."""

from __future__ import annotations

from dataclasses import dataclass

STRING = 8


@dataclass(frozen=True, slots=True)
class OnnxType:
    """An element type of ONNX, with its number and Ingot's name.

    Parameters
    ----------
    code : int
    name : str
        ONNX's name.
    bits : int
        Bits of an element. Elements of less than 8 bits share a byte, the first in the low bits.
    dtype : str
        Ingot's name of the type; ONNX's name for integers of less than a byte, which Ingot has no name for.
    storage : str
        Storage type of a part.
    field : int
        Field of TensorProto that contains the numbers if there is no ``raw_data``.
    signed : bool
        Whether these are integers in two's complement.
    integer : bool
    """

    code: int
    name: str
    bits: int
    dtype: str
    storage: str
    field: int
    signed: bool = False
    integer: bool = False

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` elements."""
        return (count * self.bits + 7) // 8


FLOATS = 4
INT32S = 5
INT64S = 7
DOUBLES = 10
UINT64S = 11

TYPES = (
    OnnxType(1, "float", 32, "f32", "f32", FLOATS),
    OnnxType(2, "uint8", 8, "u8", "u8", INT32S, integer=True),
    OnnxType(3, "int8", 8, "i8", "i8", INT32S, signed=True, integer=True),
    OnnxType(4, "uint16", 16, "u16", "u16", INT32S, integer=True),
    OnnxType(5, "int16", 16, "i16", "i16", INT32S, signed=True, integer=True),
    OnnxType(6, "int32", 32, "i32", "i32", INT32S, signed=True, integer=True),
    OnnxType(7, "int64", 64, "i64", "i64", INT64S, signed=True, integer=True),
    OnnxType(9, "bool", 8, "bool", "bool", INT32S),
    OnnxType(10, "float16", 16, "f16", "f16", INT32S),
    OnnxType(11, "double", 64, "f64", "f64", DOUBLES),
    OnnxType(12, "uint32", 32, "u32", "u32", UINT64S, integer=True),
    OnnxType(13, "uint64", 64, "u64", "u64", UINT64S, integer=True),
    OnnxType(14, "complex64", 64, "complex64", "f32", FLOATS),
    OnnxType(15, "complex128", 128, "complex128", "f64", DOUBLES),
    OnnxType(16, "bfloat16", 16, "bf16", "bf16", INT32S),
    OnnxType(17, "float8e4m3fn", 8, "f8_e4m3fn", "u8", INT32S),
    OnnxType(18, "float8e4m3fnuz", 8, "f8_e4m3fnuz", "u8", INT32S),
    OnnxType(19, "float8e5m2", 8, "f8_e5m2", "u8", INT32S),
    OnnxType(20, "float8e5m2fnuz", 8, "f8_e5m2fnuz", "u8", INT32S),
    OnnxType(21, "uint4", 4, "uint4", "u8", INT32S, integer=True),
    OnnxType(22, "int4", 4, "int4", "u8", INT32S, signed=True, integer=True),
    OnnxType(23, "float4e2m1", 4, "f4_e2m1fn", "u8", INT32S),
    OnnxType(24, "float8e8m0", 8, "f8_e8m0fnu", "u8", INT32S),
    OnnxType(25, "uint2", 2, "uint2", "u8", INT32S, integer=True),
    OnnxType(26, "int2", 2, "int2", "u8", INT32S, signed=True, integer=True),
)
BY_CODE = {row.code: row for row in TYPES}
BY_NAME = {row.name: row for row in TYPES}
BY_DTYPE = {row.dtype: row for row in TYPES}
FLOATING = ("f32", "f16", "bf16")
"""Types of scales and of values computed with them."""
