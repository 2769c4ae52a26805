"""Codes of the kernel-format enum and their published properties, and bit streams of codes.

``spec/ane-kernels.md`` has the tables. The compiler checks the ranges 7 to 27 (palettes) and 28 to 30 (unity) (B25).
Names of the low codes are from FT; groups of four codes and bit widths are from DC; the codes 13 and 21 were traced
(M6). The order within a group is inferred from these two codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError, UsageError
from ingot.ext.ane.chips.descriptor import type_numbers

Array = np.ndarray[Any, np.dtype[Any]]

INT8 = 1
UINT8 = 2
INT16 = 3
FP16 = 4
E4M3 = 5
FP32 = 6
PALETTES = range(7, 28)
UNITIES = range(28, 31)
INT4 = 31
E2M1 = 41
ENTRY_TYPES = ("int8", "uint8", "half", "e4m3")
"""Types of a palette's entries, in the order of the codes of one width."""

_PRIMARY = {"int8": INT8, "uint8": UINT8, "half": FP16, "e4m3": E4M3}
_ENTRY_BYTES = {"int8": 1, "uint8": 1, "half": 2, "e4m3": 1}
_FIRST_OF_WIDTH = {1: 7, 2: 11, 3: 15, 4: 19, 6: 23}
_PALETTE8 = 27


@dataclass(frozen=True, slots=True)
class KernelFormat:
    """A code of the enum: its name, the bits per stored element, the type at the multiplier, and the evidence.

    ``underlying`` is the result of ``_ZinKernelFormatGetUnderlyingType``: ``int8``, ``uint8``, ``e4m3`` or ``half``. It
    is None if the result is not published.
    """

    code: int
    name: str
    bits: int | None
    underlying: str | None
    evidence: str
    source: str


def _rows() -> dict[int, KernelFormat]:
    rows = [
        KernelFormat(INT8, "int8", 8, "int8", "measured", "FT; M6 traces it"),
        KernelFormat(UINT8, "uint8", 8, "uint8", "decompiled", "FT"),
        KernelFormat(INT16, "int16", 16, None, "decompiled", "FT, DC: codegen refuses it"),
        KernelFormat(FP16, "fp16", 16, "half", "measured", "FT; M6 traces it"),
        KernelFormat(E4M3, "e4m3", 8, "e4m3", "contradicted", "FT; B36 says 6"),
        KernelFormat(FP32, "fp32", 16, "half", "decompiled", "FT, DC: stored in 16 bits"),
        KernelFormat(_PALETTE8, "palette8 of fp16", 8, "half", "inferred", "DC; a single code, so fp16 entries"),
        KernelFormat(28, "unity int8", None, "int8", "inferred", "B25: the range; the order is inferred"),
        KernelFormat(29, "unity uint8", None, "uint8", "inferred", "B25: the range; the order is inferred"),
        KernelFormat(30, "unity fp16", None, "half", "measured", "M6 traces it"),
        KernelFormat(INT4, "int4", 4, None, "decompiled", "FT; no released descriptor takes it"),
        KernelFormat(E2M1, "e2m1", 4, None, "decompiled", "FT; newer compilers only"),
    ]
    for bits, first in _FIRST_OF_WIDTH.items():
        for offset, entry in enumerate(ENTRY_TYPES):
            traced = first + offset in (13, 21)
            evidence, source = ("measured", "M6 traces it") if traced else ("inferred", "DC: width; order inferred")
            rows.append(KernelFormat(first + offset, f"palette{bits} of {entry}", bits, entry, evidence, source))
    return {row.code: row for row in rows}


FORMATS = _rows()
"""Every code with a published property."""


def kernel_format(code: int) -> KernelFormat:
    """Return the published properties of a code. Raises ``UnsupportedError`` ``ane.kernel-format`` for other codes,
    such as 0 (no kernel)."""
    if code not in FORMATS:
        raise UnsupportedError(f"expected a known kernel format, found {code}", rule="ane.kernel-format")
    return FORMATS[code]


def palette_code(bits: int, entry: str) -> int:
    """Return the code of a palette with ``bits``-wide indices and entries of one of ``ENTRY_TYPES``.

    Raises
    ------
    UsageError
        ``ane.palette``: no such width or entry type, or 8 bits with entries other than ``half`` (a quantized palette
        has fewer than 256 entries, B25).
    """
    if entry not in ENTRY_TYPES or bits not in (*_FIRST_OF_WIDTH, 8):
        raise UsageError(
            f"expected 1, 2, 3, 4, 6 or 8 bits of {', '.join(ENTRY_TYPES)}; found {bits} bits of {entry}",
            rule="ane.palette",
        )
    if bits == 8:
        if entry != "half":
            raise UsageError(f"expected half entries in a palette of 256, found {entry}", rule="ane.palette")
        return _PALETTE8
    return _FIRST_OF_WIDTH[bits] + ENTRY_TYPES.index(entry)


def primary_code(entry: str) -> int:
    """Return the code of weights that are stored as ``entry``, one of ``ENTRY_TYPES``, without a palette."""
    return _PRIMARY[entry]


def unity_code(entry: str) -> int:
    """Return the code of an identity kernel of type ``entry``: int8, uint8 or half.

    Raises ``UsageError`` ``ane.palette`` for any other type.
    """
    if entry not in ENTRY_TYPES[:3]:
        raise UsageError(f"expected an identity of {', '.join(ENTRY_TYPES[:3])}, found {entry}", rule="ane.palette")
    return UNITIES[ENTRY_TYPES.index(entry)]


def is_palette(code: int) -> bool:
    """Return whether a code is a palette: ``code - 7 < 0x15`` in unsigned arithmetic (B25)."""
    return code in PALETTES


def is_unity(code: int) -> bool:
    """Return whether a code is a unity format, a scaled identity: ``code - 0x1c < 3`` in unsigned arithmetic (B25)."""
    return code in UNITIES


def bit_depth(code: int) -> int:
    """Return bits per stored element or index (``_ZinKernelFormatGetBitDepth``).

    Raises
    ------
    UnsupportedError
        ``ane.kernel-format``; ``ane.unknown-cell`` for the unity formats, whose depth is not published.
    """
    bits = kernel_format(code).bits
    if bits is None:
        raise _unknown("bit depth", code)
    return bits


def palette_format(code: int) -> int:
    """Return the primary code of a palette's entries (``_ZinKernelFormatGetPaletteFormat``): 1, 2, 4 or 5.

    Raises
    ------
    UsageError
        ``ane.palette``: the code is not a palette, 7 to 27.
    """
    if not is_palette(code):
        raise UsageError(f"expected a palette, kernel format 7 to 27; found {code}", rule="ane.palette")
    return _PRIMARY[underlying_type(code)]


def underlying_type(code: int) -> str:
    """Return ``int8``, ``uint8``, ``e4m3`` or ``half`` (``_ZinKernelFormatGetUnderlyingType``).

    Raises
    ------
    UnsupportedError
        ``ane.kernel-format``; ``ane.unknown-cell`` for the codes whose type is not published.
    """
    underlying = kernel_format(code).underlying
    if underlying is None:
        raise _unknown("underlying type", code)
    return underlying


def palette_lut_bytes(code: int, count: int, vector: int = 1) -> int:
    """Return the number of bytes of ``count`` codebooks; each has 2**bits * vector entries (B25).

    This is ``_ZinKernelGetPaletteLUTSize`` as B25 describes it. According to DC, the function takes the vector size
    instead of the number of codebooks.

    Raises
    ------
    UsageError
        ``ane.palette``.
    """
    stride = (1 << bit_depth(code)) * vector * _ENTRY_BYTES[underlying_type(code)] if palette_format(code) else 0
    return stride * count


def typeno(code: int) -> int:
    """Return the type number in the descriptor (``ZinKernelFormatGetTypeno``).

    Raises
    ------
    UnsupportedError
        ``ane.unknown-cell``: the number is not published, as for 12 of the 24 numbers. For palettes, only the number 8
        of their tables is published.
    """
    if code in _TYPE_NAMES:
        return type_numbers()[_TYPE_NAMES[code]]
    raise _unknown("type number", kernel_format(code).code)


_TYPE_NAMES = {
    INT8: "int8", UINT8: "uint8", INT16: "int16", FP16: "half", FP32: "float", E4M3: "e4m3", INT4: "int4",
}  # fmt: skip


def index_typeno(bits: int) -> int:
    """Return the type number of a palette's indices, unsigned integers of 4, 6 or 8 bits; 0 for other widths."""
    return type_numbers().get(f"uint{bits}", 0)


def _unknown(subject: str, code: int) -> UnsupportedError:
    return UnsupportedError(
        f"the {subject} of kernel format {code} ({FORMATS[code].name}) is not published",
        rule="ane.unknown-cell",
    )


def pack_lsb(codes: Array, bits: int) -> Array:
    """Return unsigned codes of ``bits`` (1 to 8) as packed bytes, with the first code in the lowest bits (B7).

    The last byte is padded with zero bits.
    """
    flat = np.ascontiguousarray(codes, np.uint8).reshape(-1, 1)
    return np.packbits(np.unpackbits(flat, axis=1, bitorder="little")[:, :bits].reshape(-1), bitorder="little")


def unpack_lsb(data: Array, bits: int, count: int) -> Array:
    """Return the first ``count`` codes, as uint8, of bytes that ``pack_lsb`` packed."""
    flat = np.unpackbits(np.ascontiguousarray(data), count=count * bits, bitorder="little")
    padded = np.zeros((count, 8), np.uint8)
    padded[:, :bits] = flat.reshape(count, bits)
    return np.packbits(padded, axis=1, bitorder="little").reshape(-1)


def e4m3_numbers(data: Array) -> Array:
    """Return the values of E4M3 bytes as float32.

    E4M3 has bias 7, a maximum of 448, NaN if all bits except the sign are set, and no infinity (B36).
    """
    code = np.arange(256)
    exponent = code >> 3 & 15
    mantissa = code & 7
    size = np.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))
    table = np.where(code & 0x80, -size, size).astype(np.float32)
    table[[0x7F, 0xFF]] = np.nan
    numbers: Array = table[data]
    return numbers
