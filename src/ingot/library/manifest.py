"""What a library knows of an artifact: its files, and the pieces that each of them is made of. Page: spec/store.md."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.core.bytes.checksums import Blake3
from ingot.core.bytes.checksums import hex_of as hex_of_digest
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.library.objects import require_id
from ingot.model.store import checked_name

FORMAT = "ingot-library-1"
FOLDER, ENDING = "artifacts", ".json"
MAX_MANIFEST = 1 << 28
INLINE = 1 << 10
"""Bytes up to which a piece stands in the manifest."""

_RULE = "library.manifest"
_MOST = 1 << 53
_PIECE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,127}")
_DIGEST = re.compile(r"blake3:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file, after those of the piece before: an object, zeros, or what stands here.

    ``tensor``, ``part``, ``dtype`` and ``shape`` say what an object is where it is a tensor's part.
    """

    size: int
    object: str = ""
    data: bytes = b""
    tensor: str = ""
    part: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def encoded(self) -> dict[str, Any]:
        """Return the piece as it stands in the manifest."""
        if not self.object:
            return {"bytes": b64encode(self.data).decode()} if self.data else {"zeros": self.size}
        known = {"tensor": self.tensor, "part": self.part, "dtype": self.dtype, "shape": list(self.shape)}
        return {"object": self.object, "size": self.size, **(known if self.tensor else {})}


@dataclass(frozen=True, slots=True)
class File:
    """One file: its name in the artifact, its bytes, ``blake3:`` and the digest of them, and its pieces in order."""

    name: str
    size: int
    digest: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """An artifact: a folder, or a single file."""

    name: str
    folder: bool
    format: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces that are objects."""
        return (piece for file in self.files for piece in file.pieces if piece.object)

    def objects(self) -> set[str]:
        """Return the ids of all objects that the files are made of."""
        return {piece.object for piece in self.pieces()}

    def encoded(self) -> bytes:
        """Return the manifest as it lies in the library."""
        fields = {
            "format": FORMAT,
            "name": self.name,
            "folder": self.folder,
            "container": self.format,
            "files": [
                {
                    "name": file.name,
                    "size": file.size,
                    "digest": file.digest,
                    "pieces": [piece.encoded() for piece in file.pieces],
                }
                for file in self.files
            ],
        }
        return (json.dumps({**fields, "digest": _digest(fields)}, indent=1) + "\n").encode()


def file_of(name: str) -> str:
    """Return where an artifact's manifest lies.

    Raises ``UsageError`` ``library.name`` for a name that is none.
    """
    pieces = name.split("/") if isinstance(name, str) and len(name) <= 200 else [""]
    if not all(_PIECE.fullmatch(piece) and not piece.endswith(ENDING) for piece in pieces):
        raise UsageError(
            "expected a name such as org/model of letters, digits and _ . + @ = -, that does not begin with a dot nor "
            f"end in {ENDING}; found {repr(name)[:200]}",
            rule="library.name",
        )
    return f"{FOLDER}/{name}{ENDING}"


def parse_manifest(raw: bytes, name: str, where: str) -> Manifest:
    """Return what a manifest says; every number, name and id in it is sound then.

    Raises
    ------
    FormatError
        ``library.manifest``: another shape, or a file name that leads out of the artifact.
    IntegrityError
        ``library.manifest-digest``: it is not as it was written.
    """
    root = strict_json(raw, _RULE, _RULE, where)
    stated = root.pop("digest", None)
    files = root.get("files")
    if root.get("format") != FORMAT or not isinstance(stated, str) or not isinstance(files, list):
        raise FormatError(_RULE, f"expected a manifest of format {FORMAT!r}, with files and a digest", where=where)
    if _digest(root) != stated:
        raise IntegrityError(
            "library.manifest-digest",
            "expected the manifest as it was written, found another: it is damaged; add the artifact again",
            where=where,
        )
    folder, container = root.get("folder"), root.get("container")
    if root.get("name") != name or not isinstance(folder, bool) or not isinstance(container, str):
        raise FormatError(_RULE, f"expected name {name!r}, folder true or false, and a container", where=where)
    parsed = tuple(_file(item, where) for item in files)
    _require_apart([file.name for file in parsed], folder=folder, where=where)
    return Manifest(name, folder, container, parsed)


def _digest(fields: Mapping[str, Any]) -> str:
    running = Blake3()
    running.update(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return f"blake3:{hex_of_digest(running)}"


def _require_apart(names: list[str], *, folder: bool, where: str) -> None:
    """Refuse names of which one is another's folder, or that stand there twice."""
    folders = {"/".join(name.split("/")[:depth]) for name in names for depth in range(1, name.count("/") + 1)}
    single = len(names) == 1 and "/" not in names[0]
    if len(set(names)) != len(names) or folders.intersection(names) or not (folder or single):
        raise FormatError(_RULE, "expected each file once, and one alone where there is no folder", where=where)


def _file(item: Any, where: str) -> File:
    fields = item if isinstance(item, dict) else {}
    name, size, digest, pieces = (fields.get(key) for key in ("name", "size", "digest", "pieces"))
    sound = isinstance(name, str) and isinstance(digest, str) and isinstance(pieces, list) and _is_size(size)
    if not sound or not _DIGEST.fullmatch(str(digest)):
        raise FormatError(_RULE, "expected files with name, size, digest and pieces", where=where)
    assert isinstance(pieces, list)
    try:
        checked_name(str(name), where)
    except FormatError as error:
        raise FormatError(_RULE, error.message, where=where) from None
    made = tuple(_piece(piece, where) for piece in pieces)
    if sum(piece.size for piece in made) != size:
        raise FormatError(
            _RULE, f"expected pieces of {size} bytes together, found {sum(piece.size for piece in made)}", where=where
        )
    return File(str(name), int(str(size)), str(digest), made)


def _piece(item: Any, where: str) -> Piece:
    fields = item if isinstance(item, dict) else {}
    if "zeros" in fields and _is_size(fields["zeros"]):
        return Piece(fields["zeros"])
    if isinstance(fields.get("bytes"), str):
        try:
            data = b64decode(fields["bytes"], validate=True)
        except ValueError:
            data = b""
        if 0 < len(data) <= INLINE:
            return Piece(len(data), data=data)
    if "object" in fields and _is_size(fields.get("size")):
        id = require_id(fields["object"], _RULE, where)
        tensor, part, dtype, shape = (fields.get(key, "") for key in ("tensor", "part", "dtype", "shape"))
        words = all(isinstance(text, str) for text in (tensor, part, dtype)) and (not tensor or dtype in DTYPES)
        if words and (shape == "" or (isinstance(shape, list) and all(_is_size(size) for size in shape))):
            return Piece(fields["size"], id, b"", tensor, part, dtype, tuple(shape))
    raise FormatError(
        _RULE, f"expected pieces that are an object, zeros, or at most {INLINE} bytes; found another", where=where
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
