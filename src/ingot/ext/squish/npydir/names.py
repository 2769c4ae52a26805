"""Names in a Squish directory: files, suffixes, and the manifest that maps tensors to files."""

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
"""What squish's program notes of the shards that it has done; it stays when all are."""
MAX_MANIFEST = 100_000_000
# The longest file name that the usual file systems take, in bytes.
_MAX_NAME = 255

KNOWN = (
    *("q", "s", "shape", "pt", "q4", "s4", "q4a", "s4a", "z4a", "q3", "s3", "z3"),
    *("lra", "lrb", "nf4", "s_nf4"),
)
"""Suffixes of arrays that are read; a file is ``tensors/{safe_key}__{suffix}.npy``."""

# Suffixes by how they begin, the longest that fits counts.
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
"""What may follow ``.npy``; brotli is only recognised."""


def safe_key(name: str) -> str:
    """Return the name as files have it: every dot becomes two underscores, which is not one to one."""
    return name.replace(".", "__")


def file_of(key: str, suffix: str) -> str:
    """Return the path of an array in the directory."""
    return f"{FOLDER}/{key}__{suffix}.npy"


def foreign_form(suffix: str) -> str | None:
    """Say what an array of another form is; None for a suffix that nobody is known to write."""
    forms = [begin for begin in _FOREIGN if suffix.startswith(begin)]
    return _FOREIGN[max(forms, key=len)] if forms else None


def refuses_name(name: str) -> str | None:
    """Why no files can be named after a tensor; None if they can."""
    key = safe_key(name)
    try:
        length = len(f"{key}__shape.npy".encode())
    except UnicodeEncodeError:
        return f"a name is UTF-8 text, found {name[:80]!r}"
    if _leads_elsewhere(name):
        return f"its files are named after the tensor, and {name[:80]!r} has a slash or a NUL, or names a folder"
    return None if length <= _MAX_NAME else f"a file name has {_MAX_NAME} bytes at most, this one would have {length}"


def require_distinct(names: Iterable[str]) -> None:
    """Refuse tensors whose files would have one name, on file systems that fold case too.

    Raises ``UnsupportedError`` ``npydir.collision``.
    """
    seen: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", safe_key(name)).casefold()
        other = seen.setdefault(folded, name)
        if other != name:
            raise UnsupportedError(
                f"{other!r} and {name!r} would be stored in files of the same name ('.' becomes '__', and some file "
                "systems fold case): rename one, or choose another format",
                rule="npydir.collision",
                where=name,
            )


def encode_manifest(names: Iterable[str]) -> bytes:
    """Return the manifest: each tensor's own name, and what its files are named after."""
    return msgspec.json.format(msgspec.json.encode({name: safe_key(name) for name in names}), indent=2) + b"\n"


def parse_manifest(data: bytes, keys: Iterable[str], where: str) -> dict[str, str]:
    """Return tensor name to safe key, whichever way round the file has them.

    ``keys`` are those that files in ``tensors/`` have; they decide where the two orientations cannot be told apart by
    the rule that makes safe keys.

    Raises
    ------
    FormatError
        ``npydir.manifest-json``, ``npydir.manifest-duplicate-key``, ``npydir.manifest-fields``, ``npydir.escape``,
        ``npydir.manifest-collision``.
    """
    manifest = strict_json(data, "npydir.manifest-json", "npydir.manifest-duplicate-key", where)
    for left, right in manifest.items():
        if not isinstance(right, str):
            raise FormatError(
                "npydir.manifest-fields", f"expected text for {left[:200]!r}, found {type(right).__name__}", where=where
            )
    pairs: Mapping[str, str] = manifest
    for text in (*pairs, *pairs.values()):
        if _leads_elsewhere(text):
            raise FormatError(
                "npydir.escape", f"expected names without slashes, not '.' or '..'; found {text[:200]!r}", where=where
            )
    if not _is_by_name(pairs, set(keys)):
        turned: dict[str, str] = {}
        for key, name in pairs.items():
            if name in turned:
                raise FormatError(
                    "npydir.manifest-collision", f"expected each tensor once, found {name[:200]!r} twice", where=where
                )
            turned[name] = key
        pairs = turned
    seen: dict[str, str] = {}
    for name, key in pairs.items():
        if key in seen:
            raise FormatError(
                "npydir.manifest-collision",
                f"expected files of their own for each tensor, found {seen[key][:200]!r} and {name[:200]!r} both at "
                f"{key[:200]!r}",
                where=where,
            )
        seen[key] = name
    return dict(pairs)


def _is_by_name(pairs: Mapping[str, str], keys: set[str]) -> bool:
    """Whether the manifest maps names to keys: by the rule that makes keys, else by the files that are there."""
    if all(right == safe_key(left) for left, right in pairs.items()):
        return True
    if all(left == safe_key(right) for left, right in pairs.items()):
        return False
    return len(keys.intersection(pairs.values())) >= len(keys.intersection(pairs))


def _leads_elsewhere(text: str) -> bool:
    return "/" in text or "\0" in text or text in (".", "..")
