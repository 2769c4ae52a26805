"""The header of a ``.npy`` file (NumPy Enhancement Proposal 1), to a checked description and back.

Magic ``\\x93NUMPY``, two bytes of version, the header's length (u16, from version 2 on u32), then a Python dictionary
as text, which is matched by a pattern here and never evaluated. Only what this container is made of passes:
little-endian numbers in C order; no objects, which are pickles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ingot.core.checked import element_count
from ingot.core.dtypes import DTYPES
from ingot.errors import FormatError, IngotError, UnsupportedError

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 16
_ALIGN = 64
# numpy.lib.format leaves room for the first size to grow in place.
_GROWTH = 21

_CODES = {
    **{f"{code}{bits // 8}": f"{code}{bits}" for code in "fiu" for bits in (16, 32, 64)},
    "i1": "i8",
    "u1": "u8",
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
}
CODE_OF = {name: code for code, name in _CODES.items()}
"""Element types that a ``.npy`` file has a name for, and that name without its byte order."""

_SPACE = rb"[ \t\n]*+"
_ENTRY = re.compile(
    _SPACE + rb"(?P<quote>['\"])(?P<key>[a-z_]{1,20})(?P=quote)" + _SPACE + rb":" + _SPACE + rb"(?P<value>"
    rb"'[^'\\\n]{0,80}'|\"[^\"\\\n]{0,80}\"|True|False|\([0-9, \t\n]{0,2000}\)|\[)" + _SPACE
)
_SHAPE = re.compile(
    rb"\(" + _SPACE + rb"(?:(?:[0-9]{1,20}" + _SPACE + rb"," + _SPACE + rb")++(?:[0-9]{1,20}" + _SPACE + rb")?)?\)"
)
_VALUES = {
    "descr": re.compile(rb"'.*'|\".*\""),
    "fortran_order": re.compile(rb"True|False"),
    "shape": _SHAPE,
}


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
    """Check a header; layers are alike, and so are the headers of their arrays."""
    where = ""
    fields = _fields(head[10 if head[6] == 1 else 12 :], where)
    dtype = _dtype(fields["descr"], where)
    if fields["fortran_order"] != b"False":
        raise FormatError(
            "npydir.npy-fortran",
            "expected an array in C order, found Fortran order: save numpy.ascontiguousarray of it",
            where=where,
        )
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", fields["shape"]))
    element_count((*shape, DTYPES[dtype].bits // 8), "npydir.npy-shape", where)
    if len(head) % min(DTYPES[dtype].bits // 8, 8):
        raise FormatError(
            "npydir.npy-alignment",
            f"expected values at a multiple of their size, found them at {len(head)}",
            where=where,
        )
    return NpyHeader(dtype, shape, len(head))


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
    code = CODE_OF[dtype]
    order = "|" if DTYPES[dtype].bits == 8 else "<"
    text = f"{{'descr': '{order}{code}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    if shape:
        text += " " * (_GROWTH - len(repr(shape[0])))
    version, width = (1, 2) if len(text) + _ALIGN < 1 << 16 else (2, 4)
    begin = 8 + width
    length = -(-(begin + len(text) + 1) // _ALIGN) * _ALIGN - begin
    return MAGIC + bytes((version, 0)) + length.to_bytes(width, "little") + text.ljust(length - 1).encode() + b"\n"


def _fields(text: bytes, where: str) -> dict[str, bytes]:
    """Match the dictionary; each of its three keys once, in any order."""
    body = text.strip(b" \t\n")
    if body[:1] != b"{" or body[-1:] != b"}":
        raise _refuse(body[:80], where)
    fields: dict[str, bytes] = {}
    position, end = 1, len(body) - 1
    while body[position:end].strip(b" \t\n"):
        match = _ENTRY.match(body, position, end)
        if match is None or match["key"].decode() in fields:
            raise _refuse(body[position : position + 80], where)
        fields[match["key"].decode()] = match["value"]
        position = match.end()
        if match["value"] == b"[" or (position < end and body[position : position + 1] != b","):
            break
        position += 1
    if fields.get("descr") == b"[":
        raise UnsupportedError(
            "expected one element type, found a structured one", rule="npydir.npy-dtype", where=where
        )
    sound = all(pattern.fullmatch(fields.get(key, b"")) for key, pattern in _VALUES.items())
    if body[position:end].strip(b" \t\n") or len(fields) != len(_VALUES) or not sound:
        raise _refuse(body[:80], where)
    return fields


def _refuse(found: bytes, where: str) -> FormatError:
    return FormatError(
        "npydir.npy-header", f"expected a dictionary of descr, fortran_order and shape, found {found!r}", where=where
    )


def _dtype(descr: bytes, where: str) -> str:
    text = descr[1:-1].decode("latin-1")
    order, code = text[:1], text[1:]
    if "O" in text:
        raise FormatError(
            "npydir.npy-object",
            "found an array of Python objects, which is a pickle and can run code: Ingot never opens one",
            where=where,
        )
    if order == ">" and code in _CODES:
        raise FormatError(
            "npydir.npy-byte-order",
            f"expected little-endian values, found big-endian {text!r}: save them again",
            where=where,
        )
    if order not in "<|" or not order or code not in _CODES or (order == "|" and code[1:] != "1"):
        hint = (
            " (NumPy writes bfloat16 so, which nobody can read back: save float16 or float32)" if code == "V2" else ""
        )
        raise UnsupportedError(
            f"expected numbers such as '<f4', found {text[:80]!r}{hint}", rule="npydir.npy-dtype", where=where
        )
    return _CODES[code]
