"""The table of element types, with the names that containers and frameworks use for them.

Storage types and logical types are those of zTensor 1.2 section 2. The other 8-bit and sub-byte floats are those of
safetensors 0.8, named like in ``ml_dtypes`` and the OCP MX specification.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ingot.core.runtime import native
from ingot.errors import FormatError, IntegrityError, UnsupportedError

MAX_RANK = 64


def element_count(shape: Sequence[int], rule: str, location: str) -> int:
    """Return the product of ``shape``; raise ``FormatError`` if it passes 2**63 - 1, or with more than 64 dimensions.

    The product of the non-zero sizes must not pass 2**63 - 1 either, because NumPy and torch cannot compute strides for
    shapes such as ``[2**62, 2**62, 0]``.
    """
    if len(shape) > MAX_RANK:
        raise FormatError(rule, f"expected at most {MAX_RANK} dimensions, found {len(shape)}", where=location)
    count = 1
    nonzero = 1
    for size in shape:
        count *= size
        nonzero *= size or 1
        if nonzero > 2**63 - 1:
            raise FormatError(rule, f"the product of shape {list(shape)} passes 2**63", where=location)
    return count


def require_inside(offset: int, length: int, size: int, location: str) -> None:
    """Raise ``IntegrityError`` ``store.short-read`` if a range is not inside a source of ``size`` bytes."""
    if offset < 0 or length < 0 or offset + length > size:
        raise IntegrityError(
            "store.short-read", f"expected {length} bytes at {offset}, found {size} in all", where=location
        )


@dataclass(frozen=True, slots=True)
class DType:
    """An element type, with its names in containers and frameworks.

    Parameters
    ----------
    name : str
        Ingot's canonical name, equal to zTensor's ``dtype`` or ``type``.
    bits : int
        Bits of one logical element.
    category : str
        ``f`` float, ``i`` signed, ``u`` unsigned, ``b`` bool, ``c`` complex.
    storage : str
        Canonical name of the storage primitive (zTensor ``dtype``) in which values are stored.
    numpy : str
        Name of the attribute of ``numpy`` or ``ml_dtypes``.
    safetensors : str or None
        Name in a safetensors header.
    torch : str or None
        Name of the attribute of ``torch``.
    """

    name: str
    bits: int
    category: str
    storage: str
    numpy: str
    safetensors: str | None
    torch: str | None

    @property
    def is_storage(self) -> bool:
        """Whether the type is one of zTensor's 13 storage primitives."""
        return self.storage == self.name

    @property
    def is_float(self) -> bool:
        return self.category == "f"

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` elements; sub-byte types are packed, with padding in the last
        byte.
        """
        return (count * self.bits + 7) // 8


_ROWS = (
    DType("f64", 64, "f", "f64", "float64", "F64", "float64"),
    DType("f32", 32, "f", "f32", "float32", "F32", "float32"),
    DType("f16", 16, "f", "f16", "float16", "F16", "float16"),
    DType("bf16", 16, "f", "bf16", "bfloat16", "BF16", "bfloat16"),
    DType("i64", 64, "i", "i64", "int64", "I64", "int64"),
    DType("i32", 32, "i", "i32", "int32", "I32", "int32"),
    DType("i16", 16, "i", "i16", "int16", "I16", "int16"),
    DType("i8", 8, "i", "i8", "int8", "I8", "int8"),
    DType("u64", 64, "u", "u64", "uint64", "U64", "uint64"),
    DType("u32", 32, "u", "u32", "uint32", "U32", "uint32"),
    DType("u16", 16, "u", "u16", "uint16", "U16", "uint16"),
    DType("u8", 8, "u", "u8", "uint8", "U8", "uint8"),
    DType("bool", 8, "b", "bool", "bool", "BOOL", "bool"),
    DType("f8_e4m3fn", 8, "f", "u8", "float8_e4m3fn", "F8_E4M3", "float8_e4m3fn"),
    DType("f8_e5m2", 8, "f", "u8", "float8_e5m2", "F8_E5M2", "float8_e5m2"),
    DType("f8_e4m3fnuz", 8, "f", "u8", "float8_e4m3fnuz", "F8_E4M3FNUZ", "float8_e4m3fnuz"),
    DType("f8_e5m2fnuz", 8, "f", "u8", "float8_e5m2fnuz", "F8_E5M2FNUZ", "float8_e5m2fnuz"),
    DType("f8_e8m0fnu", 8, "f", "u8", "float8_e8m0fnu", "F8_E8M0", "float8_e8m0fnu"),
    DType("f6_e2m3fn", 6, "f", "u8", "float6_e2m3fn", "F6_E2M3", None),
    DType("f6_e3m2fn", 6, "f", "u8", "float6_e3m2fn", "F6_E3M2", None),
    DType("f4_e2m1fn", 4, "f", "u8", "float4_e2m1fn", "F4", None),
    DType("complex64", 64, "c", "f32", "complex64", "C64", "complex64"),
    DType("complex128", 128, "c", "f64", "complex128", None, "complex128"),
)

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}
STORAGE_DTYPES: dict[str, DType] = {row.name: row for row in _ROWS if row.is_storage}
BY_SAFETENSORS: dict[str, DType] = {row.safetensors: row for row in _ROWS if row.safetensors}
_BY_NUMPY: dict[str, DType] = {row.numpy: row for row in _ROWS}
_ALIASES: dict[str, DType] = {
    **{row.torch: row for row in _ROWS if row.torch},
    **_BY_NUMPY,
    **BY_SAFETENSORS,
    **DTYPES,
    "fp32": DTYPES["f32"],
    "fp16": DTYPES["f16"],
    "half": DTYPES["f16"],
}


def dtype(spec: Any) -> DType:
    """Return the ``DType`` for any name in the table, a NumPy dtype or scalar type, a torch dtype, or a ``DType``.

    Raises
    ------
    UnsupportedError
        The name is not in the table.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, np.dtype):  # the fast path: each call of a kernel needs it
        return _from_numpy(spec)
    return _from_name(spec if isinstance(spec, str) else _name_of(spec))


@lru_cache(maxsize=256)
def _from_numpy(spec: np.dtype[Any]) -> DType:
    return _from_name(str(spec.name))


def _from_name(text: str) -> DType:
    dtype = _ALIASES.get(text) or _ALIASES.get(text.lower()) or _ALIASES.get(text.upper())
    if dtype is None:
        raise UnsupportedError(
            f"expected an element type such as {', '.join(list(DTYPES)[:4])}; found {text!r}", rule="dtype.unknown"
        )
    return dtype


def _name_of(spec: Any) -> str:
    if str(spec).startswith("torch."):
        return str(spec).removeprefix("torch.")
    try:
        return str(np.dtype(spec).name)
    except TypeError:
        return str(spec)


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the native-endian NumPy dtype of a canonical name; ``ml_dtypes`` is imported only when needed."""
    attribute = DTYPES[name].numpy
    if hasattr(np, attribute) or attribute == "bool":
        return np.dtype(attribute)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, attribute))
    return dtype


@cache
def little_endian(storage: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype of a storage primitive, as files store it.

    For ``bf16`` this is ``<u2``, because NumPy's extension types have no byte order.
    """
    code = {"bf16": "u2", "bool": "b1"}.get(storage)
    if code is None:
        row = STORAGE_DTYPES[storage]
        code = f"{row.category}{row.bits // 8}"
    return np.dtype("<" + code)


def from_file(raw: np.ndarray[Any, np.dtype[np.uint8]], storage: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return bytes of a file as values of a storage primitive: a view, or on a big-endian host a swapped copy."""
    return native_order(raw.view(little_endian(storage))).view(numpy_dtype(storage))


def file_bytes(array: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    """Return the little-endian bytes of a C-order array: a view, or a swapped copy of a big-endian array."""
    if not array.size:
        return memoryview(b"")
    if array.dtype.itemsize > 1 and (sys.byteorder == "big") == array.dtype.isnative:
        is_builtin = array.dtype.kind in "biufc"
        array = array.byteswap() if is_builtin else array.view(f"u{array.dtype.itemsize}").byteswap()
    return array.reshape(-1).view(np.uint8).data


def native_order(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array in this machine's byte order: the array itself, or a swapped copy."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ("f32", "f16", "bf16", "f64")

LARGEST = {"f16": 65504.0, "bf16": float.fromhex("0x1.fep127"), "f32": float.fromhex("0x1.fffffep127")}
"""The largest finite number of each type that decoders produce."""

TINY = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126}
"""The smallest positive normal number of each type."""

SMALLEST = {
    "f16": 2.0**-24,
    "bf16": 2.0**-133,
    "f32": 2.0**-149,
    "f8_e4m3fn": 2.0**-9,
    "f8_e5m2": 2.0**-16,
    "f8_e8m0fnu": 2.0**-127,
}
"""The smallest positive number of each type."""


def float_name(array: Array) -> str:
    """Return the canonical name of an array's element type; ``UnsupportedError`` unless it is one of ``FLOATS``."""
    name = dtype(array.dtype).name
    if name not in FLOATS:
        raise UnsupportedError(f"expected element type {', '.join(FLOATS)}, found {name}", rule="float.dtype")
    return name


def as_bits(array: Array) -> Array:
    """Return ``array`` as kernels accept it: in C order, aligned, with f16 and bf16 as uint16.

    The result is a view if possible.
    """
    flags = array.flags
    plain = array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))
    return plain.view(np.uint16) if plain.dtype.itemsize == 2 else plain


def written(out: Array) -> Array:
    """Return a view of ``out`` into which kernels write: f16 and bf16 as uint16. Raises ``ValueError`` if it needs a
    copy.
    """
    if not out.flags.carray:
        raise ValueError("expected a writable, aligned output in C order")
    return out.view(np.uint16) if out.dtype.itemsize == 2 else out


def cast_into(array: Array, out: Array) -> None:
    """Write ``array``, rounded to nearest even, into ``out`` (C order, the same number of elements).

    Values that are too large become infinite, and NaN stays NaN; callers that must not lose values check before.
    """
    target = written(out)
    native.kernels.cast(as_bits(array), float_name(array), target, float_name(out))


def cast(array: Array, target: str) -> Array:
    """Return ``array`` rounded to the float type ``target``, in a new array; see ``cast_into``."""
    out = np.empty(array.shape, numpy_dtype(target))
    cast_into(array, out)
    return out
