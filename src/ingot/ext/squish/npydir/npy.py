"""Read and write the header of a ``.npy`` file by ``numpy.lib.format``, with checks against hostile headers.

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

from ingot.core.numeric.dtypes import DTYPES, element_count
from ingot.errors import FormatError, IngotError, UnsupportedError

MAGIC = numpy_format.MAGIC_PREFIX
MAX_HEADER = 10_000
"""Limit on the header size in bytes, as in ``numpy.load``: evaluating longer literals can exhaust the stack."""

CODE_OF = {
    **{f"{code}{bits}": f"{code}{bits // 8}" for code in "fiu" for bits in (16, 32, 64)},
    "i8": "i1",
    "u8": "u1",
    "bool": "b1",
    "complex64": "c8",
    "complex128": "c16",
}
"""Element types that ``.npy`` files can have: NumPy's type code, without byte order, by canonical name."""
_NAME_OF = {code: name for name, code in CODE_OF.items()}

# Integers as Python 2 wrote them, for example 2L, which NumPy converts with a warning.
_LONG = re.compile(rb"[0-9]L")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """Contents of a header: element type (canonical name), shape, and byte offset of the values in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].bits // 8

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.offset + self.nbytes


def header_span(head: bytes, location: str) -> int:
    """Return the size in bytes of the preamble and the header, from the first 12 bytes of a file.

    Raises ``FormatError``: ``npydir.npy-magic``, ``npydir.npy-truncated``, ``npydir.npy-version``,
    ``npydir.npy-header``.
    """
    if head[:6] != MAGIC[: len(head)] or not head:
        raise FormatError(
            "npydir.npy-magic", f"expected a file that begins with {MAGIC!r}, found {head[:6]!r}", where=location
        )
    if len(head) < 10 or (head[6] > 1 and len(head) < 12):
        raise FormatError(
            "npydir.npy-truncated", f"expected a header, found a file of {len(head)} bytes", where=location
        )
    if head[6] not in (1, 2, 3) or head[7]:
        raise FormatError(
            "npydir.npy-version", f"expected version 1.0, 2.0 or 3.0, found {head[6]}.{head[7]}", where=location
        )
    begin, width = (10, 2) if head[6] == 1 else (12, 4)
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > MAX_HEADER:
        raise FormatError(
            "npydir.npy-header", f"expected at most {MAX_HEADER} bytes of header, found {length}", where=location
        )
    return begin + length


def parse(head: bytes, location: str) -> NpyHeader:
    """Return the element type, the shape and the offset of values that a file's header states, after checking it.

    ``head`` are the first ``header_span`` bytes of the file: the preamble and the header.

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
        raise error.add_location(location) from None


@lru_cache(maxsize=1024)
def _parse(head: bytes) -> NpyHeader:
    """Return the header in ``head``, checked. Results are cached, because equal layers have equal headers."""
    text = head[10 if head[6] == 1 else 12 :]
    shape, fortran_order, dtype = _evaluate(head, text)
    name = _element_type(dtype, text)
    if any(text.count(key) != 1 for key in (b"descr", b"fortran_order", b"shape")):
        raise _refuse(text)
    if fortran_order:
        raise FormatError(
            "npydir.npy-fortran",
            "expected an array in C order, found Fortran order: save the result of numpy.ascontiguousarray",
        )
    if any(type(size) is not int or size < 0 for size in shape):
        raise _refuse(text)
    nbytes = DTYPES[name].bits // 8
    element_count((*shape, nbytes), "npydir.npy-shape", "")
    if len(head) % min(nbytes, 8):
        raise FormatError(
            "npydir.npy-alignment",
            f"expected values at a multiple of their size, found them at offset {len(head)}: save the array again",
        )
    return NpyHeader(name, shape, len(head))


def check_size(header: NpyHeader, size: int, location: str) -> None:
    """Refuse a file of ``size`` bytes that is shorter or longer than its header and values."""
    if size < header.size:
        raise FormatError(
            "npydir.npy-truncated",
            f"expected {header.size} bytes for {header.dtype} of shape {list(header.shape)}, found {size}",
            where=location,
        )
    if size > header.size:
        raise FormatError(
            "npydir.npy-trailing", f"expected the file to end after {header.size} bytes, found {size}", where=location
        )


def encode(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the preamble and the header, byte for byte as ``numpy.save`` (NumPy 2) writes them."""
    buffer = BytesIO()
    descr = np.dtype(f"<{CODE_OF[dtype]}").str
    numpy_format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    return buffer.getvalue()


def _evaluate(head: bytes, text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether the order is Fortran order, and element type, as NumPy reads them."""
    if _LONG.search(text):
        raise _refuse(text)
    # Version 3.0 differs from 2.0 only in the encoding of field names, and arrays with fields are refused.
    read = numpy_format.read_array_header_1_0 if head[6] == 1 else numpy_format.read_array_header_2_0
    try:
        return read(BytesIO(head[8:]), max_header_size=MAX_HEADER)
    except Exception as error:  # NumPy does not convert errors of Python's tokenizer, parser and literals
        raise _refuse(text) from error


def _refuse(text: bytes) -> FormatError:
    return FormatError(
        "npydir.npy-header",
        f"expected a dictionary of descr, fortran_order and shape, found {text.strip()[:80]!r}",
    )


def _element_type(dtype: np.dtype[Any], text: bytes) -> str:
    """Return the canonical name of the header's element type; refuse a spelling that NumPy does not write."""
    if dtype.hasobject:
        raise FormatError(
            "npydir.npy-object",
            "expected numbers, found Python objects, which are a pickle that can run code: Ingot never opens them",
        )
    order = dtype.str[0]
    code = dtype.str[1:]
    if dtype.fields is not None or dtype.subdtype is not None:
        raise UnsupportedError("expected one element type, found a structured one", rule="npydir.npy-dtype")
    if order == ">" and code in _NAME_OF:
        raise FormatError(
            "npydir.npy-byte-order",
            f"expected little-endian values, found big-endian {dtype.str!r}: save the array as little-endian",
        )
    if code not in _NAME_OF:
        hint = (
            " (NumPy writes bfloat16 as raw bytes that no program can read back: save float16 or float32)"
            if code == "V2"
            else ""
        )
        raise UnsupportedError(
            f"expected a number type, for example '<f4', found {dtype.str!r}{hint}", rule="npydir.npy-dtype"
        )
    spellings = (f"{quote}{descr}{quote}" for quote in "'\"" for descr in (dtype.str, f"<{code}"))
    if not any(spelling.encode() in text for spelling in spellings):
        raise UnsupportedError(
            f"expected the element type to be spelled {dtype.str!r}, found {text.strip()[:80]!r}",
            rule="npydir.npy-dtype",
        )
    return _NAME_OF[code]
