"""Strict CBOR (RFC 7049; its successor RFC 8949 changed no bytes of what is used here).

``loads`` reads what a careful writer may write and refuses the rest by a rule ``cbor.*`` (``spec/cbor.md``); ``dumps``
writes one form only: definite lengths, shortest arguments, shortest floats that keep the value, keys in order given.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ingot.core import native
from ingot.core.gcpause import gc_paused
from ingot.errors import FormatError, UsageError

Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 32
# An empty map is one byte in a file and about 70 in memory. This bounds what a hostile file can make of itself to about
# 1 GB, and leaves room for half a million tensors.
MAX_ITEMS = 1 << 24

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = (major << 5 for major in range(6))
_CONSTANTS = {None: b"\xf6", True: b"\xf5", False: b"\xf4"}


def loads(data: Buffer, *, where: str = "", max_depth: int = MAX_DEPTH, max_items: int = MAX_ITEMS) -> Any:
    """Decode one CBOR item that takes up all of ``data``.

    Returns
    -------
    object
        dict (text keys, file order), list, int, float, str, bytes, bool or None.

    Raises
    ------
    FormatError
        With a rule ``cbor.*`` and the byte offset, for duplicate keys, trailing bytes, indefinite lengths, nesting past
        ``max_depth``, more than ``max_items`` items, lengths past the end, invalid UTF-8, keys that are not text,
        tags, and simple values other than false, true and null.
    """
    try:
        with gc_paused():
            return native.cbor_loads(data, max_depth, max_items)
    except ValueError as error:
        rule, offset, message = str(error).split("|", 2)
        place = f"{where}: byte {offset}" if where else f"byte {offset}"
        raise FormatError(rule, message, where=place) from None


def dumps(value: Any) -> bytes:
    """Encode ``value`` (the types that ``loads`` returns, and tuples as arrays) deterministically.

    Raises
    ------
    UsageError
        Another type, a key that is not text, an integer that 64 bits and a sign cannot hold, text with lone surrogates,
        nesting past ``MAX_DEPTH``.
    """
    pieces: list[bytes] = []
    try:
        _encode(value, pieces.append, {}, 0)
    except UnicodeEncodeError as error:
        raise UsageError("expected text that UTF-8 can hold, found lone surrogates", rule="cbor.utf8") from error
    return b"".join(pieces)


def _encode(value: Any, put: Callable[[bytes], None], texts: dict[str, bytes], depth: int) -> None:
    kind = type(value)
    if kind is str:
        put(texts.get(value) or _text(value, texts))
    elif kind is int:
        put(_integer(value))
    elif kind is dict:
        _encode_map(value, put, texts, depth)
    elif kind is list or kind is tuple:
        _check_depth(depth)
        put(_head(_ARRAY, len(value)))
        for element in value:
            _encode(element, put, texts, depth + 1)
    elif value is None or kind is bool:
        put(_CONSTANTS[value])
    else:
        _encode_other(value, put, texts, depth)


def _encode_map(value: Mapping[Any, Any], put: Callable[[bytes], None], texts: dict[str, bytes], depth: int) -> None:
    _check_depth(depth)
    put(_head(_MAP, len(value)))
    for key, element in value.items():
        if not isinstance(key, str):
            raise UsageError(f"expected text as key of a map, found {type(key).__name__}", rule="cbor.key-type")
        put(texts.get(key) or _text(key, texts))
        _encode(element, put, texts, depth + 1)


def _encode_other(value: Any, put: Callable[[bytes], None], texts: dict[str, bytes], depth: int) -> None:
    """The rarer types, and subclasses (``numpy.float64`` is a float)."""
    if isinstance(value, float):
        put(_float(float(value)))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        put(_head(_BYTES, len(data)) + data)
    elif isinstance(value, str):
        put(_text(str(value), texts))
    elif isinstance(value, int):
        put(_integer(int(value)))
    elif isinstance(value, Mapping):
        _encode_map(value, put, texts, depth)
    else:
        raise UsageError(
            f"expected a number, text, bytes, bool, None, list or dict, found {type(value).__name__}", rule="cbor.type"
        )


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise UsageError(f"expected at most {MAX_DEPTH} levels of nesting", rule="cbor.depth")


def _text(value: str, texts: dict[str, bytes]) -> bytes:
    data = value.encode()
    piece = _head(_TEXT, len(data)) + data
    if len(data) < 24:  # the words of a schema come again for every tensor, long names do not
        texts[value] = piece
    return piece


def _integer(value: int) -> bytes:
    if value >= 0:
        return _head(_UINT, value)
    return _head(_NEGATIVE, -1 - value)


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major | value,))
    if value < 0x100:
        return bytes((major | 24, value))
    if value < 0x10000:
        return struct.pack(">BH", major | 25, value)
    if value < 0x1_0000_0000:
        return struct.pack(">BI", major | 26, value)
    if value < 0x1_0000_0000_0000_0000:
        return struct.pack(">BQ", major | 27, value)
    raise UsageError(f"expected an integer of 64 bits and a sign, found {value}", rule="cbor.integer")


def _float(value: float) -> bytes:
    if math.isnan(value):  # whatever its payload: one form only
        return b"\xf9\x7e\x00"
    for code, initial in (("e", b"\xf9"), ("f", b"\xfa")):
        try:
            data = struct.pack(">" + code, value)
        except OverflowError:
            continue
        if struct.unpack(">" + code, data)[0] == value:
            return initial + data
    return b"\xfb" + struct.pack(">d", value)
