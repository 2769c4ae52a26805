"""The one reader of ``config.json`` and of the other JSON files that travel with a model.

They are written and read by many programs, most of them with Python's ``json``: NaN and infinities, repeated keys (the
last one counts), a byte order mark and -0 are all in use. Ingot's own manifests are read by ``core.strictjson``.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from ingot.errors import FormatError

CONFIG = "config.json"
MAX_CONFIG = 16 << 20
"""Bytes that such a file may have."""


def parse_config(data: bytes, rule: str, where: str) -> dict[str, Any]:
    """Return the JSON object that ``data`` is.

    Raises ``FormatError`` with ``rule``: more than ``MAX_CONFIG`` bytes, no JSON, or something else than an object.
    """
    if len(data) > MAX_CONFIG:
        raise FormatError(rule, f"expected at most {MAX_CONFIG} bytes of JSON, found more", where=where)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(rule, f"not JSON: {error}", where=where) from error
    if not isinstance(config, dict):
        raise FormatError(rule, f"expected a JSON object, found {type(config).__name__}", where=where)
    return config


class _Reads(Protocol):
    def read(self, name: str, most: int, rule: str) -> bytes: ...


def stored_config(store: _Reads, rule: str) -> dict[str, Any]:
    """Read and parse the ``config.json`` of a store; errors as ``parse_config`` and the store's ``read``."""
    return parse_config(store.read(CONFIG, MAX_CONFIG, rule), rule, CONFIG)
