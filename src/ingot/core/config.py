"""The one reader of ``config.json`` and of the other JSON files that travel with a model.

They are written and read by many programs, most of them with Python's ``json``: NaN and infinities, repeated keys (the
last one counts), a byte order mark and -0 are all in use. Ingot's own manifests are read by ``core.strictjson``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from ingot.core.oserrors import read_error
from ingot.errors import FormatError, IngotError

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


def read_config(path: Path, rule: str) -> dict[str, Any]:
    """Read and parse a file.

    Raises ``FormatError`` as ``parse_config``; ``UsageError`` or ``ResourceError`` where the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG + 1)
    except OSError as error:
        raise read_error(error, str(path)) from error
    return parse_config(data, rule, str(path))


class _Reads(Protocol):
    def read(self, name: str, most: int, rule: str) -> bytes: ...


def stored_config(store: _Reads, rule: str) -> dict[str, Any]:
    """Read and parse the ``config.json`` of a store; errors as ``parse_config`` and the store's ``read``."""
    return parse_config(store.read(CONFIG, MAX_CONFIG, rule), rule, CONFIG)


def config_of(folder: Path) -> dict[str, Any]:
    """Return what a folder's ``config.json`` says; nothing where there is none that can be read as an object."""
    try:
        return read_config(folder / CONFIG, "model.config")
    except IngotError:
        return {}
