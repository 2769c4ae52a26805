"""Manifests: the files of an artifact in a library, and the chunks of each file (``spec/store.md``)."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ingot.core.bytes.checksums import Blake3
from ingot.core.bytes.checksums import hex_of as hex_of_digest
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.library.objects import require_id
from ingot.model.store import checked_name

FORMAT = "ingot-library-1"
FOLDER = "artifacts"
ENDING = ".json"
MAX_MANIFEST = 1 << 28
INLINE = 1 << 10
"""Maximum bytes of a chunk that is stored in the manifest."""

_RULE = "library.manifest"
_MAX_SIZE = 1 << 53
_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,127}")
_DIGEST = re.compile(r"blake3:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive bytes of a file: the contents of an object, zeros, or ``data`` in the manifest.

    ``tensor``, ``part``, ``dtype`` and ``shape`` describe an object that is a part of a tensor.
    """

    size: int
    object: str = ""
    data: bytes = b""
    tensor: str = ""
    part: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def encoded(self) -> dict[str, Any]:
        """Return the JSON of the chunk."""
        if not self.object:
            return {"bytes": b64encode(self.data).decode()} if self.data else {"zeros": self.size}
        tensor_fields = {"tensor": self.tensor, "part": self.part, "dtype": self.dtype, "shape": list(self.shape)}
        return {"object": self.object, "size": self.size, **(tensor_fields if self.tensor else {})}


@dataclass(frozen=True, slots=True)
class File:
    """A file: its name in the artifact, its size in bytes, its digest ``blake3:...``, and its chunks in order."""

    name: str
    size: int
    digest: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The base of an adapter: its name in the library, its content id, and the digest of its manifest."""

    name: str
    content: str
    manifest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of an artifact: a folder, or a single file. ``base`` is an adapter's base, if the library has it."""

    name: str
    folder: bool
    format: str
    files: tuple[File, ...]
    base: AdapterBase | None = None

    @property
    def size(self) -> int:
        """The number of bytes of all files."""
        return sum(file.size for file in self.files)

    def object_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks that are stored as objects of the library, not in the manifest."""
        return (chunk for file in self.files for chunk in file.chunks if chunk.object)

    def objects(self) -> set[str]:
        """Return the ids of all objects from which the files are assembled."""
        return {chunk.object for chunk in self.object_chunks()}

    def digest(self) -> str:
        """Return the digest that the manifest's file states."""
        return _digest(self._fields())

    def encoded(self) -> bytes:
        """Return the content of the manifest's file."""
        fields = self._fields()
        return (json.dumps({**fields, "digest": _digest(fields)}, indent=1) + "\n").encode()

    def _fields(self) -> dict[str, Any]:
        base = {} if self.base is None else {"base": asdict(self.base)}
        return {
            "format": FORMAT,
            "name": self.name,
            "folder": self.folder,
            "container": self.format,
            **base,
            "files": [
                {
                    "name": file.name,
                    "size": file.size,
                    "digest": file.digest,
                    "pieces": [chunk.encoded() for chunk in file.chunks],
                }
                for file in self.files
            ],
        }


def file_of(name: str) -> str:
    """Return the file name of the manifest of the artifact ``name``.

    Raises ``UsageError`` ``library.name`` for an invalid name.
    """
    parts = name.split("/") if isinstance(name, str) and len(name) <= 200 else [""]
    if not all(_NAME_PART.fullmatch(part) and not part.endswith(ENDING) for part in parts):
        raise UsageError(
            "expected a name such as org/model of letters, digits and _ . + @ = -, that does not begin with a dot nor "
            f"end in {ENDING}; found {repr(name)[:200]}",
            rule="library.name",
        )
    return f"{FOLDER}/{name}{ENDING}"


def parse_manifest(raw: bytes, name: str, location: str) -> Manifest:
    """Parse a manifest, and check its numbers, names and ids.

    Raises
    ------
    FormatError
        ``library.manifest``: invalid content, or a file name outside the artifact.
    IntegrityError
        ``library.manifest-digest``: the manifest changed since it was written.
    """
    root = strict_json(raw, _RULE, _RULE, location)
    declared = root.pop("digest", None)
    files = root.get("files")
    if root.get("format") != FORMAT or not isinstance(declared, str) or not isinstance(files, list):
        raise FormatError(_RULE, f"expected a manifest of format {FORMAT!r}, with files and a digest", where=location)
    if _digest(root) != declared:
        raise IntegrityError(
            "library.manifest-digest",
            "the manifest changed since it was written: it is damaged; add the artifact again",
            where=location,
        )
    folder = root.get("folder")
    container = root.get("container")
    if root.get("name") != name or not isinstance(folder, bool) or not isinstance(container, str):
        raise FormatError(_RULE, f"expected name {name!r}, folder true or false, and a container", where=location)
    parsed = tuple(_file(item, location) for item in files)
    _require_distinct([file.name for file in parsed], folder=folder, location=location)
    return Manifest(name, folder, container, parsed, _base(root.get("base"), location))


def _base(value: object, location: str) -> AdapterBase | None:
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    name, content, digest = (fields.get(key) for key in ("name", "content", "manifest"))
    if not (
        isinstance(name, str) and all(isinstance(item, str) and _DIGEST.fullmatch(item) for item in (content, digest))
    ):
        raise FormatError(_RULE, "expected a base with name, content and manifest", where=location)
    try:
        file_of(name)
    except UsageError as error:
        raise FormatError(_RULE, error.message, where=location) from None
    return AdapterBase(name, str(content), str(digest))


def _digest(fields: Mapping[str, Any]) -> str:
    hasher = Blake3()
    hasher.update(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return f"blake3:{hex_of_digest(hasher)}"


def _require_distinct(names: list[str], *, folder: bool, location: str) -> None:
    """Raise an error if a name occurs twice or is a parent folder of another, or if a single file has several names."""
    folders = {"/".join(name.split("/")[:depth]) for name in names for depth in range(1, name.count("/") + 1)}
    single = len(names) == 1 and "/" not in names[0]
    if len(set(names)) != len(names) or folders.intersection(names) or not (folder or single):
        raise FormatError(
            _RULE, "expected distinct files, and a single file if the artifact is no folder", where=location
        )


def _file(item: Any, location: str) -> File:
    fields = item if isinstance(item, dict) else {}
    name, size, digest, chunks = (fields.get(key) for key in ("name", "size", "digest", "pieces"))
    sound = isinstance(name, str) and isinstance(digest, str) and isinstance(chunks, list) and _is_size(size)
    if not sound or not _DIGEST.fullmatch(str(digest)):
        raise FormatError(_RULE, "expected files with name, size, digest and chunks", where=location)
    assert isinstance(chunks, list)
    try:
        checked_name(str(name), location)
    except FormatError as error:
        raise FormatError(_RULE, error.message, where=location) from None
    parsed = tuple(_chunk(chunk, location) for chunk in chunks)
    if sum(chunk.size for chunk in parsed) != size:
        raise FormatError(
            _RULE,
            f"expected pieces of {size} bytes together, found {sum(chunk.size for chunk in parsed)}",
            where=location,
        )
    return File(str(name), int(str(size)), str(digest), parsed)


def _chunk(item: Any, location: str) -> Chunk:
    fields = item if isinstance(item, dict) else {}
    if "zeros" in fields and _is_size(fields["zeros"]):
        return Chunk(fields["zeros"])
    if isinstance(fields.get("bytes"), str):
        try:
            data = b64decode(fields["bytes"], validate=True)
        except ValueError:
            data = b""
        if 0 < len(data) <= INLINE:
            return Chunk(len(data), data=data)
    if "object" in fields and _is_size(fields.get("size")):
        id = require_id(fields["object"], _RULE, location)
        tensor, part, dtype, shape = (fields.get(key, "") for key in ("tensor", "part", "dtype", "shape"))
        valid = all(isinstance(text, str) for text in (tensor, part, dtype)) and (not tensor or dtype in DTYPES)
        if valid and (shape == "" or (isinstance(shape, list) and all(_is_size(size) for size in shape))):
            return Chunk(fields["size"], id, b"", tensor, part, dtype, tuple(shape))
    raise FormatError(_RULE, f"expected chunks that are an object, zeros, or at most {INLINE} bytes", where=location)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE
