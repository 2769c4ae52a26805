"""List the arrays of a Squish directory, open them and check their headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.core.bytes import encodings
from ingot.core.files.sequential import SequentialSource
from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.names import COMPRESSIONS, FOLDER, READ_SUFFIXES, file_of, foreign_form
from ingot.model.bytesource import ByteSource, MemorySource, Stamp, StampedSource
from ingot.model.reading.ranges import HeaderSource, read_bytes
from ingot.model.store import Store


class _CompressedReader:
    """Reader of the compressed bytes of a file, with the ``read`` method that a decompressor calls."""

    def __init__(self, file: ByteSource) -> None:
        self._file = file
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        remaining = self._file.size - self._position
        out = bytearray(remaining if size < 0 else min(size, remaining))
        self._file.readinto(self._position, memoryview(out))
        self._position += len(out)
        return bytes(out)


class ZstdFile(SequentialSource, StampedSource):
    """Byte source of the decompressed bytes of a Zstandard file; it reads in order and never keeps all bytes in memory.

    Parameters
    ----------
    file : ByteSource
        The compressed file.
    size : int
        Number of bytes after decompression. Reading to the end raises ``FormatError`` ``npydir.zstd`` if there are more
        or fewer.
    """

    def __init__(self, file: ByteSource, size: int) -> None:
        self._file = file
        self.stamp = (
            file.stamp if isinstance(file, StampedSource) else Stamp(file.size)
        )  # a file in memory has no stamp
        super().__init__(file.name, size)

    def start(self) -> encodings.ZstdReader:
        return encodings.ZstdReader(_CompressedReader(self._file), self.size, "npydir.zstd", self.name)

    def changed(self) -> bool:
        return self._file.changed()

    def close(self) -> None:
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ZstdFile, (self._file, self.size)


def zstd_head(file: ByteSource, length: int) -> bytes:
    """Return the first ``length`` decompressed bytes.

    Raises ``FormatError`` ``npydir.zstd`` if the file has fewer.
    """
    reader = encodings.ZstdReader(_CompressedReader(file), length, "npydir.zstd", file.name)
    out = memoryview(bytearray(length))
    reader.readinto(out)
    return bytes(out)


_PREAMBLE = 12
# Bytes to read first: enough for the header that NumPy writes for few dimensions, and for an array of a tensor's shape.
_USUAL = 512


@dataclass(frozen=True, slots=True)
class Array:
    """An array file that was opened and whose header was checked.

    ``head`` are the bytes of the header. ``source`` and ``values`` are sources of the same file; ``values`` is in
    memory if the file is small.
    """

    name: str
    header: npy.NpyHeader
    source: ByteSource
    head: bytes
    values: ByteSource


@dataclass(slots=True)
class Group:
    """The array files of one tensor, by suffix.

    ``paths`` has the paths of arrays that Ingot can read. ``foreign`` has descriptions of arrays that Ingot cannot
    read.
    """

    key: str
    paths: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)


def list_arrays(store: Store) -> tuple[dict[str, Group], list[str]]:
    """Return the array files of each tensor by safe key, and the names of files in ``tensors/`` that are not arrays.

    Raises
    ------
    FormatError
        ``npydir.link``: a link points out of the directory. ``npydir.extra-file``: the suffix of an array is unknown,
        so it cannot belong to a tensor.
    """
    listings = {folder: store.list(folder) for folder in ("", FOLDER)}
    for folder, listing in listings.items():
        links = [name for name in listing.outside if folder or name in (FOLDER, "manifest.json", "ingot.json")]
        if links:
            raise FormatError(
                "npydir.link",
                "expected files in this directory, found a link that leads out of it: copy the directory with `cp -rL`",
                where=f"{folder}/{links[0]}" if folder else links[0],
            )
    groups: dict[str, Group] = {}
    other_files: list[str] = []
    for name in listings[FOLDER].files:
        if name.startswith("."):
            continue
        stem, compression = _stem(name)
        if stem is None:
            other_files.append(name)
            continue
        key, underscores, suffix = stem.rpartition("__")
        if not underscores or not (suffix in READ_SUFFIXES or foreign_form(suffix)):
            raise extra_file(f"{FOLDER}/{name}", "an array with an unknown suffix")
        group = groups.setdefault(key, Group(key))
        if suffix in READ_SUFFIXES and compression != ".br":
            group.paths.setdefault(suffix, f"{FOLDER}/{name}")  # names are sorted: the uncompressed file comes first
        else:
            group.foreign[f"{suffix}{compression}"] = foreign_form(suffix) or "compressed with brotli"
    return groups, other_files


def extra_file(location: str, description: str) -> FormatError:
    """Return the error for an array that belongs to no tensor of the manifest."""
    return FormatError(
        "npydir.extra-file",
        f"expected only arrays of tensors in the manifest, found {description}; remove the file",
        where=location,
    )


def open_array(store: Store, path: str) -> Array:
    """Open an array file; check its header and its length.

    Raises ``FormatError`` with the rules of ``npy`` and ``npydir.zstd``, ``UnsupportedError`` ``npydir.npy-dtype``.
    """
    file = store.open(path)
    try:
        return _read_array(file, path)
    except BaseException:
        file.close()
        raise


def _read_array(file: ByteSource, path: str) -> Array:
    if path.endswith(".zst"):
        stored = HeaderSource(file, _USUAL)
        span = npy.header_span(zstd_head(stored, _PREAMBLE), path)
        head = zstd_head(stored, span)
        header = npy.parse(head, path)
        values = ZstdFile(file, header.size)
        return Array(path, header, values, head, values)
    first_bytes = read_bytes(file, 0, min(_USUAL, file.size))
    span = npy.header_span(first_bytes[:_PREAMBLE], path)
    if span > file.size:
        raise FormatError("npydir.npy-truncated", f"expected {span} bytes of header, found {file.size}", where=path)
    head = first_bytes[:span] if span <= len(first_bytes) else read_bytes(file, 0, span)
    header = npy.parse(head, path)
    npy.check_size(header, file.size, path)
    return Array(
        path, header, file, head, MemorySource(first_bytes, file.name) if header.size <= len(first_bytes) else file
    )


def open_arrays(store: Store, group: Group, suffixes: tuple[str, ...]) -> Mapping[str, Array]:
    """Open the arrays with the given suffixes; return them by suffix.

    Raises ``FormatError`` ``npydir.missing-file`` for the first array that does not exist.
    """
    for suffix in suffixes:
        if suffix not in group.paths:
            unread = [name for name in group.foreign if name.startswith(suffix)]
            if unread:
                raise foreign_form_error(group, unread[0])
            raise FormatError(
                "npydir.missing-file",
                "expected this file of the tensor, but it does not exist: the directory is incomplete; copy or convert "
                "it again",
                where=file_of(group.key, suffix),
            )
    return {suffix: open_array(store, group.paths[suffix]) for suffix in suffixes}


def foreign_form_error(group: Group, suffix: str) -> UnsupportedError:
    """Return the error for a storage form that Ingot recognizes but cannot read."""
    return UnsupportedError(
        f"the tensor is stored as {group.foreign[suffix]}, which Ingot does not read: convert the original again, "
        "to 8, 4 or 3 bits",
        rule="npydir.form",
        where=f"{FOLDER}/{group.key}__{suffix.replace('.br', '.npy.br') if '.br' in suffix else suffix + '.npy'}",
    )


def _stem(name: str) -> tuple[str | None, str]:
    for compression in COMPRESSIONS:
        if name.endswith(f".npy{compression}"):
            return name.removesuffix(f".npy{compression}"), compression
    return None, ""
