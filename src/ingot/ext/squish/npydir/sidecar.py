"""Read and write ``ingot.json``: element types of the original tensors, digests and metadata. squish ignores the
file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squish.npydir.names import SIDECAR

VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a tensor in ``ingot.json``.

    ``dtype`` is the element type of the original tensor. ``digests`` are the digests of the values of its arrays, by
    array suffix; None if not computed. ``heads`` are the digests of the headers of its array files, by suffix. A header
    contains the shape and type of the values.
    """

    dtype: str
    digests: Mapping[str, str | None]
    heads: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Contents of the file; ``digest`` covers the file itself and the manifest."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Entry] = field(default_factory=dict)
    digest: str | None = None


def encode(sidecar: Sidecar, manifest: bytes = b"", digest: str | None = None) -> bytes:
    """Return the bytes of the file.

    If ``digest`` names an algorithm, the file has a digest of its own bytes and of the bytes of the manifest.
    """
    tensors = {name: _entry_fields(entry) for name, entry in sidecar.tensors.items()}
    document = {"ingot_npydir": VERSION, "metadata": dict(sidecar.metadata), "tensors": tensors}
    if digest is None:
        return msgspec.json.format(msgspec.json.encode(document), indent=1)
    document[manifest_digest.KEY] = manifest_digest.stand_in(digest)
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    return manifest_digest.fill_json(data, digest, [manifest])


def _entry_fields(entry: Entry) -> dict[str, Any]:
    heads = {"heads": dict(entry.heads)} if entry.heads else {}
    return {"dtype": entry.dtype, "digests": dict(entry.digests), **heads}


def json_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata that JSON can store: each value that JSON would change becomes its JSON text."""
    encoded = {}
    for key, value in values.items():
        text = msgspec.json.encode(value)
        encoded[key] = value if msgspec.json.decode(text) == value else text.decode()
    return encoded


def parse(data: bytes) -> Sidecar:
    """Return the parsed and checked file.

    Raises
    ------
    FormatError
        ``npydir.sidecar-json``, ``npydir.sidecar-duplicate-key``, ``npydir.sidecar-fields``.
    UnsupportedError
        ``npydir.sidecar-version``.
    """

    def refuse(expected: str, root: object) -> FormatError:
        return FormatError("npydir.sidecar-fields", f"expected {expected}, found {str(root)[:80]!r}", where=SIDECAR)

    root = strict_json(data, "npydir.sidecar-json", "npydir.sidecar-duplicate-key", SIDECAR)
    version = root.get("ingot_npydir")
    if version != VERSION or isinstance(version, bool):
        raise UnsupportedError(
            f"expected ingot_npydir {VERSION}, found {str(version)[:40]!r}",
            rule="npydir.sidecar-version",
            where=SIDECAR,
        )
    metadata = root.get("metadata")
    tensors = root.get("tensors")
    digest = root.pop(manifest_digest.KEY, None)
    if not isinstance(digest, str | None):
        raise refuse(f"text for {manifest_digest.KEY}", digest)
    if set(root) != {"ingot_npydir", "metadata", "tensors"}:
        raise refuse("ingot_npydir, metadata and tensors", ", ".join(root))
    if not isinstance(metadata, dict) or not isinstance(tensors, dict):
        raise refuse("metadata and tensors as objects", metadata if not isinstance(metadata, dict) else tensors)
    entries = {}
    for name, value in tensors.items():
        if not isinstance(value, dict) or set(value) - {"heads"} != {"dtype", "digests"}:
            raise refuse(f"dtype and digests of {name[:80]!r}", value)
        if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
            raise refuse(f"an element type of {name[:80]!r}", value["dtype"])
        digests = value["digests"]
        if not isinstance(digests, dict) or not all(isinstance(text, str | None) for text in digests.values()):
            raise refuse(f"digests by suffix of {name[:80]!r}", digests)
        heads = value.get("heads", {})
        if not isinstance(heads, dict) or not all(isinstance(text, str) for text in heads.values()):
            raise refuse(f"digests of headers of {name[:80]!r}", heads)
        entries[name] = Entry(value["dtype"], digests, heads)
    return Sidecar(metadata, entries, digest)
