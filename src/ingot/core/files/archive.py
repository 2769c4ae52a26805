"""Folders as zip archives: deterministic packing, and safe unpacking of untrusted archives (APPNOTE 6.3.10).

``spec/attachments.md`` lists the rules. The reader is stricter than zip: entries must follow each other without gaps
from the first byte to the directory, and headers must agree with the directory and the data.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ingot.core.files.atomic import require_disk
from ingot.core.files.system import is_name, open_flags, read_error, write_error
from ingot.errors import FormatError, IngotError, IntegrityError

MAX_ENTRIES = 65_536
"""The limit of files and folders in an archive."""


class NameChecker:
    """Checks an archive's names: a path must be inside the folder, and all names must differ on every file system."""

    def __init__(self) -> None:
        self._spelling: dict[str, str] = {}
        self._entries: set[str] = set()
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, name: str) -> None:
        """Check the next entry; a folder's name ends with a slash. Raises ``FormatError`` ``archive.*``."""
        path = name.removesuffix("/")
        parts = path.split("/")
        if (
            any(part in ("", ".", "..") for part in parts)
            or not name.isprintable()
            or set(name) & set("\\:")
            or not all(map(is_name, parts))
        ):
            raise FormatError(
                "archive.name", "expected a relative path without '..', backslash, colon or control", where=name[:200]
            )
        if len(name.encode()) > 1024:
            raise FormatError("archive.name", "expected a name of at most 1024 bytes", where=name[:200])
        folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        for prefix in (*folders, path):
            folded = unicodedata.normalize("NFC", prefix).casefold()
            if self._spelling.setdefault(folded, prefix) != prefix:
                raise FormatError(
                    "archive.collision", f"expected names that differ by more than case, found {prefix!r}", where=name
                )
        if name in self._entries:
            raise FormatError("archive.duplicate", "the name occurs twice", where=name)
        self._entries.add(name)
        is_folder = name.endswith("/")
        if path in (self._files if is_folder else self._folders) or self._files & set(folders):
            raise FormatError("archive.conflict", "the name is both a file and a folder", where=name)
        self._folders.update(folders)
        (self._folders if is_folder else self._files).add(path)
        if len(self._folders) + len(self._files) > MAX_ENTRIES:  # a name of 1 KiB can have 500 folders
            raise FormatError(
                "archive.entries", f"expected at most {MAX_ENTRIES} files and folders, found more", where=name[:200]
            )


MAX_BYTES = 1 << 40
"""The limit of all unpacked bytes of an archive."""
MAX_RATIO = 200
"""The limit of unpacked bytes per stored byte, for archives that unpack to more than ``_UNLIMITED`` bytes."""

_UNLIMITED = 64 << 20
_CHUNK = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)
_STORED = 0
DEFLATED = 8
_LOCAL = b"PK\x03\x04"
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_LOCATOR = b"PK\x06\x07"
_UNIX = 3
_IS_UTF8 = 1 << 11  # flag of entries with names in UTF-8

ReadAt = Callable[[int, memoryview], None]
"""Fills a buffer from an offset of the archive, or raises an error."""


def pack(folder: str | os.PathLike[str], out: BinaryIO) -> None:
    """Write the files of ``folder`` as a zip with sorted names, fixed times and no compression.

    Raises
    ------
    FormatError
        The folder contains something that ``unpack`` refuses: ``archive.kind`` (a link or device), ``archive.name`` or
        ``archive.collision`` (a name that cannot be unpacked on all systems), ``archive.nested``, ``archive.entries``.
    IntegrityError
        ``store.changed``: a file's size changed while it was packed.
    """
    names = NameChecker()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for path, name in _walk(Path(folder), ""):
            names.add(name)
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system = _UNIX
            mode = stat.S_IFDIR | 0o755 if name.endswith("/") else stat.S_IFREG | 0o644
            info.external_attr = mode << 16
            if name.endswith("/"):
                archive.writestr(info, b"")
            else:
                _pack_file(archive, info, path)


def _walk(folder: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Yield the path and name of each file and of each empty folder, sorted by name."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise read_error(error, str(folder)) from error
    if not entries and prefix:
        yield folder, prefix
    for entry in entries:
        name = prefix + entry.name
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path, name + "/")
        elif entry.is_file(follow_symlinks=False):
            yield path, name
        else:
            raise FormatError("archive.kind", "expected files and folders, found a link or device", where=str(path))


def _pack_file(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    try:
        with path.open("rb") as source:
            info.file_size = os.fstat(source.fileno()).st_size
            count = 0
            with archive.open(info, "w", force_zip64=info.file_size >= 1 << 31) as sink:
                while count <= info.file_size and (data := source.read(_CHUNK)):
                    if not count:
                        _refuse_nested(data[:4], info.filename)
                    count += sink.write(data)
    except OSError as error:
        raise write_error(error, str(path)) from error
    if count != info.file_size:
        raise IntegrityError("store.changed", "the file was written to while it was packed", where=str(path))


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or folder of an archive, as the directory describes it."""

    name: str
    method: int
    crc: int
    stored: int
    size: int
    offset: int
    described: bool

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")


def unpack(
    read_at: ReadAt,
    size: int,
    folder: str | os.PathLike[str],
    location: str,
    max_bytes: int = MAX_BYTES,
    keep: Callable[[Entry], bool] | None = None,
) -> None:
    """Unpack a zip of ``size`` bytes into the existing, empty ``folder``; after an error, written files stay there.

    Files for which ``keep`` returns False are checked and created empty.

    Raises
    ------
    FormatError
        The archive breaks a rule ``archive.*``.
    IntegrityError
        ``archive.crc``, ``archive.size``: a file's bytes do not match the directory.
    ResourceError
        A file cannot be written; see ``core.files.system.write_error``.
    """
    folder = Path(folder)
    try:
        archive = Archive(read_at, size)
        entries = archive.entries()
        budget = _Budget(min(max_bytes, max(_UNLIMITED, MAX_RATIO * size)))
        require_disk(sum(entry.size for entry in entries), folder, str(folder))
        for entry in entries:
            target = folder / entry.name
            try:
                if entry.is_folder:
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                _unpack_file(archive, entry, target, budget, keep is None or keep(entry))
            except OSError as error:
                raise write_error(error, str(target)) from error
    except IngotError as error:
        raise error.add_location(location) from None


def is_unpacked(read_at: ReadAt, size: int, folder: str | os.PathLike[str], location: str) -> bool:
    """Return whether ``folder`` contains all files of the zip with the sizes and CRC-32 of the directory.

    Raises ``FormatError`` ``archive.*`` if the archive is invalid.
    """
    try:
        entries = Archive(read_at, size).entries()
    except IngotError as error:
        raise error.add_location(location) from None
    return all(_is_there(entry, Path(folder) / entry.name) for entry in entries)


def _is_there(entry: Entry, path: Path) -> bool:
    try:
        if entry.is_folder or path.stat().st_size != entry.size:
            return entry.is_folder and path.is_dir()
        crc = 0
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                crc = zlib.crc32(data, crc)
    except OSError:
        return False
    return crc == entry.crc


class _Budget:
    """Counts unpacked bytes, and raises ``archive.bomb`` if they exceed the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._remaining = limit

    def take(self, count: int, name: str) -> None:
        self._remaining -= count
        if self._remaining < 0:
            raise FormatError("archive.bomb", f"expected at most {self._limit} unpacked bytes, found more", where=name)


def _unpack_file(archive: Archive, entry: Entry, target: Path, budget: _Budget, keep: bool) -> None:
    crc = 0
    count = 0
    head = b""
    flags = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW")
    with open(os.open(target, flags, 0o666), "wb") as sink:  # noqa: PTH123 - Path.open cannot set these flags
        for data in archive.content(entry):
            head += data[: 4 - len(head)]
            _refuse_nested(head, entry.name)
            budget.take(len(data), entry.name)
            count += len(data)
            if count > entry.size:
                break
            crc = zlib.crc32(data, crc)
            if keep:
                sink.write(data)
    if count != entry.size:
        raise IntegrityError("archive.size", f"expected {entry.size} bytes, found {count} or more", where=entry.name)
    if crc != entry.crc:
        raise IntegrityError("archive.crc", f"expected CRC {entry.crc:08X}, found {crc:08X}", where=entry.name)


def _refuse_nested(head: bytes, name: str) -> None:
    if head in (_LOCAL, _END):
        raise FormatError("archive.nested", "the archive contains another archive", where=name)


class ArchiveFile(io.RawIOBase):
    """A read-only file object over a function that reads at an offset, for ``zipfile``."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, out: Any) -> int:
        count = max(0, min(len(out), self._size - self._position))
        if count:
            self._read_at(self._position, memoryview(out)[:count])
        self._position += count
        return count


class Archive:
    """A zip archive in which each byte belongs to an entry or to the directory.

    ``zipfile`` reads the directory. This class decompresses contents, because ``zipfile`` ignores bytes after the
    declared size and after the end of a deflate stream.
    """

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self._size = size

    def read(self, offset: int, count: int) -> bytes:
        if offset < 0 or count < 0 or offset + count > self._size:
            raise FormatError(
                "archive.truncated", f"expected {count} bytes at {offset} of an archive of {self._size}, found fewer"
            )
        data = bytearray(count)
        self._read_at(offset, memoryview(data))
        return bytes(data)

    def entries(self) -> list[Entry]:
        """Return the entries of the directory, checked against the local headers."""
        count, length, start, tail = self._end()
        if count > MAX_ENTRIES or length > MAX_ENTRIES * 1024:
            raise FormatError(
                "archive.entries", f"expected at most {MAX_ENTRIES} entries, found {count} in {length} bytes"
            )
        if start + length != tail:
            raise FormatError("archive.layout", f"expected a directory up to byte {tail}, found {start}+{length}")
        listed = [_entry(info) for info in self._directory(count, length, tail)]
        names = NameChecker()
        for entry in listed:
            names.add(entry.name)
        position = 0
        for entry in sorted(listed, key=lambda entry: entry.offset):
            if entry.offset != position:
                raise FormatError(
                    "archive.layout", f"expected an entry at byte {position}, found {entry.offset}", where=entry.name
                )
            position = self._local_end(entry, start)
        if position != start:
            raise FormatError("archive.layout", f"expected the directory at byte {position}, found it at {start}")
        return listed

    def content(self, entry: Entry) -> Iterator[bytes]:
        """Yield an entry's decompressed bytes in chunks."""
        start = entry.offset + local_size(self.read(entry.offset, 30))
        inflate = zlib.decompressobj(-15) if entry.method == DEFLATED else None
        for offset in range(0, entry.stored, _CHUNK):
            data = self.read(start + offset, min(_CHUNK, entry.stored - offset))
            yield from _inflated(inflate, data, entry.name) if inflate else (data,)
        if inflate and (not inflate.eof or inflate.unused_data):
            raise FormatError(
                "archive.deflate", "the deflate stream is incomplete, or bytes follow it", where=entry.name
            )

    def _end(self) -> tuple[int, int, int, int]:
        """Return the directory's number of entries, length, start and end, from the record at the end of the file."""
        record = self.read(self._size - 22, 22)
        if record[:4] != _END:
            raise FormatError("archive.end", "the file does not end with a zip directory without a comment")
        disk, first, here, count, length, start, comment = struct.unpack("<HHHHIIH", record[4:])
        tail = self._size - 22
        if tail >= 20 and (locator := self.read(tail - 20, 20))[:4] == _LOCATOR:
            tail = struct.unpack("<Q", locator[8:16])[0]
            if tail + 56 + 20 + 22 != self._size:
                raise FormatError("archive.layout", f"expected the zip64 record before the end, found it at {tail}")
            record = self.read(tail, 56)
            disk, first, here, count, length, start = struct.unpack("<IIQQQQ", record[16:])
            if record[:4] != _END64:
                raise FormatError("archive.end", "the file has no valid zip64 end record")
        if disk or first or comment or here != count:
            raise FormatError("archive.end", "the archive has several disks, or a comment")
        return count, length, start, tail

    def _directory(self, count: int, length: int, end: int) -> list[zipfile.ZipInfo]:
        """Return the entries that ``zipfile`` reads; raise an error if the directory has bytes outside them."""
        try:
            with zipfile.ZipFile(io.BufferedReader(ArchiveFile(self._read_at, self._size))) as archive:
                infos = archive.infolist()
        except UnicodeDecodeError as error:
            raise FormatError(
                "archive.name", f"expected a name in UTF-8 or ASCII, found {error.object[:80]!r}"
            ) from None
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise FormatError("archive.layout", f"expected a directory of entries: {error}") from None
        sizes = [_name_extra_comment(info) for info in infos]
        used = sum(46 + sum(parts) for parts in sizes)
        if len(infos) != count or used != length:
            raise FormatError(
                "archive.layout",
                f"expected a directory of {count} entries in {length} bytes, found {len(infos)} in {used} bytes",
            )
        # zipfile accepts a last record whose fields reach past the directory.
        if infos and struct.unpack("<HHH", self.read(end - 46 - sum(sizes[-1]) + 28, 6)) != sizes[-1]:
            raise FormatError(
                "archive.layout", "expected an entry inside of the directory", where=infos[-1].orig_filename[:200]
            )
        return infos

    def _local_end(self, entry: Entry, limit: int) -> int:
        """Check an entry's local header; return the offset of the entry's end, its data descriptor included."""
        header = self.read(entry.offset, 30)
        name = self.read(entry.offset + 30, int.from_bytes(header[26:28], "little"))
        flags, method = struct.unpack("<HH", header[6:10])
        local = struct.unpack("<III", header[14:26])
        agrees = entry.described or all(
            value in (0xFFFFFFFF, expected)
            for value, expected in zip(local, (entry.crc, entry.stored, entry.size), strict=True)
        )
        if header[:4] != _LOCAL or _text(name, flags) != entry.name or method != entry.method or not agrees:
            raise FormatError("archive.layout", "the local header differs from the directory", where=entry.name)
        end = entry.offset + local_size(header) + entry.stored
        if entry.described:
            end = self._past_descriptor(entry, end)
        if end > limit:
            raise FormatError("archive.layout", f"expected an entry before byte {limit}, found {end}", where=entry.name)
        return end

    def _past_descriptor(self, entry: Entry, end: int) -> int:
        """Return the end of the data descriptor at ``end``; it may have a signature, and sizes of 32 or 64 bits."""
        for signature in (b"PK\x07\x08", b""):
            for sizes in ("<III", "<IQQ"):
                descriptor = signature + struct.pack(sizes, entry.crc, *_fit(sizes, entry.stored, entry.size))
                if end + len(descriptor) <= self._size and self.read(end, len(descriptor)) == descriptor:
                    return end + len(descriptor)
        raise FormatError("archive.layout", "expected the data descriptor of the directory's sizes", where=entry.name)


def _fit(sizes: str, stored: int, size: int) -> tuple[int, int]:
    mask = 0xFFFFFFFF if sizes == "<III" else 0xFFFFFFFFFFFFFFFF
    return stored & mask, size & mask


def local_size(header: bytes) -> int:
    """Return the size of a local header, name and extra field included, from its first 30 bytes."""
    return 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _inflated(inflate: zlib._Decompress, data: bytes, name: str) -> Iterator[bytes]:
    try:
        while data and not inflate.eof:
            yield inflate.decompress(data, _CHUNK)
            data = inflate.unconsumed_tail
    except zlib.error as error:
        raise FormatError("archive.deflate", f"expected a deflate stream: {error}", where=name) from None
    if data:
        raise FormatError("archive.deflate", "bytes follow the deflate stream", where=name)


def _name_extra_comment(info: zipfile.ZipInfo) -> tuple[int, int, int]:
    """Return the sizes of the variable fields of an entry in the directory."""
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _IS_UTF8 else "cp437")
    return len(name), len(info.extra), len(info.comment)


def _entry(info: zipfile.ZipInfo) -> Entry:
    name = info.orig_filename  # `filename` ends at a NUL, and has other slashes on Windows
    if not info.flag_bits & _IS_UTF8 and not name.isascii():
        raise FormatError("archive.name", f"expected a name in UTF-8 or ASCII, found {name[:80]!r}")
    if info.volume:
        raise FormatError("archive.layout", "expected an archive on one disk, found an entry on another", where=name)
    mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
    _check_entry(name, info.flag_bits, info.compress_type, mode, (info.compress_size, info.file_size))
    is_described = bool(info.flag_bits & 8)
    return Entry(
        name, info.compress_type, info.CRC, info.compress_size, info.file_size, info.header_offset, is_described
    )


def _check_entry(name: str, flags: int, method: int, mode: int, sizes: tuple[int, int]) -> None:
    if flags & (1 | 1 << 6 | 1 << 13):
        raise FormatError("archive.encrypted", "the entry is encrypted", where=name)
    if method not in (_STORED, DEFLATED):
        raise FormatError("archive.method", f"expected stored or deflated entries, found method {method}", where=name)
    file_type = stat.S_IFMT(mode)
    if file_type not in (0, stat.S_IFDIR if name.endswith("/") else stat.S_IFREG):
        raise FormatError("archive.kind", "expected files and folders, found a link, device or mixture", where=name)
    if (method == _STORED and sizes[0] != sizes[1]) or (name.endswith("/") and any(sizes)):
        raise FormatError("archive.layout", f"expected sizes that agree, found {sizes}", where=name)


def _text(raw: bytes, flags: int) -> str:
    try:
        return raw.decode("utf-8" if flags & _IS_UTF8 else "ascii")
    except UnicodeDecodeError:
        raise FormatError("archive.name", f"expected a name in UTF-8 or ASCII, found {raw[:80]!r}") from None
