"""The folder of a package: ``Manifest.json`` names its items, which lie under ``Data``.

Layout as coremltools' ``ModelPackage`` writes it, file format version 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError

MANIFEST = "Manifest.json"
DATA = "Data"
MODEL_PATH = "@model_path/"
MAX_MANIFEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Package:
    """What a manifest says: ``model`` is the root model's file, ``items`` all paths; relative to the package."""

    model: str
    items: tuple[str, ...]

    def weight_file(self, named: str, where: str) -> str:
        """Return the path of a file that a program names relative to the model.

        Raises ``FormatError`` ``coreml.weight-path``.
        """
        inner = named.removeprefix(MODEL_PATH)
        if inner == named or not _is_inside(inner):
            raise FormatError(
                "coreml.weight-path",
                f"expected a file beside the model as in '{MODEL_PATH}weights/weight.bin', found {named[:200]!r}",
                where=where,
            )
        return f"{self.model.rpartition('/')[0]}/{inner}"


def parse_manifest(data: bytes, where: str) -> Package:
    """Read a manifest.

    Raises ``FormatError``: ``coreml.manifest``: not JSON, fields missing or of wrong types; ``coreml.manifest-path``: a
    path leaves the package.
    """
    manifest = strict_json(data, "coreml.manifest", "coreml.manifest", where)
    root = _text(manifest, "rootModelIdentifier", where)
    entries = manifest.get("itemInfoEntries")
    if not isinstance(entries, dict):
        raise _refuse("itemInfoEntries with the package's items", where)
    paths = {key: _path(entry, where) for key, entry in entries.items()}
    if root not in paths:
        raise _refuse(f"an entry of the root model {root[:80]!r}", where)
    return Package(paths[root], tuple(sorted(paths.values())))


def _path(entry: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise _refuse("an object for each item", where)
    path = _text(entry, "path", where)
    if not _is_inside(path):
        raise FormatError(
            "coreml.manifest-path", f"expected a path within the package, found {path[:200]!r}", where=where
        )
    return f"{DATA}/{path}"


def _is_inside(path: str) -> bool:
    pieces = path.split("/")
    return path.isprintable() and "\\" not in path and not any(piece in ("", ".", "..") for piece in pieces)


def _text(fields: dict[str, Any], key: str, where: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise _refuse(f"text in {key!r}", where)
    return value


def _refuse(expected: str, where: str) -> FormatError:
    return FormatError("coreml.manifest", f"expected {expected}, found none", where=where)
