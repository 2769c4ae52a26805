"""Read an archive that was cut off: locate its objects without the manifest, which is at the end of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ingot.artifacts.archive_layout import MAX_LAYOUT, parse_layout
from ingot.artifacts.archive_store import ArchiveObjects, ArchiveStore
from ingot.codecs.delta.exact import ID as DELTA
from ingot.codecs.lossless.float_entropy import EntropyCodec
from ingot.core.bytes.packed import PACKED, Buffer, stored_length
from ingot.core.numeric.dtypes import from_file
from ingot.errors import FormatError, IngotError
from ingot.formats.zt.manifest import ALIGNMENT, MAGIC, align
from ingot.formats.zt.specs import layout_order
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.reading.ranges import read_bytes
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_HEADER = 18
_RUN = 1  # the type of a block that repeats one byte


def salvage(store: Store, name: str) -> tuple[ByteSource, ArchiveStore] | None:
    """Return the open file and the files of an archive that was cut off; None if it is no such archive.

    The caller closes the file. Objects that are not complete are missing in the result. No digest of an object is
    known, but the layout has the SHA-256 of each file.
    """
    source = store.open(name)
    try:
        raw, end = _layout(source)
        layout = parse_layout(raw, source.size, store.location_of(name))
    except IngotError:
        source.close()
        return None
    tensors = {tensor.name: tensor for tensor in _objects(source, layout.objects, end)}
    objects = ArchiveObjects(layout, tensors, store.location_of(name), source)
    objects.find_base_in_folder(store, name)
    return source, ArchiveStore(objects, "", store, name)


def _layout(source: ByteSource) -> tuple[bytes, int]:
    """Return the layout's JSON, and the offset of its end in the file."""
    if source.size < ALIGNMENT or read_bytes(source, 0, len(MAGIC)) != MAGIC:
        raise _incomplete(source)
    length, size = _frame(source, ALIGNMENT)
    if size > MAX_LAYOUT:
        raise FormatError("archive.layout", f"expected at most {MAX_LAYOUT} bytes, found {size}", where=source.name)
    part = Part("u8", length, source, ALIGNMENT, encoding="zstd", uncompressed_length=size, where=source.name)
    return bytes(part.view()), ALIGNMENT + length


def _objects(source: ByteSource, specs: Sequence[TensorSpec], end: int) -> Iterator[Tensor]:
    """Yield the complete objects, up to the first whose length cannot be determined."""
    for spec in specs:
        parts: dict[str, Part] = {}
        for index in layout_order(spec.parts):
            part = spec.parts[index]
            offset = align(end)
            try:
                end = offset + _length(source, spec, part, parts, offset)
            except IngotError:
                return
            if end > source.size:
                return
            parts[part.role] = Part(
                part.dtype,
                end - offset,
                source,
                offset,
                type=part.type,
                encoding=part.encoding,
                uncompressed_length=part.uncompressed_length,
                where=f"{source.name}: {spec.name}",
            )
        ordered = {part.role: parts[part.role] for part in spec.parts}
        yield Tensor(spec.name, spec.shape, spec.dtype, spec.codec, ordered, spec.params)


def _length(source: ByteSource, spec: TensorSpec, part: PartSpec, parts: Mapping[str, Part], offset: int) -> int:
    """Return the stored bytes of a part at ``offset``; ``parts`` are the parts of the object before it.

    Raises ``FormatError`` ``archive.truncated`` if the file ends before, or if the length cannot be determined.
    """
    if part.length is not None:
        return part.length
    if part.encoding == "zstd" and part.uncompressed_length is not None:
        total = size = 0
        while size < part.uncompressed_length or not total:
            length, content = _frame(source, offset + total)
            if not content and total:
                break
            total += length
            size += content
        return total
    if part.encoding == PACKED and part.uncompressed_length is not None:
        read = partial(_read_from, source, offset)
        return stored_length(read, source.size - offset, part.uncompressed_length, source.name)
    if spec.codec in (EntropyCodec.id, DELTA) and "sizes" in parts:
        sizes = np.frombuffer(parts["sizes"].view(), np.uint8)
        return int(from_file(sizes, "u32").sum(dtype=np.uint64))
    raise _incomplete(source)


def _read_from(source: ByteSource, start: int, offset: int, length: int) -> Buffer:
    return read_bytes(source, start + offset, length)


def _frame(source: ByteSource, offset: int) -> tuple[int, int]:
    """Return the length and the content size of a zstd frame by its headers (RFC 8878, section 3.1.1)."""
    head = read_bytes(source, offset, min(_MAX_HEADER, max(source.size - offset, 0)))
    if len(head) < _MAX_HEADER or head[:4] != _ZSTD_MAGIC:
        raise _incomplete(source)
    descriptor = head[4]
    single = descriptor >> 5 & 1
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    width = (single, 2, 4, 8)[descriptor >> 6]
    content = int.from_bytes(head[start : start + width], "little") + (256 if width == 2 else 0)
    end = offset + start + width
    last = 0
    while not last:
        if end + 3 > source.size:
            raise _incomplete(source)
        block = int.from_bytes(read_bytes(source, end, 3), "little")
        last = block & 1
        end += 3 + (1 if block >> 1 & 3 == _RUN else block >> 3)
    return end + (4 if descriptor >> 2 & 1 else 0) - offset, content


def _incomplete(source: ByteSource) -> FormatError:
    return FormatError("archive.truncated", "the archive ends before its objects are complete", where=source.name)
