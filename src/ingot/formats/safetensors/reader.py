"""Reader of safetensors files: a catalog that builds tensors on access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.core.numeric.dtypes import BY_SAFETENSORS
from ingot.core.parsing import manifest_digest
from ingot.errors import FormatError
from ingot.formats.base import Catalog
from ingot.formats.safetensors.header import MAX_HEADER, PREFIX, Header, parse
from ingot.formats.shared.foreign import TRUNCATED_HINT
from ingot.formats.shared.headers import ReadHeader, header_of, headers_of
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import Lazy
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Store
from ingot.model.tensor import Tensor


class File(NamedTuple):
    """An open and checked file. Its data buffer begins at ``start``; ``raw`` returns the bytes of its header."""

    name: str
    source: ByteSource
    header: Header
    start: int
    raw: ReadHeader


def tensors_of(files: Sequence[File]) -> Lazy[Tensor]:
    """Return the tensors of one or several files, in order."""
    if len(files) == 1:
        names: Mapping[str, Any] = files[0].header.entries
        homes: Mapping[str, File] = {}
    else:
        names = homes = {name: file for file in files for name in file.header.entries}

    def build(name: str) -> Tensor:
        file = homes[name] if homes else files[0]
        entry = file.header.entries[name]
        row = BY_SAFETENSORS[entry.dtype]
        begin, end = entry.data_offsets
        part = Part(
            dtype=row.storage,
            length=end - begin,
            source=file.source,
            offset=file.start + begin,
            type=None if row.is_storage else row.name,
            where=f"{file.name}: {name}: data",
        )
        return Tensor(name, entry.shape, row.name, DenseLayout.codec, {DATA: part})

    return Lazy(names, build)


def open_file(store: Store, name: str, *, verify: bool = True) -> File:
    """Open a safetensors file and check its header against the file's size, and against its digest if it has one.

    Raises ``FormatError``; ``IntegrityError`` ``manifest.digest``.
    """
    source = store.open(name)
    try:
        length = _header_length(source, name)
        raw = read_bytes(source, PREFIX, length)
        start = PREFIX + length
        header = parse(raw, source.size - start, name)
        digest = header.metadata.get(manifest_digest.KEY)
        if digest is not None and verify:
            manifest_digest.check_json(raw, digest, name)
        return File(name, source, header, start, header_of(raw, source, PREFIX))
    except BaseException:
        source.close()
        raise


def _header_length(source: ByteSource, name: str) -> int:
    if source.size < PREFIX:
        raise FormatError(
            "safetensors.too-short",
            f"expected at least {PREFIX} bytes, found {source.size}; {TRUNCATED_HINT}",
            where=name,
        )
    length = int.from_bytes(read_bytes(source, 0, PREFIX), "little")
    limit = min(MAX_HEADER, source.size - PREFIX)
    if length > limit:
        raise FormatError(
            "safetensors.header-length",
            f"expected a header of at most {limit} bytes, found {length}: this is no safetensors file, or "
            f"only part of one; {TRUNCATED_HINT}",
            where=name,
        )
    return length


def read_single(store: Store, name: str, *, verify: bool = True) -> Catalog:
    """Read one file as a checkpoint; raises the errors of ``open_file``."""
    file = open_file(store, name, verify=verify)
    headers = headers_of({name: file.raw})
    return Catalog(tensors_of([file]), metadata=file.header.metadata, headers=headers, sources=(file.source,))
