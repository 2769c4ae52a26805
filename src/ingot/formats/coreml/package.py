"""The folder of a package: ``Manifest.json`` lists its items, which are in ``Data``.

The layout is that of coremltools' ``ModelPackage``, file format version 1.
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
    """The contents of a manifest: ``model`` is the path of the root model's file, ``items`` are the paths of all items.

    Paths are relative to the package.
    """

    model: str
    items: tuple[str, ...]

    def weight_file(self, named: str, location: str) -> str:
        """Return the path of a file that a program names relative to the model.

        Raises ``FormatError`` ``coreml.weight-path``.
        """
        inner = named.removeprefix(MODEL_PATH)
        if inner == named or not _is_inside(inner):
            raise FormatError(
                "coreml.weight-path",
                f"expected a file relative to the model, such as '{MODEL_PATH}weights/weight.bin', found "
                f"{named[:200]!r}",
                where=location,
            )
        return f"{self.model.rpartition('/')[0]}/{inner}"


def parse_manifest(data: bytes, location: str) -> Package:
    """Parse the manifest of a package.

    Raises ``FormatError``: ``coreml.manifest``: not JSON, fields missing or of wrong types; ``coreml.manifest-path``: a
    path leaves the package.
    """
    manifest = strict_json(data, "coreml.manifest", "coreml.manifest", location)
    root = _text(manifest, "rootModelIdentifier", location)
    entries = manifest.get("itemInfoEntries")
    if not isinstance(entries, dict):
        raise _refuse("itemInfoEntries with the package's items", location)
    paths = {key: _path(entry, location) for key, entry in entries.items()}
    if root not in paths:
        raise _refuse(f"an entry of the root model {root[:80]!r}", location)
    return Package(paths[root], tuple(sorted(paths.values())))


def _path(entry: Any, location: str) -> str:
    if not isinstance(entry, dict):
        raise _refuse("an object for each item", location)
    path = _text(entry, "path", location)
    if not _is_inside(path):
        raise FormatError(
            "coreml.manifest-path", f"expected a path within the package, found {path[:200]!r}", where=location
        )
    return f"{DATA}/{path}"


def _is_inside(path: str) -> bool:
    components = path.split("/")
    return path.isprintable() and "\\" not in path and not any(component in ("", ".", "..") for component in components)


def _text(fields: dict[str, Any], key: str, location: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise _refuse(f"text in {key!r}", location)
    return value


def _refuse(expected: str, location: str) -> FormatError:
    return FormatError("coreml.manifest", f"expected {expected}, but it is missing or has another type", where=location)
