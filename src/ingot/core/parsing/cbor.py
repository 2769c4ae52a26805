"""Strict CBOR (RFC 7049; its successor RFC 8949 changed no bytes of what is used here).

``loads`` reads what a careful writer may write and refuses the rest by a rule ``cbor.*`` (``spec/cbor.md``); ``dumps``
writes one form only: definite lengths, shortest arguments, shortest floats that keep the value, keys in order given.
"""

from __future__ import annotations

from typing import Any

from ingot.core.runtime import native
from ingot.core.runtime.memory import gc_paused
from ingot.errors import FormatError, UsageError

Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 32
# An empty map is one byte in a file and about 70 in memory. This bounds what a hostile file can make of itself to about
# 1 GB, and leaves room for half a million tensors.
MAX_ITEMS = 1 << 24


def loads(
    data: Buffer,
    *,
    where: str = "",
    max_depth: int = MAX_DEPTH,
    max_items: int = MAX_ITEMS,
    deterministic: bool = False,
) -> Any:
    """Decode one CBOR item that takes up all of ``data``.

    With ``deterministic`` nothing but the core deterministic encoding of RFC 8949 section 4.2.1 is accepted.

    Returns
    -------
    object
        dict (text keys, file order), list, int, float, str, bytes, bool or None.

    Raises
    ------
    FormatError
        With a rule ``cbor.*`` and the byte offset, for duplicate keys, trailing bytes, indefinite lengths, nesting past
        ``max_depth``, more than ``max_items`` items, lengths past the end, invalid UTF-8, keys that are not text,
        tags, and simple values other than false, true and null; ``cbor.not-shortest`` and ``cbor.key-order`` where
        only the deterministic encoding is accepted.
    """
    try:
        with gc_paused():
            return native.cbor_loads(data, max_depth, max_items, deterministic)
    except ValueError as error:
        rule, offset, message = str(error).split("|", 2)
        location = f"{where}: byte {offset}" if where else f"byte {offset}"
        raise FormatError(rule, message, where=location) from None


def dumps(value: Any, *, sort: bool = False) -> bytes:
    """Encode ``value`` (the types that ``loads`` returns, and tuples as arrays) deterministically.

    Maps keep the order that they have; with ``sort`` the bytes are the core deterministic encoding of RFC 8949.

    Raises
    ------
    UsageError
        Another type, a key that is not text, an integer that 64 bits and a sign cannot hold, text with lone surrogates,
        nesting past ``MAX_DEPTH``.
    """
    try:
        return native.cbor_dumps(value, MAX_DEPTH, sort)
    except ValueError as error:
        rule, message = str(error).split("|", 1)
        raise UsageError(message, rule=rule) from None
