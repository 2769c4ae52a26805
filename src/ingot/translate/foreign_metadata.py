"""Store GGUF metadata that no other file of a model folder can express, in the file ``gguf_metadata.json``.

A conversion back to GGUF restores this metadata. So names, licenses and keys of other programs are preserved.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ingot.errors import FormatError
from ingot.formats.gguf.metadata import ABOUT, RAW
from ingot.naming.config import MAX_CONFIG
from ingot.stores.location import Location

FILE = "gguf_metadata.json"
RULE = "architecture.companion"
_VALUES = "values"
_TYPES = "types"


def to_files(metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, bytes]:
    """Return the bytes of ``gguf_metadata.json``, keyed by this file name.

    The file contains the values and types of the metadata in ``names``. The mapping is empty if ``names`` is empty, or
    if the file would be larger than ``read`` accepts.
    """
    about: Any = metadata.get(ABOUT)
    content: dict[str, dict[str, Any]] = {_VALUES: {name: metadata[name] for name in names}}
    for part in (_TYPES, RAW) if isinstance(about, Mapping) else ():
        table = about.get(part)
        chosen = {name: table[name] for name in names if name in table} if isinstance(table, Mapping) else {}
        content |= {part: chosen} if chosen else {}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    data = text.encode(errors="surrogatepass")
    return {FILE: data} if names and len(data) <= MAX_CONFIG else {}


def read(companions: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata in ``gguf_metadata.json``, and their types and raw strings under the key ``ingot.gguf``.

    ``companions`` are the locations of the folder's files by name. The result is empty if the file is not one of them.

    Raises ``FormatError`` ``architecture.companion``: the file is not a JSON object of this layout.
    """
    if FILE not in companions:
        return {}
    store, file = Location.parse(companions[FILE]).find(io="pread")
    data = store.read(file, MAX_CONFIG, RULE)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(RULE, f"not JSON: {error}", where=companions[FILE]) from error
    tables = [content.get(part, {}) if isinstance(content, dict) else None for part in (_VALUES, _TYPES, RAW)]
    if not all(isinstance(table, dict) for table in tables):
        raise FormatError(
            RULE,
            f"expected objects for {_VALUES}, {_TYPES} and {RAW}; correct or remove the file",
            where=companions[FILE],
        )
    values, types, raw = tables
    return {**values, ABOUT: {_TYPES: types, RAW: raw}} if values else {}
