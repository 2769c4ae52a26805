"""Files of a tar archive that arrives as a stream, plain or compressed. The bytes are untrusted.

POSIX ustar and pax, and GNU's long names. Files and folders are read; links, devices and all other entries are refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ingot.core.bytes.encodings import ZstdError, zstd_decompressor
from ingot.core.files.archive import MAX_BYTES, MAX_RATIO, NameChecker
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import FormatError, UnsupportedError

RULE = "tar.stream"
_ENTRY = "tar.entry"
_BLOCK = 512
_CHUNK = 1 << 20
_MAX_HEADER = 1 << 20  # bytes of a long name, or of pax attributes
_UNLIMITED = 64 << 20  # unpacked bytes that are not compared with the stored ones
_FILES = (b"0", b"\0", b"7")
_FOLDER = b"5"
_PAX = b"x"
_GLOBAL_PAX = b"g"
_LONG_NAME = b"L"

Read = Callable[[int], bytes]
"""Returns the next bytes of the stream, at most the requested number; empty at the end."""


@dataclass(frozen=True, slots=True)
class TarFile:
    """A file of an archive: its name, its size, and its bytes, which must be consumed before the next file."""

    name: str
    size: int
    chunks: Iterator[bytes]


def decompressed(read: Read, compression: str, location: str) -> Read:
    """Return a function that reads the unpacked bytes of a stream; ``compression`` is empty, ``gzip`` or ``zstd``.

    Raises
    ------
    FormatError
        ``tar.stream``: bytes that cannot be unpacked, or that unpack to more than 200 times their number.
    """
    return read if not compression else _Unpacker(read, compression, location).read


class _Unpacker:
    def __init__(self, read: Read, compression: str, location: str) -> None:
        self._read = read
        self._compression = compression
        self._location = location
        self._decoder: Any = None
        self._waiting = b""
        self._stored = 0
        self._unpacked = 0

    def read(self, count: int) -> bytes:
        """Return the next unpacked bytes, at most ``count``; empty at the end."""
        while True:
            if not self._waiting and (self._decoder is None or self._needs_input()):
                self._waiting = self._read(_CHUNK)
                self._stored += len(self._waiting)
                if not self._waiting:
                    if self._decoder is not None:
                        raise FormatError(RULE, "the compressed bytes are cut off", where=self._location)
                    return b""
            data = self._unpack(min(count, _CHUNK))
            self._unpacked += len(data)
            if self._unpacked > max(_UNLIMITED, MAX_RATIO * self._stored):
                raise FormatError(
                    RULE, f"the bytes unpack to more than {MAX_RATIO} times their number", where=self._location
                )
            if data:
                return data

    def _needs_input(self) -> bool:
        return bool(getattr(self._decoder, "needs_input", True))

    def _unpack(self, count: int) -> bytes:
        if self._decoder is None:
            self._decoder = zlib.decompressobj(31) if self._compression == "gzip" else zstd_decompressor()
        decoder = self._decoder
        try:
            data: bytes = decoder.decompress(self._waiting, count)
        except (zlib.error, ZstdError) as error:
            raise FormatError(RULE, f"not {self._compression}: {error}", where=self._location) from None
        self._waiting = decoder.unconsumed_tail if self._compression == "gzip" else b""
        if decoder.eof:
            self._waiting = decoder.unused_data
            self._decoder = None
        return data


def tar_files(read: Read, checker: NameChecker, location: str) -> Iterator[TarFile]:
    """Yield the files of a tar archive in their order, and read the stream to its end.

    Parameters
    ----------
    read : callable
    checker : NameChecker
        Checks the names, together with those that it has checked before.
    location : str
        The archive in messages.

    Raises
    ------
    FormatError
        ``tar.stream``: no tar archive, or one that is cut off; ``archive.*``: a name that is refused.
    UnsupportedError
        ``tar.entry``: a link, a device, or an entry of an unknown type.
    """
    stream = _Blocks(read, location)
    total = 0
    for entry in _entries(stream, location):
        check_cancelled()
        name = entry.name
        is_folder = entry.type == _FOLDER or (entry.type in _FILES and name.endswith("/"))
        if entry.is_sparse or not (is_folder or entry.type in _FILES):
            raise UnsupportedError(
                f"the archive has a link, a device or an entry of type {entry.type!r}; only files and folders are "
                "unpacked",
                rule=_ENTRY,
                where=f"{location}: {name[:200]!r}",
            )
        if is_folder:
            if entry.size:
                raise FormatError(RULE, "a folder with a size", where=f"{location}: {name[:200]!r}")
            if name.strip("/") != ".":
                checker.add(name.rstrip("/") + "/")
            continue
        checker.add(name)
        total += entry.size
        if total > MAX_BYTES:
            raise FormatError(RULE, f"expected at most {MAX_BYTES} bytes of files", where=location)
        chunks = stream.content(entry.size)
        yield TarFile(name, entry.size, chunks)
        for _ in chunks:  # what the caller did not consume
            pass
    stream.finish()


class _Entry(NamedTuple):
    type: bytes
    name: str
    size: int
    is_sparse: bool


def _entries(stream: _Blocks, location: str) -> Iterator[_Entry]:
    """Yield the entries with the long names and pax attributes that precede them."""
    long_name = ""
    attributes: dict[str, str] = {}
    while (header := stream.header()) is not None:
        entry_type = header[156:157]
        size = _number(header[124:136], location)
        if entry_type == _LONG_NAME:
            long_name = _text(stream.small(size).rstrip(b"\0"), location)
        elif entry_type == _PAX:
            attributes = _pax(stream.small(size), location)
        elif entry_type == _GLOBAL_PAX:
            if _pax(stream.small(size), location).keys() & {"path", "size"}:
                raise FormatError(RULE, "global attributes with a path or a size", where=location)
        else:
            name = _relative(attributes.get("path") or long_name or _name(header, location))
            size = _pax_size(attributes["size"], location) if "size" in attributes else size
            yield _Entry(entry_type, name, size, any(key.startswith("GNU.sparse") for key in attributes))
            long_name = ""
            attributes = {}
    if long_name or attributes:
        raise FormatError(RULE, "attributes without an entry", where=location)


class _Blocks:
    """Reads headers and contents, which fill complete blocks of 512 bytes."""

    def __init__(self, read: Read, location: str) -> None:
        self._read = read
        self._location = location

    def header(self) -> bytes | None:
        """Return the next header; None at the end."""
        block = self._exactly(_BLOCK, may_end=True)
        if not block or not any(block):
            return None
        sums = sum(block) - sum(block[148:156]) + 8 * 32
        if _number(block[148:156], self._location) != sums:
            raise FormatError(RULE, "a header whose checksum differs: no tar archive", where=self._location)
        return block

    def small(self, size: int) -> bytes:
        """Return the content of an entry of ``size`` bytes, at most 1 MiB."""
        if size > _MAX_HEADER:
            raise FormatError(RULE, f"attributes of more than {_MAX_HEADER} bytes", where=self._location)
        return self._exactly(-(-size // _BLOCK) * _BLOCK)[:size]

    def content(self, size: int) -> Iterator[bytes]:
        """Yield the content of an entry in chunks of at most 1 MiB, and skip the bytes that fill its last block."""
        remaining = size
        while remaining:
            data = self._read(min(remaining, _CHUNK))
            if not data:
                raise FormatError(RULE, "the archive is cut off", where=self._location)
            remaining -= len(data)
            yield data
        self._exactly(-size % _BLOCK)

    def finish(self) -> None:
        """Read the remaining bytes of the stream, which must be zeros."""
        while data := self._read(_CHUNK):
            if any(data):
                raise FormatError(RULE, "bytes after the end of the archive", where=self._location)

    def _exactly(self, size: int, *, may_end: bool = False) -> bytes:
        data = b""
        while len(data) < size:
            more = self._read(size - len(data))
            if not more:
                if may_end and not data:
                    return b""
                raise FormatError(RULE, "the archive is cut off", where=self._location)
            data += more
        return data


def _number(field: bytes, location: str) -> int:
    """Return a number in octal digits, or in base 256 (GNU)."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
        if field[0] == 0x80 and value < 1 << 62:
            return value
    else:
        digits = field.strip(b" \0")
        if all(digit in b"01234567" for digit in digits):
            return int(digits or b"0", 8)
    raise FormatError(RULE, f"a number that is not one: {field!r}", where=location)


def _name(header: bytes, location: str) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name, location)


def _text(data: bytes, location: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(RULE, f"a name that is not UTF-8: {data[:80]!r}", where=location) from None


def _relative(name: str) -> str:
    while name.startswith("./"):
        name = name[2:].lstrip("/") if name[2:] else "."
    return name


def _pax_size(size: str, location: str) -> int:
    if not size.isascii() or not size.isdigit() or len(size) > 18:
        raise FormatError(RULE, f"a size that is not one: {size[:40]!r}", where=location)
    return int(size)


def _pax(data: bytes, location: str) -> dict[str, str]:
    """Return pax attributes: records ``LENGTH KEY=VALUE`` with a line feed each."""
    attributes = {}
    position = 0
    while position < len(data):
        space = data.find(b" ", position, position + 8)
        digits = data[position:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[space + 1 : position + length]
        key, equals, value = record[:-1].partition(b"=")
        if not record.endswith(b"\n") or not equals or position + length > len(data):
            raise FormatError(RULE, "attributes that are no pax records", where=location)
        attributes[_text(key, location)] = value.decode("utf-8", "surrogateescape")
        position += length
    return attributes
