"""File names, array suffixes and the manifest of a Squish directory."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping

import msgspec

from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, UnsupportedError

MANIFEST = "manifest.json"
SIDECAR = "ingot.json"
FOLDER = "tensors"
READY = "tensors/.manifest_ready"
INT4_READY = ".squish_int4_ready"
ARRAYS_READY = ".ready"
FINALIZED = "finalized"
BF16_TIER = "squish_weights.safetensors"
PROGRESS = "_compress_progress.json"
"""File in which squish's program records the shards that are complete; the file is not deleted at the end of a run."""
MAX_MANIFEST = 100_000_000
# Length limit for file names, in bytes, on common file systems.
_MAX_NAME = 255

READ_SUFFIXES = (
    *("q", "s", "shape", "pt", "q4", "s4", "q4a", "s4a", "z4a", "q3", "s3", "z3"),
    *("lra", "lrb", "nf4", "s_nf4"),
)
"""Suffixes of the arrays that Ingot reads; the file of an array is ``tensors/{safe_key}__{suffix}.npy``."""

# Description by beginning of the suffix; the longest matching beginning applies.
_FOREIGN = {
    "pt_df11": "DFloat11, stored as a pickle, which can run code: Ingot never opens one",
    "aqlm": "AQLM codebooks",
    "vq": "VPTQ codebooks",
    "vptq": "VPTQ codebooks",
    "quip": "QuIP",
    "sqint2": "SQINT2",
    "q2": "two bits",
    "s2": "two bits",
    "z2": "two bits",
    "awq": "AWQ scales",
}
COMPRESSIONS = ("", ".zst", ".br")
"""File name endings after ``.npy``; brotli files are recognized but cannot be read."""


def safe_key(name: str) -> str:
    """Return the safe key of a tensor name, which file names contain: each dot becomes two underscores.

    Two names can have the same key.
    """
    return name.replace(".", "__")


def file_of(key: str, suffix: str) -> str:
    """Return the path of an array file in the directory."""
    return f"{FOLDER}/{key}__{suffix}.npy"


def foreign_form(suffix: str) -> str | None:
    """Return a description of a storage form that Ingot cannot read; None if no program is known to write the
    suffix."""
    prefixes = [prefix for prefix in _FOREIGN if suffix.startswith(prefix)]
    return _FOREIGN[max(prefixes, key=len)] if prefixes else None


def why_name_unsupported(name: str) -> str | None:
    """Return the reason why a tensor of this name cannot be stored; None if it can."""
    key = safe_key(name)
    try:
        length = len(f"{key}__shape.npy".encode())
    except UnicodeEncodeError:
        return f"expected a name that UTF-8 can encode, found {name[:80]!r}"
    if _is_unsafe_path(name):
        return f"expected a name without slash or NUL, not '.' or '..', because its files have it; found {name[:80]!r}"
    return (
        None
        if length <= _MAX_NAME
        else f"expected a file name of at most {_MAX_NAME} bytes, found {length}: shorten the tensor's name"
    )


def require_distinct(names: Iterable[str]) -> None:
    """Refuse tensor names that result in the same file name; file systems that ignore case are taken into account.

    Raises ``UnsupportedError`` ``npydir.collision``.
    """
    seen: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", safe_key(name)).casefold()
        first = seen.setdefault(folded, name)
        if first != name:
            raise UnsupportedError(
                f"{first!r} and {name!r} would be stored in files of the same name ('.' becomes '__', and some file "
                "systems fold case): rename one, or choose another format",
                rule="npydir.collision",
                where=name,
            )


def encode_manifest(names: Iterable[str]) -> bytes:
    """Return the bytes of the manifest, which maps each tensor name to its safe key."""
    return msgspec.json.format(msgspec.json.encode({name: safe_key(name) for name in names}), indent=2) + b"\n"


def parse_manifest(data: bytes, keys: Iterable[str], location: str) -> dict[str, str]:
    """Return safe keys by tensor name.

    The file maps names to safe keys, or safe keys to names.

    ``keys`` are the safe keys of the files in ``tensors/``. They decide the direction of the mapping if neither
    direction follows the rule of ``safe_key``.

    Raises
    ------
    FormatError
        ``npydir.manifest-json``, ``npydir.manifest-duplicate-key``, ``npydir.manifest-fields``, ``npydir.escape``,
        ``npydir.manifest-collision``.
    """
    manifest = strict_json(data, "npydir.manifest-json", "npydir.manifest-duplicate-key", location)
    for json_key, json_value in manifest.items():
        if not isinstance(json_value, str):
            raise FormatError(
                "npydir.manifest-fields",
                f"expected text as the value of {json_key[:200]!r}, found {type(json_value).__name__}",
                where=location,
            )
    pairs: Mapping[str, str] = manifest
    for text in (*pairs, *pairs.values()):
        if _is_unsafe_path(text):
            raise FormatError(
                "npydir.escape",
                f"expected names without slashes, not '.' or '..'; found {text[:200]!r}",
                where=location,
            )
    if not _is_by_name(pairs, set(keys)):
        keys_by_name: dict[str, str] = {}
        for key, name in pairs.items():
            if name in keys_by_name:
                raise FormatError(
                    "npydir.manifest-collision",
                    f"expected each tensor once, found {name[:200]!r} twice",
                    where=location,
                )
            keys_by_name[name] = key
        pairs = keys_by_name
    seen: dict[str, str] = {}
    for name, key in pairs.items():
        if key in seen:
            raise FormatError(
                "npydir.manifest-collision",
                f"expected a different safe key for each tensor, found {seen[key][:200]!r} and {name[:200]!r} both at "
                f"{key[:200]!r}",
                where=location,
            )
        seen[key] = name
    return dict(pairs)


def _is_by_name(pairs: Mapping[str, str], keys: set[str]) -> bool:
    """Return whether the manifest maps names to safe keys, and not safe keys to names.

    If neither direction follows the rule of ``safe_key``, the direction with more existing files is assumed.
    """
    if all(json_value == safe_key(json_key) for json_key, json_value in pairs.items()):
        return True
    if all(json_key == safe_key(json_value) for json_key, json_value in pairs.items()):
        return False
    return len(keys.intersection(pairs.values())) >= len(keys.intersection(pairs))


def _is_unsafe_path(text: str) -> bool:
    return "/" in text or "\0" in text or text in (".", "..")
