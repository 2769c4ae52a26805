"""The layout of an archive: its files, and the spans of objects of which each file consists. Page: spec/archives.md.

The layout is JSON in the first object of the ``.zt`` file. It describes every object, so that objects can be located
without the manifest, which a file that was cut off has lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from ingot.codecs.delta.exact import ID as DELTA
from ingot.core.files.archive import NameChecker
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.strictjson import strict_json
from ingot.engine.data import parse_spec, spec_data
from ingot.errors import FormatError, IngotError
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import TensorSpec

KEY = "ingot_archive"
"""The key of the root attribute that marks an archive; its value is the name of the object with the layout."""
LAYOUT = "ingot.archive"
"""The name of the object with the layout."""
FORMAT = "ingot-archive-1"
MAX_LAYOUT = 1 << 26
RULE = "archive.layout"
MAX_DELTAS = 4
"""The largest number of differences in the chain from an object that is stored without a base to another object."""

_MAX_SIZE = 1 << 53
_RATIO = 1 << 16
_FLOOR = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Span:
    """A range of the content of an object: ``size`` bytes from ``offset``; ``object`` is an index."""

    object: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A file: its name, its size in bytes, its SHA-256 in hexadecimal digits, and its spans in order."""

    name: str
    size: int
    sha256: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class External:
    """A range of a file of another model, on which an archive depends, and its BLAKE3 in hexadecimal digits."""

    file: str
    offset: int
    size: int
    blake3: str


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """The content of an archive: a folder, or a single file.

    ``objects`` are the specs of all objects in the order in which they are stored. ``external`` are ranges of another
    model, ``against``; their indices follow those of the objects. ``bases`` maps objects that are stored as differences
    to the indices of their bases.
    """

    folder: bool
    objects: Sequence[TensorSpec]
    files: Sequence[ArchivedFile]
    bases: Mapping[int, int] = field(default_factory=dict)
    external: Sequence[External] = ()
    against: str = ""

    @property
    def size(self) -> int:
        """The number of bytes of all files."""
        return sum(file.size for file in self.files)

    def encoded(self) -> bytes:
        """Return the layout as JSON."""
        fields = {
            "format": FORMAT,
            "folder": self.folder,
            **({"bases": sorted(self.bases.items())} if self.bases else {}),
            **(
                {"against": self.against, "external": [list(astuple(item)) for item in self.external]}
                if self.external
                else {}
            ),
            "objects": [_without_defaults(spec_data(spec)) for spec in self.objects],
            "files": [
                {
                    "name": file.name,
                    "size": file.size,
                    "sha256": file.sha256,
                    "spans": [[span.object, span.offset, span.size] for span in file.spans],
                }
                for file in self.files
            ],
        }
        return json.dumps(fields, separators=(",", ":")).encode()


_PART_DEFAULTS = {"type": None, "encoding": "raw", "uncompressed_length": None, "limit": None}


def _without_defaults(spec: dict[str, Any]) -> dict[str, Any]:
    parts = [
        {key: value for key, value in part.items() if key not in _PART_DEFAULTS or value != _PART_DEFAULTS[key]}
        for part in spec["parts"]
    ]
    return {**spec, "parts": parts}


def content_size(spec: TensorSpec) -> int | None:
    """Return the number of bytes of an object's content; None if Ingot cannot return the content of this object.

    The content is the bytes of the only part of an object, after decompression. If an object has several parts, they
    encode values without loss, and the content is these values.
    """
    if len(spec.parts) == 1:
        return spec.parts[0].nbytes
    row = DTYPES.get(spec.dtype)
    return None if row is None or spec.codec == DenseLayout.codec else row.nbytes(spec.size)


def parse_layout(raw: bytes, archive_size: int, location: str) -> ArchiveLayout:
    """Return a parsed layout, whose names, sizes and spans are valid.

    ``archive_size`` is the size of the archive in bytes; it limits the total size of the files.

    Raises ``FormatError``: ``archive.layout``, ``archive.span``, ``archive.total``, ``archive.name``,
    ``archive.collision``, ``archive.duplicate``.
    """
    root = strict_json(raw, RULE, RULE, location)
    folder, objects, files = (root.get(key) for key in ("folder", "objects", "files"))
    if root.get("format") != FORMAT:
        raise _error(f"expected format {FORMAT!r}, found {str(root.get('format'))[:80]!r}", location)
    if not (isinstance(folder, bool) and isinstance(objects, list) and isinstance(files, list) and files):
        raise _error("expected folder true or false, objects, and files", location)
    specs = tuple(_spec(item, location) for item in objects)
    if len({spec.name for spec in specs}) != len(specs):
        raise _error("expected objects with distinct names", location)
    external = _external(root.get("external", []), location)
    sizes = [*map(content_size, specs), *(item.size for item in external)]
    bases = _bases(root.get("bases", []), specs, sizes, location)
    against = _text(root.get("against", ""), location)
    parsed = tuple(_file(item, sizes, location) for item in files)
    check_names([file.name for file in parsed], location)
    if not folder and (len(parsed) != 1 or "/" in parsed[0].name):
        raise _error("expected a single file, because the archive is no folder", location)
    used = {span.object for file in parsed for span in file.spans} | set(bases.values())
    if len(used) != len(sizes):
        raise _error("expected a use of each object by a file", location)
    total = sum(file.size for file in parsed)
    if total > _FLOOR + _RATIO * archive_size:
        message = f"expected files in proportion to an archive of {archive_size} bytes, found {total} bytes"
        raise FormatError("archive.total", message, where=location)
    return ArchiveLayout(folder, specs, parsed, bases, external, against)


def _external(value: object, location: str) -> tuple[External, ...]:
    items = value if isinstance(value, list) else [None]
    result = []
    for item in items:
        fields = item if isinstance(item, list) and len(item) == 4 else [None] * 4
        name, offset, size, digest = fields
        if not (_is_size(offset) and _is_size(size) and isinstance(digest, str) and _SHA256.fullmatch(digest)):
            raise _error("expected external ranges of file, offset, size and blake3", location)
        result.append(External(_text(name, location), int(str(offset)), int(str(size)), digest))
    for name in {item.file for item in result}:
        check_names([name], location)
    return tuple(result)


def _bases(value: object, specs: Sequence[TensorSpec], sizes: Sequence[int | None], location: str) -> dict[int, int]:
    """Return the bases of objects; each is an earlier object or an external range of the same size."""
    bases: dict[int, int] = {}
    depths: dict[int, int] = {}
    for item in value if isinstance(value, list) else [None]:
        pair = item if isinstance(item, list) and len(item) == 2 and all(map(_is_size, item)) else [0, 0]
        index, base = pair
        earlier = base < index or len(specs) <= base < len(sizes)
        depth = depths.get(base, 0) + 1
        if index >= len(specs) or not earlier or index in bases or depth > MAX_DELTAS or sizes[index] != sizes[base]:
            raise _error("expected bases of the same size before their objects, in short chains", location)
        bases[index] = base
        depths[index] = depth
    if any((spec.codec == DELTA) != (index in bases) for index, spec in enumerate(specs)):
        raise _error(f"expected a base for each object of codec {DELTA}, and for no other", location)
    return bases


def check_names(names: Sequence[str], location: str) -> None:
    """Check the names of files.

    Raises ``FormatError`` ``archive.name``, ``archive.collision``, ``archive.duplicate``.
    """
    checker = NameChecker()
    for name in names:
        try:
            checker.add(name)
        except IngotError as error:
            raise error.add_location(location) from None
        except UnicodeEncodeError:
            raise FormatError("archive.name", "expected a name in UTF-8", where=f"{location}: {name!r:.200}") from None


def _spec(item: object, location: str) -> TensorSpec:
    try:
        if not isinstance(item, dict):
            raise TypeError("no object")  # noqa: TRY301
        spec = parse_spec(item)
        sizes = [value for part in spec.parts for value in (part.length, part.uncompressed_length, part.limit)]
        texts = [spec.name, spec.dtype, spec.codec, *(text for part in spec.parts for text in (part.role, part.dtype))]
        if not (
            all(isinstance(text, str) for text in texts)
            and all(value is None or _is_size(value) for value in sizes)
            and all(_is_size(size) for size in spec.shape)
            and spec.parts
        ):
            raise ValueError("a text or size has another type, or a size is negative")  # noqa: TRY301
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise _error(f"expected objects as the specification defines them: {error!s:.200}", location) from None
    return spec


def _file(item: object, sizes: Sequence[int | None], location: str) -> ArchivedFile:
    fields: Mapping[str, Any] = item if isinstance(item, dict) else {}
    size, digest, spans = (fields.get(key) for key in ("size", "sha256", "spans"))
    name = _text(fields.get("name"), location)
    valid = _is_size(size) and isinstance(digest, str) and _SHA256.fullmatch(digest) and isinstance(spans, list)
    if not valid:
        raise _error("expected files with name, size, sha256 and spans", f"{location}: {name[:200]}")
    assert isinstance(spans, list)
    parsed = tuple(_spans(spans, sizes, f"{location}: {name[:200]}"))
    if sum(span.size for span in parsed) != size:
        raise FormatError("archive.span", f"expected spans of {size} bytes together", where=f"{location}: {name[:200]}")
    return ArchivedFile(name, int(str(size)), str(digest), parsed)


def _spans(spans: Sequence[object], sizes: Sequence[int | None], location: str) -> Iterator[Span]:
    for item in spans:
        fields = item if isinstance(item, list) and len(item) == 3 and all(map(_is_size, item)) else None
        if fields is None or fields[0] >= len(sizes):
            raise FormatError("archive.span", "expected spans of object, offset and size", where=location)
        content = sizes[fields[0]]
        if content is None or not fields[2] or fields[1] + fields[2] > content:
            message = f"expected spans inside their objects, found {fields[2]} bytes at {fields[1]} of {content}"
            raise FormatError("archive.span", message, where=location)
        yield Span(*fields)


def _text(value: object, location: str) -> str:
    if not isinstance(value, str):
        raise _error("expected names as texts", location)
    return value


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def _error(message: str, location: str) -> FormatError:
    return FormatError(RULE, message, where=location)
