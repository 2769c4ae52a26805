"""Strict CBOR (RFC 7049; its successor RFC 8949 changed no bytes of the subset that is used here).

``loads`` reads the subset of ``spec/cbor.md``, and raises errors with rules ``cbor.*`` for other input. ``dumps``
writes one form: definite lengths, shortest arguments, shortest floats that keep the value, keys in the given order.
"""

from __future__ import annotations

from typing import Any

from ingot.core.runtime import native
from ingot.core.runtime.memory import gc_paused
from ingot.errors import FormatError, UsageError

Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 32
# An empty map is one byte in a file and about 70 bytes in memory. This bounds the memory that a hostile file can use to
# about 1 GB, and allows half a million tensors.
MAX_ITEMS = 1 << 24


def loads(
    data: Buffer,
    *,
    location: str = "",
    max_depth: int = MAX_DEPTH,
    max_items: int = MAX_ITEMS,
    deterministic: bool = False,
) -> Any:
    """Decode one CBOR item, which must fill ``data``.

    With ``deterministic`` only the core deterministic encoding of RFC 8949 section 4.2.1 is accepted. ``location`` is
    the file in messages.

    Returns
    -------
    object
        dict (text keys, file order), list, int, float, str, bytes, bool or None.

    Raises
    ------
    FormatError
        With a rule ``cbor.*`` and the byte offset, for duplicate keys, trailing bytes, indefinite lengths, nesting past
        ``max_depth``, more than ``max_items`` items, lengths past the end, invalid UTF-8, keys that are not text,
        tags, and simple values other than false, true and null; with ``deterministic`` also ``cbor.not-shortest`` and
        ``cbor.key-order``.
    """
    try:
        with gc_paused():
            return native.cbor_loads(data, max_depth, max_items, deterministic)
    except ValueError as error:
        rule, offset, message = str(error).split("|", 2)
        position = f"{location}: byte {offset}" if location else f"byte {offset}"
        raise FormatError(rule, message, where=position) from None


def dumps(value: Any, *, sort: bool = False) -> bytes:
    """Encode ``value`` (the types that ``loads`` returns, and tuples as arrays) deterministically.

    Maps keep their order; with ``sort`` the bytes are the core deterministic encoding of RFC 8949.

    Raises
    ------
    UsageError
        The value has another type, a key that is not text, an integer outside the range of 64 bits and a sign, text
        with lone surrogates, or nesting past ``MAX_DEPTH``.
    """
    try:
        return native.cbor_dumps(value, MAX_DEPTH, sort)
    except ValueError as error:
        rule, message = str(error).split("|", 1)
        raise UsageError(message, rule=rule) from None
