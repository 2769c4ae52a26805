"""Metadata to be written: every value with a type, the one it was read with or the one of its kind."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from math import isnan
from struct import Struct, pack
from typing import Any

import msgspec
import numpy as np

from ingot.errors import UnsupportedError
from ingot.formats.gguf.types import VALUES

ABOUT = "ingot.gguf"
"""Key of the metadata under which the types of the others are kept, for whoever writes them again."""

RAW = "raw"
"""Key in ``ingot.gguf``: the bytes of strings that are not UTF-8, base64 by key and index in an array."""
RawStrings = Mapping[str, Mapping[int, bytes]]

NUMBER, COUNT, TENSORS = SPLIT = ("split.no", "split.count", "split.tensors.count")
ALIGNMENT, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = "general.alignment", 32, 1 << 20
VERSION = 3
STRUCT = dict(zip(("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64"), "BbHhIiQqfd", strict=True))
NUMPY = {"u8": "u1", "i8": "i1", "u16": "u2", "i16": "i2", "u32": "u4", "i32": "i4", "u64": "u8", "i64": "i8"} | {
    "f32": "f4",
    "f64": "f8",
    "bool": "u1",
}
_NUMBERS = {kind: number for number, kind in VALUES.items()}
_ARRAY, _ARRAYS = _NUMBERS["array"], "array:"
_INTEGERS = ("u32", "i32", "u64", "i64")
_RANGES = {kind: (int(np.iinfo(NUMPY[kind]).min), int(np.iinfo(NUMPY[kind]).max)) for kind in STRUCT if kind[0] != "f"}


def carried(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's metadata as a GGUF file has them, ``ingot.gguf`` with the types of all.

    A value keeps the type that ``ingot.gguf`` names where it is one of it. Others have that of their kind: integers
    u32 or the next that holds them, numbers f32 where that is exact, else f64; what is no number, text, truth or list
    of these becomes JSON text. Text under a type of another kind is taken for JSON: other containers keep only text.

    Raises
    ------
    UnsupportedError
        ``gguf.metadata``: a key without letters or with a NUL, text that has no UTF-8 form, an alignment that is no
        power of two up to ``MAX_ALIGNMENT``.
    """
    about = _about(values)
    known = _mapping(about.get("types"))
    found: dict[str, Any] = {}
    types: dict[str, str] = {}
    for key, value in values.items():
        if key == ABOUT or key in SPLIT:
            continue
        if not isinstance(key, str) or not key or "\0" in key or not is_text(key):
            raise _refuse("keys of UTF-8 text without NUL", key)
        types[key], found[key] = _typed(value, known.get(key))
        if types[key].endswith("string") and not all(map(is_text, _listed(found[key]))):
            raise _refuse("text that has a UTF-8 form", key)
    alignment = found.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if types.get(ALIGNMENT, "u32") != "u32" or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _refuse(f"{ALIGNMENT} to be a power of two up to {MAX_ALIGNMENT}", alignment)
    raw = _raw_strings(_mapping(about.get(RAW)), found)
    return {**found, ABOUT: describe(VERSION, big_endian=False, types=types, raw=raw)}


def describe(version: int, *, big_endian: bool, types: Mapping[str, str], raw: RawStrings) -> dict[str, Any]:
    """Return the value of ``ingot.gguf``; ``raw`` are the bytes of strings that are not UTF-8, by key and index."""
    about = {"version": version, "big_endian": big_endian, "types": types}
    texts = {
        key: {str(index): b64encode(data).decode() for index, data in strings.items()} for key, strings in raw.items()
    }
    return {**about, RAW: texts} if texts else about


def with_values(metadata: Mapping[str, Any], more: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return metadata as ``carried`` makes them with further values: keys to types and values."""
    types = {**metadata[ABOUT]["types"], **{key: kind for key, (kind, _) in more.items()}}
    values = {key: value for key, (_, value) in more.items()}
    raw = {key: strings for key, strings in metadata[ABOUT].get(RAW, {}).items() if key not in more}
    about = {**metadata[ABOUT], "types": types}
    return {**metadata, **values, ABOUT: {**about, RAW: raw} if RAW in about else about}


def encoded(metadata: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return the number of pairs, and the pairs as a file has them; of metadata as ``carried`` makes them."""
    types, raw = metadata[ABOUT]["types"], _raw_strings(metadata[ABOUT].get(RAW, {}), metadata)
    pairs = [
        _string(key.encode()) + _value(types[key], value, raw.get(key, {}))
        for key, value in metadata.items()
        if key != ABOUT
    ]
    return len(pairs), b"".join(pairs)


def _about(values: Mapping[str, Any]) -> Mapping[str, Any]:
    about = values.get(ABOUT)
    if isinstance(about, str):  # a container that keeps only text
        try:
            about = json.loads(about)
        except (ValueError, RecursionError):
            return {}
    return _mapping(about)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _raw_strings(stored: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, dict[int, bytes]]:
    """Return the bytes that ``ingot.gguf`` keeps of strings, of those that still read as the text in ``values``."""
    raw: dict[str, dict[int, bytes]] = {}
    for key, strings in stored.items():
        texts = _listed(values.get(key, []))
        for index, text in _mapping(strings).items():
            position = int(index) if index.isascii() and index.isdigit() and len(index) < 12 else len(texts)
            try:
                data = b64decode(text, validate=True)
            except (TypeError, ValueError):
                continue
            if position < len(texts) and texts[position] == data.decode(errors="replace"):
                raw.setdefault(key, {})[position] = data
    return raw


def _typed(value: Any, kind: Any) -> tuple[str, Any]:
    """Return a value's type and the value as it reads from a file."""
    if isinstance(kind, str):
        if isinstance(value, str) and kind != "string":
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):
                parsed = None
            value = value if parsed is None else parsed
        fitting = _as_array(value, kind) if kind.startswith(_ARRAYS) else _as(value, kind)
        if fitting is not None:
            return kind, fitting
    return _natural(value)


def _as_array(value: Any, kind: str) -> list[Any] | None:
    element = kind.removeprefix(_ARRAYS)
    if not isinstance(value, list | tuple):
        return None
    items = [_as(item, element) for item in value]
    return None if any(item is None for item in items) else items


def _as(value: Any, kind: str) -> Any:
    """Return a value as one of a type; None where it is none."""
    if kind == "string":
        return value if isinstance(value, str) else None
    if kind == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or kind not in STRUCT:
        return None
    if kind in ("f32", "f64"):
        try:
            with np.errstate(over="ignore"):
                wide = float(value)
                return wide if kind == "f64" else float(np.float32(wide))
        except OverflowError:
            return None
    low, high = _RANGES[kind]
    return value if isinstance(value, int) and low <= value <= high else None


def _natural(value: Any) -> tuple[str, Any]:
    if isinstance(value, str | bool):
        return ("bool" if isinstance(value, bool) else "string"), value
    if isinstance(value, list | tuple):
        kind = _common(value)
        if kind is not None:
            return _ARRAYS + kind, [_as(item, kind) for item in value]
    elif (kind := _common([value])) is not None:
        return kind, _as(value, kind)
    return "string", msgspec.json.encode(value).decode()


def _common(values: Sequence[Any]) -> str | None:
    """Return the smallest type that holds all values; None where there is none."""
    if all(isinstance(value, str) for value in values):
        return "string"
    if any(isinstance(value, float) for value in values):
        for kind in ("f32", "f64"):
            if all(_as(value, kind) == value or _is_nan(value) for value in values):
                return kind
        return None
    kinds = ("bool", *_INTEGERS)
    return next((kind for kind in kinds if all(_as(value, kind) is not None for value in values)), None)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and isnan(value)


def _value(kind: str, value: Any, raw: Mapping[int, bytes]) -> bytes:
    if not kind.startswith(_ARRAYS):
        data = _strings([value], raw) if kind == "string" else _number(kind, value)
        return pack("<I", _NUMBERS[kind]) + data
    element = kind.removeprefix(_ARRAYS)
    data = _strings(value, raw) if element == "string" else np.array(value, f"<{NUMPY[element]}").tobytes()
    return pack("<IIQ", _ARRAY, _NUMBERS[element], len(value)) + data


def _number(kind: str, value: Any) -> bytes:
    return Struct("<?" if kind == "bool" else f"<{STRUCT[kind]}").pack(value)


def _strings(texts: Sequence[str], raw: Mapping[int, bytes]) -> bytes:
    return b"".join(_string(raw[index] if index in raw else text.encode()) for index, text in enumerate(texts))


def _string(data: bytes) -> bytes:
    return pack("<Q", len(data)) + data


def _listed(value: Any) -> Sequence[str]:
    return value if isinstance(value, list) else [value]


def is_text(text: str) -> bool:
    """Whether text has a UTF-8 form: a lone surrogate has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(expected: str, found: object) -> UnsupportedError:
    return UnsupportedError(
        f"GGUF cannot carry the metadata: expected {expected}, found {found!r:.80}", rule="gguf.metadata"
    )
