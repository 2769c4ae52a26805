"""JSON as headers use it: one object, each key once, no NaN, no Infinity, no -0 as an integer, text that is UTF-8."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec

from ingot.errors import FormatError

Kind = TypeVar("Kind", bound=type[msgspec.Struct])

WARM: list[type[msgspec.Struct]] = []
"""Every Struct type of Ingot."""


def warm(kind: Kind) -> Kind:
    """Let msgspec describe a Struct type at once, while its module is imported by one thread.

    msgspec does so when a type is first decoded or converted, without a lock: threads that meet there may crash.
    """
    msgspec.json.Decoder(kind)
    WARM.append(kind)
    return kind


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(data: bytes | bytearray, rule: str, duplicate_rule: str, where: str) -> dict[str, Any]:
    """Parse a JSON object, refusing repeated keys at any depth, NaN, Infinity, -0, lone surrogates, and anything but an
    object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise FormatError(duplicate_rule, f"expected each key once, found {twice[:200]!r} again", where=where)
        return result

    def refuse(constant: str) -> Any:
        raise FormatError(rule, f"expected a number, found {constant}", where=where)

    def whole(text: str) -> int:
        return int(text) if text != "-0" else refuse(text)

    try:
        root = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_int=whole)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(rule, f"not JSON: {error}", where=where) from error
    if not isinstance(root, dict):
        raise FormatError(rule, f"expected a JSON object, found {type(root).__name__}", where=where)
    if _SURROGATE.search(data):
        try:
            json.dumps(root, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FormatError(
                rule, "expected text that UTF-8 can hold, found half of a pair of surrogates", where=where
            ) from None
    return root
