"""The metadata of GGUF files. Each value has a type, which comes from a file or is inferred."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import isnan
from struct import Struct, pack
from typing import Any

import msgspec
import numpy as np

from ingot.errors import UnsupportedError
from ingot.formats.gguf.types import VALUES

ABOUT = "ingot.gguf"
"""Key of the metadata that stores the types of the other values, so that a writer can restore them."""

RAW = "raw"
"""Key in ``ingot.gguf`` for the bytes of strings that are not UTF-8: base64 by metadata key and index in its array."""
RawStrings = Mapping[str, Mapping[int, bytes]]

NUMBER, COUNT, TENSORS = SPLIT = ("split.no", "split.count", "split.tensors.count")
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
VERSION = 3
STRUCT = dict(zip(("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64"), "BbHhIiQqfd", strict=True))
NUMPY = {"u8": "u1", "i8": "i1", "u16": "u2", "i16": "i2", "u32": "u4", "i32": "i4", "u64": "u8", "i64": "i8"} | {
    "f32": "f4",
    "f64": "f8",
    "bool": "u1",
}
_TYPE_IDS = {name: type_id for type_id, name in VALUES.items()}
_ARRAY = _TYPE_IDS["array"]
_ARRAYS = "array:"
_INTEGERS = ("u32", "i32", "u64", "i64")
_RANGES = {name: (int(np.iinfo(NUMPY[name]).min), int(np.iinfo(NUMPY[name]).max)) for name in STRUCT if name[0] != "f"}


class Texts(list[str]):
    """An array of strings whose encoded bytes are computed once and cached.

    A tokenizer has large arrays, and each computation of a file's size needs their length.
    """

    @cached_property
    def encoded(self) -> bytes:
        """The strings as in a file: each after its length."""
        return _encode_strings([text.encode() for text in self])


def to_gguf_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's metadata as values of GGUF types; the key ``ingot.gguf`` contains all types.

    A value keeps the type that ``ingot.gguf`` declares if the value fits this type. For other values the type is
    inferred: integers become u32 or the next larger type that can hold the value. Other numbers become f32 if f32 is
    exact, else f64. A value that is not a number, text, a bool or a list of these becomes JSON text. Some containers
    store only text; therefore a text is parsed as JSON if ``ingot.gguf`` declares another type for it.

    Raises
    ------
    UnsupportedError
        ``gguf.metadata``: an empty key or a key with NUL, text that cannot be encoded in UTF-8, or an alignment that is
        not a power of two up to ``MAX_ALIGNMENT``.
    """
    about = _about(values)
    declared_types = _mapping(about.get("types"))
    converted: dict[str, Any] = {}
    types: dict[str, str] = {}
    for key, value in values.items():
        if key == ABOUT or key in SPLIT:
            continue
        if not isinstance(key, str) or not key or "\0" in key or not is_text(key):
            raise _refuse("keys of UTF-8 text without NUL", key)
        types[key], converted[key] = _with_type(value, declared_types.get(key))
        texts = converted[key]
        checked = isinstance(texts, Texts) and "encoded" in vars(texts)
        if types[key].endswith("string") and not checked and not is_text("".join(_as_list(texts))):
            raise _refuse("text that can be encoded in UTF-8", key)
    alignment = converted.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if types.get(ALIGNMENT, "u32") != "u32" or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _refuse(f"{ALIGNMENT} as a power of two up to {MAX_ALIGNMENT}", alignment)
    raw = _raw_strings(_mapping(about.get(RAW)), converted)
    return {**converted, ABOUT: describe(VERSION, big_endian=False, types=types, raw=raw)}


def describe(version: int, *, big_endian: bool, types: Mapping[str, str], raw: RawStrings) -> dict[str, Any]:
    """Return the value of the key ``ingot.gguf``: version, byte order, types of values, and raw strings.

    ``raw`` contains the strings that are not UTF-8, as bytes, by key and by index in the key's array.
    """
    about = {"version": version, "big_endian": big_endian, "types": types}
    texts = {
        key: {str(index): b64encode(data).decode() for index, data in strings.items()} for key, strings in raw.items()
    }
    return {**about, RAW: texts} if texts else about


def with_values(metadata: Mapping[str, Any], added: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return ``metadata`` with additional values; ``added`` maps each key to a type and a value.

    ``metadata`` is a result of ``to_gguf_metadata``.
    """
    types = {**metadata[ABOUT]["types"], **{key: type_name for key, (type_name, _) in added.items()}}
    values = {key: value for key, (_, value) in added.items()}
    raw = {key: strings for key, strings in metadata[ABOUT].get(RAW, {}).items() if key not in added}
    about = {**metadata[ABOUT], "types": types}
    return {**metadata, **values, ABOUT: {**about, RAW: raw} if RAW in about else about}


def encode_metadata(metadata: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return the number of pairs and the encoded pairs of a result of ``to_gguf_metadata``."""
    types, raw = metadata[ABOUT]["types"], _raw_strings(metadata[ABOUT].get(RAW, {}), metadata)
    pairs = [
        _string(key.encode()) + _value(types[key], value, raw.get(key, {}))
        for key, value in metadata.items()
        if key != ABOUT
    ]
    return len(pairs), b"".join(pairs)


def _about(values: Mapping[str, Any]) -> Mapping[str, Any]:
    about = values.get(ABOUT)
    if isinstance(about, str):  # from a container that stores only text
        try:
            about = json.loads(about)
        except (ValueError, RecursionError):
            return {}
    return _mapping(about)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _raw_strings(stored: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, dict[int, bytes]]:
    """Return the strings that ``ingot.gguf`` stores as bytes, if they still decode to the text in ``values``."""
    raw: dict[str, dict[int, bytes]] = {}
    for key, strings in stored.items():
        texts = _as_list(values.get(key, []))
        for index, text in _mapping(strings).items():
            position = int(index) if index.isascii() and index.isdigit() and len(index) < 12 else len(texts)
            try:
                data = b64decode(text, validate=True)
            except (TypeError, ValueError):
                continue
            if position < len(texts) and texts[position] == data.decode(errors="replace"):
                raw.setdefault(key, {})[position] = data
    return raw


def _with_type(value: Any, type_name: Any) -> tuple[str, Any]:
    """Return the GGUF type of a value, and the value that a reader of the written file returns.

    The type is the declared one if the value fits it; otherwise it is inferred.
    """
    if isinstance(type_name, str):
        if isinstance(value, str) and type_name != "string":
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):
                parsed = None
            value = value if parsed is None else parsed
        fitting = _convert_array(value, type_name) if type_name.startswith(_ARRAYS) else _convert(value, type_name)
        if fitting is not None:
            return type_name, fitting
    return _infer_type(value)


def _convert_array(value: Any, type_name: str) -> list[Any] | None:
    element = type_name.removeprefix(_ARRAYS)
    if not isinstance(value, list | tuple):
        return None
    if isinstance(value, Texts) and element == "string":
        return value
    classes = set(map(type, value))
    if element == "string" and classes == {str}:
        return Texts(value)
    low, high = _RANGES.get(element, (0, -1))
    if classes == {int} and low <= min(value) <= max(value) <= high:
        return list(value)
    if element == "f32" and classes == {float}:
        with np.errstate(over="ignore"):
            return np.array(value, np.float64).astype(np.float32).tolist()  # type: ignore[no-any-return]
    items = [_convert(item, element) for item in value]
    return None if any(item is None for item in items) else items


def _convert(value: Any, type_name: str) -> Any:
    """Return a value converted to a type; None if it does not fit."""
    if type_name == "string":
        return value if isinstance(value, str) else None
    if type_name == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or type_name not in STRUCT:
        return None
    if type_name in ("f32", "f64"):
        try:
            with np.errstate(over="ignore"):
                wide = float(value)
                return wide if type_name == "f64" else float(np.float32(wide))
        except OverflowError:
            return None
    low, high = _RANGES[type_name]
    return value if isinstance(value, int) and low <= value <= high else None


def _infer_type(value: Any) -> tuple[str, Any]:
    if isinstance(value, str | bool):
        return ("bool" if isinstance(value, bool) else "string"), value
    if isinstance(value, list | tuple):
        type_name = _common_type(value)
        if type_name is not None:
            return _ARRAYS + type_name, [_convert(item, type_name) for item in value]
    elif (type_name := _common_type([value])) is not None:
        return type_name, _convert(value, type_name)
    return "string", msgspec.json.encode(value).decode()


def _common_type(values: Sequence[Any]) -> str | None:
    """Return the smallest type that can hold every value; None if there is none."""
    if all(isinstance(value, str) for value in values):
        return "string"
    if any(isinstance(value, float) for value in values):
        for type_name in ("f32", "f64"):
            if all(_convert(value, type_name) == value or _is_nan(value) for value in values):
                return type_name
        return None
    type_names = ("bool", *_INTEGERS)
    return next(
        (type_name for type_name in type_names if all(_convert(value, type_name) is not None for value in values)), None
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and isnan(value)


def _value(type_name: str, value: Any, raw: Mapping[int, bytes]) -> bytes:
    if not type_name.startswith(_ARRAYS):
        data = _strings([value], raw) if type_name == "string" else _number(type_name, value)
        return pack("<I", _TYPE_IDS[type_name]) + data
    element = type_name.removeprefix(_ARRAYS)
    data = _strings(value, raw) if element == "string" else np.array(value, f"<{NUMPY[element]}").tobytes()
    return pack("<IIQ", _ARRAY, _TYPE_IDS[element], len(value)) + data


def _number(type_name: str, value: Any) -> bytes:
    return Struct("<?" if type_name == "bool" else f"<{STRUCT[type_name]}").pack(value)


def _strings(texts: Sequence[str], raw: Mapping[int, bytes]) -> bytes:
    if isinstance(texts, Texts) and not raw:
        return texts.encoded
    return _encode_strings([raw[index] if index in raw else text.encode() for index, text in enumerate(texts)])


def _encode_strings(strings: Sequence[bytes]) -> bytes:
    lengths = pack(f"<{len(strings)}Q", *map(len, strings))
    starts = range(0, len(lengths), 8)
    return b"".join(chain.from_iterable(zip((lengths[start : start + 8] for start in starts), strings, strict=True)))


def _string(data: bytes) -> bytes:
    return pack("<Q", len(data)) + data


def _as_list(value: Any) -> Sequence[str]:
    return value if isinstance(value, list) else [value]


def is_text(text: str) -> bool:
    """Return whether ``text`` can be encoded in UTF-8; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(expected: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"expected {expected} in the metadata, found {value!r:.80}; change the value or remove it", rule="gguf.metadata"
    )
