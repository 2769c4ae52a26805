"""Reader of GGUF: one file, or all files of a split, as one catalog."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ingot.core.numeric.dtypes import STORAGE_DTYPES
from ingot.errors import FormatError, UsageError
from ingot.formats.base import Catalog
from ingot.formats.gguf.header import MAX_NAME, Entry, Header, parse
from ingot.formats.gguf.metadata import ABOUT, ALIGNMENT, COUNT, DEFAULT_ALIGNMENT, NUMBER, SPLIT, TENSORS, describe
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.ggml import BLOCKS, TYPES, GgmlBlocksLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.store import Store
from ingot.model.tensor import Array, Tensor

_MAX_RUNS = 1 << 16  # number of elements or blocks whose bytes are swapped in one step


def order_of(type: str) -> Array:
    """Return, for each byte of an element or block in little-endian order, its index in a big-endian file."""
    if type in TYPES:
        order = np.arange(TYPES[type].nbytes)
        for offset, size in TYPES[type].wide:
            order[offset : offset + size] = order[offset : offset + size][::-1]
        return order
    return np.arange(STORAGE_DTYPES[type].bits // 8)[::-1]


class SwappedSource:
    """The bytes of one tensor in little-endian order, read from a big-endian source that the caller closes."""

    mapped = False

    def __init__(self, source: ByteSource, offset: int, size: int, type: str) -> None:
        self._source = source
        self._offset = offset
        self._order = order_of(type)
        self.name = source.name
        self.size = size

    def view(self, offset: int, length: int) -> memoryview:
        """Return a copy of a range of bytes."""
        if offset < 0 or length < 0 or offset + length > self.size:
            return self._source.view(self._source.size + 1, length)  # raises the error of a range outside the source
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``offset`` on; complete elements or blocks are read from the source."""
        run = len(self._order)
        target = np.frombuffer(out, np.uint8)
        filled = 0
        while filled < target.size:
            first, within = divmod(offset + filled, run)
            runs = min(-(-(within + target.size - filled) // run), _MAX_RUNS)
            raw = np.empty((runs, run), np.uint8)
            self._source.readinto(self._offset + first * run, raw.reshape(-1).data)
            swapped = raw[:, self._order].reshape(-1)[within : within + target.size - filled]
            target[filled : filled + swapped.size] = swapped
            filled += swapped.size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Do nothing: the caller closes the source."""


SUFFIX = ".gguf"
MAX_SPLITS = 10_000

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class File(NamedTuple):
    """An open and checked file."""

    name: str
    source: ByteSource
    header: Header


def split_name(name: str) -> tuple[str, int, int] | None:
    """Return the stem, the number (from 1) and the count of a split's file name; None for any other name."""
    match = _SPLIT.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def read(store: Store, name: str) -> Catalog:
    """Return the catalog of a file, or of all files of its split.

    Raises ``FormatError``, ``UnsupportedError`` with the rules of ``spec/gguf.md``.
    """
    files: list[File] = []
    try:
        files.append(_open(store, name))
        count = _split_count(files[0])
        if count > 1:
            files = _open_others(store, files, count)
        _require_distinct(files)
        return _catalog(files)
    except BaseException:
        for file in files:
            file.source.close()
        raise


def _open(store: Store, name: str) -> File:
    source = store.open(name)
    try:
        return File(name, source, parse(source, name))
    except BaseException:
        source.close()
        raise


def _split_count(file: File) -> int:
    count = file.header.metadata.get(COUNT, 1)
    if not isinstance(count, int) or not 0 <= count <= MAX_SPLITS:
        raise FormatError(
            "gguf.split", f"expected {COUNT} of at most {MAX_SPLITS}, found {str(count)[:40]}", where=file.name
        )
    return count


def _open_others(store: Store, files: list[File], count: int) -> list[File]:
    """Open the remaining files of a split, append them to ``files``, and return all files in order."""
    named = split_name(files[0].name)
    if named is None or named[2] != count:
        raise FormatError(
            "gguf.split",
            f"expected a name that ends in -NUMBER-of-{count:05d}{SUFFIX}, the naming of the files of a split",
            where=files[0].name,
        )
    stem, first_number, _ = named
    for number in range(1, count + 1):
        if number == first_number:
            continue
        file_name = f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"
        try:
            files.append(_open(store, file_name))
        except UsageError as error:
            raise FormatError(
                "gguf.split-missing", f"expected the file {file_name!r}: {error.message}", where=files[0].name
            ) from error
    ordered = sorted(files, key=lambda file: file.name)
    total = sum(len(file.header.entries) for file in ordered)
    for index, file in enumerate(ordered):
        split_keys = file.header.metadata
        if (
            split_keys.get(NUMBER) != index
            or split_keys.get(COUNT) != count
            or split_keys.get(TENSORS, total) != total
            or file.header.big_endian != ordered[0].header.big_endian
        ):
            raise FormatError(
                "gguf.split-mixed",
                f"expected number {index} of {count} files with {total} tensors, found number "
                f"{str(split_keys.get(NUMBER))[:20]} of {str(split_keys.get(COUNT))[:20]} with "
                f"{str(split_keys.get(TENSORS))[:20]}",
                where=file.name,
            )
    return ordered


def _require_distinct(files: Sequence[File]) -> None:
    if ABOUT in files[0].header.metadata:
        raise FormatError(
            "gguf.key", f"expected no key {ABOUT}, which is reserved for Ingot; remove it", where=files[0].name
        )
    if len(files) == 1:
        return
    names: set[str] = set()
    for file in files:
        for name in file.header.entries:
            if name in names:
                raise FormatError(
                    "gguf.name", "expected each tensor once, found it in two files", where=f"{file.name}: {name}"
                )
            names.add(name)


def _catalog(files: Sequence[File]) -> Catalog:
    metadata, types, raw = _metadata(files)
    first = files[0].header
    about = describe(first.version, big_endian=first.big_endian, types=types, raw=raw)
    notes = [note for file in files for note in _notes(file)]
    remarks = [remark for file in files for remark in _remarks(file)]
    return Catalog(
        _tensors(files),
        metadata={**metadata, ABOUT: about},
        headers={file.name: file.header.raw for file in files},
        sources=tuple(file.source for file in files),
        notes=notes,
        remarks=remarks,
    )


def _notes(file: File) -> Iterator[tuple[str, str]]:
    if not file.header.alignment_applies:
        declared = file.header.metadata[ALIGNMENT]
        message = (
            f"{file.name} states {ALIGNMENT} {declared}, but its tensors are at multiples of 32; llama-quantize writes "
            "files like this"
        )
        yield "gguf.alignment-ignored", message
    long_names = [name for name in file.header.entries if 4 * len(name) > MAX_NAME and len(name.encode()) > MAX_NAME]
    if long_names:
        message = (
            f"{len(long_names)} tensors of {file.name} have names of more than {MAX_NAME} bytes, which llama.cpp does "
            f"not read; the first is {long_names[0][:200]!r}"
        )
        yield "gguf.long-name", message


def _remarks(file: File) -> Iterator[tuple[str, str]]:
    """Yield a remark if the file contains bytes after the padding of the last tensor."""
    trailing = file.source.size - file.header.end
    if file.header.entries and trailing >= file.header.metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT):
        yield "gguf.trailing", f"{trailing} bytes follow the last tensor in {file.name}"


def _metadata(files: Sequence[File]) -> tuple[dict[str, Any], dict[str, str], dict[str, Mapping[int, bytes]]]:
    """Return the metadata, types and raw strings of all files combined, without the keys of a split.

    If files have different values for a key, the value of the first file is used.
    """
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    raw: dict[str, Mapping[int, bytes]] = {}
    for file in reversed(files):
        metadata.update(file.header.metadata)
        types.update(file.header.types)
        raw = {key: strings for key, strings in raw.items() if key not in file.header.metadata}
        raw.update(file.header.raw_strings)
    for key in SPLIT:
        metadata.pop(key, None)
        types.pop(key, None)
        raw.pop(key, None)
    return metadata, types, raw


def _tensors(files: Sequence[File]) -> Mapping[str, Tensor]:
    if len(files) == 1:
        only = files[0]
        return LazyMap(only.header.entries, lambda name: _tensor(only, name, only.header.entries[name]))
    homes = {name: file for file in files for name in file.header.entries}
    return LazyMap(homes, lambda name: _tensor(homes[name], name, homes[name].header.entries[name]))


def _tensor(file: File, name: str, entry: Entry) -> Tensor:
    source = file.source
    offset = file.header.start + entry.offset
    if file.header.big_endian:
        source = SwappedSource(source, offset, entry.nbytes, entry.type)
        offset = 0
    blocked = entry.type in TYPES
    role = BLOCKS if blocked else DATA
    part = Part("u8" if blocked else entry.type, entry.nbytes, source, offset, where=f"{file.name}: {name}: {role}")
    if not blocked:
        return Tensor(name, entry.shape, entry.type, DenseLayout.codec, {role: part})
    layout = GgmlBlocksLayout(entry.type)
    return Tensor(name, entry.shape, layout.dtype, layout.codec, {role: part}, layout.attributes())
