"""The header of a ``.npy`` file, read and written by ``numpy.lib.format``, with checks of hostile headers.

NumPy evaluates the dictionary in the header as literals, which runs no code, and never unpickles here. A header is
refused before NumPy reads it if it is longer than ``MAX_HEADER``, and after if it describes anything but little-endian
numbers in C order. Spellings that only NumPy understands are refused, because other readers would misread them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as numpy_format

from ingot.core.bytes.checked import element_count
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, IngotError, UnsupportedError

MAGIC = numpy_format.MAGIC_PREFIX
MAX_HEADER = 10_000
"""Bytes of the longest header, as ``numpy.load`` limits them: evaluating longer literals can exhaust the stack."""

CODE_OF = {
    **{f"{code}{bits}": f"{code}{bits // 8}" for code in "fiu" for bits in (16, 32, 64)},
    "i8": "i1",
    "u8": "u1",
    "bool": "b1",
    "complex64": "c8",
    "complex128": "c16",
}
"""Element types that a ``.npy`` file has a name for, and that name without its byte order."""
_NAME_OF = {code: name for name, code in CODE_OF.items()}

# Integers of Python 2 such as 2L, which NumPy converts with a warning.
_LONG = re.compile(rb"[0-9]L")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a header says: element type (canonical name), shape, and where the values begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * DTYPES[self.dtype].bits // 8

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset + self.nbytes


def header_span(head: bytes, where: str) -> int:
    """Return how many bytes the preamble and the header take, from a file's first 12 bytes.

    Raises ``FormatError``: ``npydir.npy-magic``, ``npydir.npy-truncated``, ``npydir.npy-version``,
    ``npydir.npy-header``.
    """
    if head[:6] != MAGIC[: len(head)] or not head:
        raise FormatError(
            "npydir.npy-magic", f"expected a file that begins with {MAGIC!r}, found {head[:6]!r}", where=where
        )
    if len(head) < 10 or (head[6] > 1 and len(head) < 12):
        raise FormatError("npydir.npy-truncated", f"expected a header, found a file of {len(head)} bytes", where=where)
    if head[6] not in (1, 2, 3) or head[7]:
        raise FormatError(
            "npydir.npy-version", f"expected version 1.0, 2.0 or 3.0, found {head[6]}.{head[7]}", where=where
        )
    begin, width = (10, 2) if head[6] == 1 else (12, 4)
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > MAX_HEADER:
        raise FormatError(
            "npydir.npy-header", f"expected at most {MAX_HEADER} bytes of header, found {length}", where=where
        )
    return begin + length


def parse(head: bytes, where: str) -> NpyHeader:
    """Check preamble and header, ``header_span`` bytes of them.

    Raises
    ------
    FormatError
        ``npydir.npy-header``, ``npydir.npy-object``, ``npydir.npy-byte-order``, ``npydir.npy-fortran``,
        ``npydir.npy-shape``, ``npydir.npy-alignment``.
    UnsupportedError
        ``npydir.npy-dtype``.
    """
    try:
        return _parse(head)
    except IngotError as error:
        raise error.at(where) from None


@lru_cache(maxsize=1024)
def _parse(head: bytes) -> NpyHeader:
    """Check a header; cached because the arrays of equal layers have equal headers."""
    text = head[10 if head[6] == 1 else 12 :]
    shape, fortran_order, dtype = _evaluate(head, text)
    name = _element_type(dtype, text)
    if any(text.count(key) != 1 for key in (b"descr", b"fortran_order", b"shape")):
        raise _refuse(text)
    if fortran_order:
        raise FormatError(
            "npydir.npy-fortran",
            "expected an array in C order, found Fortran order: save numpy.ascontiguousarray of it",
        )
    if any(type(size) is not int or size < 0 for size in shape):
        raise _refuse(text)
    nbytes = DTYPES[name].bits // 8
    element_count((*shape, nbytes), "npydir.npy-shape", "")
    if len(head) % min(nbytes, 8):
        raise FormatError(
            "npydir.npy-alignment", f"expected values at a multiple of their size, found them at {len(head)}"
        )
    return NpyHeader(name, shape, len(head))


def check_size(header: NpyHeader, size: int, where: str) -> None:
    """Refuse a file of ``size`` bytes that ends before its values do, or does not end there."""
    if size < header.size:
        raise FormatError(
            "npydir.npy-truncated",
            f"expected {header.size} bytes for {header.dtype} of shape {list(header.shape)}, found {size}",
            where=where,
        )
    if size > header.size:
        raise FormatError(
            "npydir.npy-trailing", f"expected the file to end after {header.size} bytes, found {size}", where=where
        )


def encode(dtype: str, shape: Sequence[int]) -> bytes:
    """Return preamble and header, byte for byte as ``numpy.save`` (NumPy 2) writes them."""
    buffer = BytesIO()
    descr = np.dtype(f"<{CODE_OF[dtype]}").str
    numpy_format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    return buffer.getvalue()


def _evaluate(head: bytes, text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and element type as NumPy reads them."""
    if _LONG.search(text):
        raise _refuse(text)
    # Version 3.0 differs from 2.0 only in the encoding of field names, and arrays with fields are refused.
    read = numpy_format.read_array_header_1_0 if head[6] == 1 else numpy_format.read_array_header_2_0
    try:
        return read(BytesIO(head[8:]), max_header_size=MAX_HEADER)
    except Exception as error:  # NumPy lets errors of Python's tokenizer, parser and literals through
        raise _refuse(text) from error


def _refuse(text: bytes) -> FormatError:
    return FormatError(
        "npydir.npy-header",
        f"expected a dictionary of descr, fortran_order and shape, found {text.strip()[:80]!r}",
    )


def _element_type(dtype: np.dtype[Any], text: bytes) -> str:
    """Return the canonical name of an element type that is spelled as NumPy writes it."""
    if dtype.hasobject:
        raise FormatError(
            "npydir.npy-object",
            "found an array of Python objects, which is a pickle and can run code: Ingot never opens one",
        )
    order, code = dtype.str[0], dtype.str[1:]
    if dtype.fields is not None or dtype.subdtype is not None:
        raise UnsupportedError("expected one element type, found a structured one", rule="npydir.npy-dtype")
    if order == ">" and code in _NAME_OF:
        raise FormatError(
            "npydir.npy-byte-order",
            f"expected little-endian values, found big-endian {dtype.str!r}: save them again",
        )
    if code not in _NAME_OF:
        hint = (
            " (NumPy writes bfloat16 so, which nobody can read back: save float16 or float32)" if code == "V2" else ""
        )
        raise UnsupportedError(f"expected numbers such as '<f4', found {dtype.str!r}{hint}", rule="npydir.npy-dtype")
    spellings = (f"{quote}{descr}{quote}" for quote in "'\"" for descr in (dtype.str, f"<{code}"))
    if not any(spelling.encode() in text for spelling in spellings):
        raise UnsupportedError(
            f"expected the element type to be spelled {dtype.str!r}, found {text.strip()[:80]!r}",
            rule="npydir.npy-dtype",
        )
    return _NAME_OF[code]
