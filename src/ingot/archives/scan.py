"""Division of files into objects: tensors, and the bytes between tensors. Equal bytes become one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from ingot.artifacts.archive_layout import ArchivedFile, External, Span
from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import Blake3, Sha256, hex_of
from ingot.core.bytes.encodings import FRAME, compress_frame
from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError
from ingot.library.cut import Segment, covered
from ingot.library.encode import MIN_DELTA
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.reading.ranges import read_bytes
from ingot.model.tensor import Tensor

MAX_UNDIVIDED = 64 << 20
"""The largest size in bytes of a tensor object that is neither packed nor of floats. Larger tensors are divided."""
BYTES = "ingot.archive/bytes"
"""The beginning of the names of objects with bytes that are no tensors."""

_CHUNK = 4 << 20
_MIN_SHARED = 256  # bytes; a reference to shorter bytes is not smaller than the bytes
_LEVELS = ((32 << 20, 19), (256 << 20, 9))  # compression level of the first bytes that are no tensors; then 3


def changed_error(location: str) -> IntegrityError:
    """Return the error ``store.changed`` for a file that changed while it was read."""
    return IntegrityError(
        "store.changed",
        "the file was written to while it was being read; try again when it is complete",
        where=location,
    )


@dataclass(slots=True)
class Scan:
    """The result of dividing files into objects.

    ``files`` refer to ``objects`` by index, and to ``external`` ranges of another model by negative indices: -1 is the
    first range. ``candidates`` maps the index of an object to the index of an earlier version of the same tensor, from
    which a difference may be stored. ``duplicates`` is the number of ranges that repeat an earlier object, and
    ``duplicate_bytes`` their size.
    """

    files: list[ArchivedFile] = field(default_factory=list)
    objects: list[Tensor | PackedBytes] = field(default_factory=list)
    external: list[tuple[External, Tensor | None]] = field(default_factory=list)
    candidates: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0
    duplicate_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """An object that is not a tensor: ``length`` stored bytes at ``offset`` of a temporary file.

    ``size`` is the number of bytes after decompression; the bytes are not compressed if it equals ``length``.
    """

    name: str
    offset: int
    length: int
    size: int

    def tensor(self, source: ByteSource) -> Tensor:
        """Return the object as a tensor of bytes that are stored in ``source``."""
        raw = self.length == self.size
        part = Part(
            "u8",
            self.length,
            source,
            self.offset,
            encoding="raw" if raw else "zstd",
            uncompressed_length=None if raw else self.size,
            where=self.name,
        )
        return Tensor(self.name, (self.size,), "u8", DenseLayout.codec, {"data": part})


class Scanner:
    """Divides files into objects. Bytes that are not tensors are compressed into a temporary file."""

    def __init__(self, out: BinaryIO, progress: Progress) -> None:
        self.scan = Scan()
        self._out = out
        self._progress = progress
        self._seen: dict[tuple[int, str], Span] = {}
        self._latest: dict[tuple[str, str, str, int], int] = {}
        self._names: set[str] = set()
        self._pending = bytearray()
        self._pending_index: int | None = None
        self._packed = 0
        self._written = 0

    def add(self, name: str, source: ByteSource, parts: Sequence[Segment]) -> None:
        """Divide the file ``name`` into objects and add them; ``parts`` are the ranges of its tensors.

        Raises ``IntegrityError`` ``store.changed`` if the file changed while it was read.
        """
        size = source.size
        hasher = Sha256()
        spans: list[Span] = []
        for segment in divided(covered(parts, size)):
            check_cancelled()
            span = (self._tensor if segment.tensor else self._bytes)(name, source, segment, hasher)
            last = spans[-1] if spans else None
            if last is not None and last.object == span.object and last.offset + last.size == span.offset:
                spans[-1] = replace(last, size=last.size + span.size)
            else:
                spans.append(span)
        if source.changed():
            raise changed_error(source.name)
        self.scan.files.append(ArchivedFile(name, size, hex_of(hasher), tuple(spans)))

    def add_base(self, name: str, source: ByteSource, parts: Sequence[Segment]) -> None:
        """Register the content of a file of another model, so that the archive can refer to it."""
        for segment in divided(covered(parts, source.size)):
            check_cancelled()
            if segment.size < _MIN_SHARED:
                continue
            digest = Blake3()
            for start in range(0, segment.size, _CHUNK):
                digest.update(read_bytes(source, segment.start + start, min(_CHUNK, segment.size - start)))
            key = segment.size, digest.text()
            item = External(name, segment.start, segment.size, hex_of(digest))
            tensor = _dense(segment, source, name) if segment.tensor and not _is_packed(segment) else None
            self.scan.external.append((item, tensor))
            index = -len(self.scan.external)
            self._seen.setdefault(key, Span(index, 0, segment.size))
            if tensor is not None:
                self._latest[segment.key] = index

    def finish(self) -> Scan:
        """Write the remaining bytes; return the result."""
        self._flush()
        return self.scan

    def _tensor(self, file: str, source: ByteSource, segment: Segment, hasher: Sha256) -> Span:
        digest = Blake3()
        buffer = memoryview(bytearray(min(_CHUNK, segment.size)))
        for start in range(0, segment.size, _CHUNK):
            chunk = buffer[: min(_CHUNK, segment.size - start)]
            source.readinto(segment.start + start, chunk)
            hasher.update(chunk)
            digest.update(chunk)
            self._progress.advance(chunk.nbytes, segment.tensor)
        key = segment.size, digest.text()
        span = self._seen.get(key)
        previous = self._latest.get(segment.key)
        if span is not None:
            if not span.offset:
                self._latest[segment.key] = span.object
            return self._shared(span)
        self.scan.objects.append(self._new_tensor(file, source, segment))
        index = len(self.scan.objects) - 1
        if previous is not None and segment.size >= MIN_DELTA and not _is_packed(segment):
            self.scan.candidates[index] = previous
        self._latest[segment.key] = index
        span = self._seen[key] = Span(index, 0, segment.size)
        return span

    def _shared(self, span: Span) -> Span:
        self.scan.duplicates += 1
        self.scan.duplicate_bytes += span.size
        return span

    def _new_tensor(self, file: str, source: ByteSource, segment: Segment) -> Tensor:
        stored = segment.stored
        if stored is not None and stored.codec in CODECS and segment.size == _content(stored):
            (role,) = stored.parts
            part = stored.parts[role]
            name = self._unique(stored.name, file)
            new_part = Part(part.dtype, segment.size, source, segment.start, type=part.type, where=name)
            return replace(stored, name=name, parts={role: new_part}, decoder=CODECS[stored.codec])
        name = self._unique(segment.tensor if segment.part == "data" else f"{segment.tensor}.{segment.part}", file)
        return _dense(segment, source, name)

    def _unique(self, name: str, file: str) -> str:
        unique = name or file
        if unique in self._names or unique.startswith("ingot.archive"):
            unique = f"{file}:{name}"
        count = 1
        while unique in self._names:
            count += 1
            unique = f"{file}:{name}#{count}"
        self._names.add(unique)
        return unique

    def _bytes(self, file: str, source: ByteSource, segment: Segment, hasher: Sha256) -> Span:
        data = bytearray(segment.size)
        source.readinto(segment.start, memoryview(data))
        hasher.update(data)
        self._progress.advance(len(data), file)
        key = None
        if len(data) >= _MIN_SHARED:
            digest = Blake3()
            digest.update(data)
            key = len(data), digest.text()
            span = self._seen.get(key)
            if span is not None:
                return self._shared(span)
        if len(self._pending) + len(data) > FRAME:
            self._flush()
        if self._pending_index is None:
            self._pending_index = len(self.scan.objects)
            self.scan.objects.append(PackedBytes("", 0, 0, 0))
        span = Span(self._pending_index, len(self._pending), len(data))
        self._pending += data
        if key is not None:
            self._seen[key] = span
        return span

    def _flush(self) -> None:
        if self._pending_index is None:
            return
        level = next((level for limit, level in _LEVELS if self._packed < limit), 3)
        data = bytes(self._pending)
        packed = compress_frame(data, level)
        if len(packed) >= len(data):
            packed = data
        self._out.write(packed)
        name = f"{BYTES}/{self._pending_index}"
        self._names.add(name)
        self.scan.objects[self._pending_index] = PackedBytes(name, self._written, len(packed), len(data))
        self._written += len(packed)
        self._packed += len(data)
        self._pending = bytearray()
        self._pending_index = None


def _dense(segment: Segment, source: ByteSource, name: str) -> Tensor:
    """Return a range of a file as a dense tensor."""
    row = DTYPES[segment.dtype]
    part = Part(row.storage, segment.size, source, segment.start, type=None if row.is_storage else row.name, where=name)
    codec = DenseLayout.codec
    return Tensor(name, segment.shape, segment.dtype, codec, {"data": part}, decoder=CODECS[codec])


def _content(tensor: Tensor) -> int:
    """Return the number of stored bytes of a tensor's only part.

    For a dense tensor, return 0 if they are not exactly its uncompressed values.
    """
    (part,) = tensor.parts.values()
    if tensor.codec != DenseLayout.codec:
        return part.length
    row = DTYPES.get(tensor.dtype)
    return part.length if row is not None and row.nbytes(tensor.size) == part.length else 0


def divided(segments: Iterator[Segment]) -> Iterator[Segment]:
    """Yield the segments; long segments are divided into several.

    Bytes are divided into frames. Tensors of floats and packed tensors are not divided.
    """
    for segment in segments:
        limit = MAX_UNDIVIDED if segment.tensor else FRAME
        if segment.size <= limit or (segment.tensor and (segment.dtype in FLOATS or _is_packed(segment))):
            yield segment
            continue
        for index, start in enumerate(range(0, segment.size, limit)):
            size = min(limit, segment.size - start)
            name = f"{segment.tensor}[{index}]" if segment.tensor else ""
            yield Segment(segment.start + start, size, name, segment.part, "u8", (size,))


def _is_packed(segment: Segment) -> bool:
    return segment.stored is not None and segment.stored.codec != DenseLayout.codec
