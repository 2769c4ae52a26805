"""Strict JSON for headers: one object in UTF-8, unique keys, no NaN, no Infinity, no -0 as an integer."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec

from ingot.errors import FormatError

StructType = TypeVar("StructType", bound=type[msgspec.Struct])

PRELOADED: list[type[msgspec.Struct]] = []
"""All Struct types of Ingot."""


def preload(struct: StructType) -> StructType:
    """Decorate a Struct type so that msgspec analyses it while its module is imported, in one thread.

    Otherwise msgspec analyses a type at its first use, without a lock, and concurrent first use can crash.
    """
    msgspec.json.Decoder(struct)
    PRELOADED.append(struct)
    return struct


def utf8_fault(data: bytes | bytearray, error: Exception) -> str | None:
    """Return why ``data`` is not UTF-8, if msgspec raised ``error`` for that reason; None otherwise.

    msgspec raises ``UnicodeDecodeError`` before version 0.23, and ``DecodeError`` since then.
    """
    if not isinstance(error, UnicodeDecodeError) and "UTF-8" not in str(error):
        return None
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as fault:
        return fault.reason
    return None


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(data: bytes | bytearray, rule: str, duplicate_rule: str, location: str) -> dict[str, Any]:
    """Parse a JSON object strictly and return it as a dict.

    Raises ``FormatError``: ``duplicate_rule`` for a repeated key at any depth; ``rule`` for invalid JSON, NaN,
    Infinity, -0 as an integer, lone surrogates, or a value that is not an object. ``location`` is the file in messages.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise FormatError(duplicate_rule, f"expected each key once, found {repeated[:200]!r} again", where=location)
        return result

    def refuse(constant: str) -> Any:
        raise FormatError(rule, f"expected a number, found {constant}", where=location)

    def integer(text: str) -> int:
        return int(text) if text != "-0" else refuse(text)

    try:
        root = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_int=integer)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(rule, f"not JSON: {error}", where=location) from error
    if not isinstance(root, dict):
        raise FormatError(rule, f"expected a JSON object, found {type(root).__name__}", where=location)
    if _SURROGATE.search(data):
        try:
            json.dumps(root, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FormatError(
                rule, "expected text that UTF-8 can hold, found half of a pair of surrogates", where=location
            ) from None
    return root
