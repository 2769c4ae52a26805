"""Writer of the canonical form of container version 2; computes digests from the bytes that pass.

When a tensor begins, its parts get offsets up to the first part of unknown length. The parts after that part are
buffered in unnamed temporary files. If a part equals an earlier part byte for byte, it becomes a reference to the
earlier part's blob. Bytes that were written after it are then moved towards the beginning. So the layout depends on the
bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ingot.core.bytes import checksums, encodings
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.shared.order import Order
from ingot.formats.shared.spool import Spool
from ingot.formats.zt2.layout import CANONICAL, FOOTER, MAGIC, MAX_MANIFEST, Footer, align
from ingot.formats.zt2.manifest import Entries
from ingot.formats.zt2.overlay import BaseLocation, OpenBase
from ingot.formats.zt2.rules import check_names
from ingot.formats.zt2.specs import (
    ALGORITHMS,
    PartLocation,
    canonical_parts,
    check_written,
    describe,
    written_form,
)
from ingot.formats.zt2.types import WrittenForm
from ingot.model.bytesource import Buffer, Sink
from ingot.model.spec import PartSpec, TensorSpec


class Blobs:
    """Offsets of blobs by length and CRC-32C; memory is small because most keys have only one blob."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._others: dict[int, list[int]] = {}

    def offsets(self, length: int, crc: str) -> list[int]:
        """Return the offsets of the blobs with this length and CRC-32C, in the order in which they were added."""
        key = _key(length, crc)
        first = self._first.get(key)
        return [] if first is None else [first, *self._others.get(key, ())]

    def add(self, length: int, crc: str, offset: int) -> bool:
        """Add a blob; return whether it is new."""
        key = _key(length, crc)
        first = self._first.get(key)
        if first is None:
            self._first[key] = offset
            return True
        if first == offset or offset in self._others.get(key, ()):
            return False
        self._others.setdefault(key, []).append(offset)
        return True


def _key(length: int, crc: str) -> int:
    return length << 32 | int(crc.rpartition(":")[2], 16)


_CHUNK = 1 << 20


class _Writing:
    """A part that is being written: at ``offset`` of the file, or buffered until its offset is known."""

    def __init__(self, spec: PartSpec, offset: int | None, algorithm: str | None) -> None:
        self.spec = spec
        self.offset = offset
        self.length = 0
        self.spool: Spool | None = None
        self._crc = checksums.hasher("crc32c")
        self._digest = None if algorithm is None else checksums.hasher(algorithm)
        self._decoding = None if spec.encoding == "raw" else encodings.Decoding("part.zstd", spec.role)

    def update(self, data: memoryview) -> None:
        self._crc.update(data)
        self.length += data.nbytes
        if self._digest is not None:
            for chunk in (data,) if self._decoding is None else self._decoding.decode(data):
                self._digest.update(chunk)

    @property
    def crc(self) -> str:
        return self._crc.text()

    @property
    def digest(self) -> str | None:
        """Digest of the decoded bytes, for the manifest."""
        return None if self._digest is None else self._digest.text()


class Zt2Writer(FormatWriter):
    """A writer of one file into a sink.

    Parameters
    ----------
    sink : Sink
        The writer takes it over: ``finish`` and ``abort`` close it.
    specs : sequence of TensorSpec
        The tensors to come, in order.
    metadata : mapping
        The attributes of the file: values that CBOR can encode.
    digest : {"crc32c", "sha256", None}
        The requested digest; CRC-32C is written as XXH3.
    name : str
        The name of the file in records and messages.
    shard : str, optional
        The name of this file in another file's manifest; the file then has no manifest and ends with ``seal``.
    base : OpenBase, optional
        The base of an overlay: parts that equal its blobs are referred to, not stored. The writer takes it over.

    Raises
    ------
    FormatError
        ``zt2.name``: a name of the metadata that the container cannot store.
    """

    def __init__(
        self,
        sink: Sink,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, Any],
        digest: str | None,
        name: str,
        shard: str | None = None,
        base: OpenBase | None = None,
    ) -> None:
        self._sink = sink
        self._name = name
        self._algorithm = ALGORITHMS[digest]
        self._shard = shard
        self._base = base
        self._named = set[str]()
        self._order = Order(specs, name)
        self.amend(metadata)
        self.entries = Entries()
        self._tail = len(MAGIC)
        self._loose: tuple[int, int] | None = None  # range of bytes after the tail that belong to no blob
        self._parts: dict[str, _Writing] = {}
        self._written: WrittenForm | None = None
        self._blobs = Blobs()
        sink.write_at(0, MAGIC)

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor.

        Raises
        ------
        UsageError
            ``writer.order``: a tensor is open, or the spec is not the next one.
        UnsupportedError
            The container cannot store the tensor; the rule states why.
        """
        self._written = written_form(spec)
        self._order.begin(spec)
        self._start()
        self._parts, offset = {}, align(self._tail)
        has_offset = True
        for part in canonical_parts(spec, self._written):
            self._parts[part.role] = _Writing(part, offset if has_offset else None, self._algorithm)
            has_offset = has_offset and part.length is not None
            offset = align(offset + (part.length or 0))

    def write(self, role: str, data: Buffer) -> None:
        """Append the next stored bytes of a part; raises an error if they exceed its length."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        if not view.nbytes:
            return
        view = view.cast("B")
        part = self._parts[role]
        if part.offset is None:
            part.spool = part.spool or Spool(self._sink)
            part.spool.write(view)
        else:
            self._sink.write_at(part.offset + position, view)
        part.update(view)

    def end(self) -> dict[str, Any]:
        """Close the tensor and return its record: ``name``, ``blobs`` in the spec's order, and their ``digests``.

        Parts in the base are under ``named`` instead, with role, shard, offset, bytes and digest.
        """
        spec = self._order.end()
        locations = {role: self._place_part(part) for role, part in self._parts.items()}
        self._accept(spec, locations)
        sums = {role: part.crc for role, part in self._parts.items()}
        self._parts = {}
        stored_roles = [part.role for part in spec.parts if locations[part.role].shard == self._shard]
        record: dict[str, Any] = {
            "name": spec.name,
            "blobs": [
                [self._name, locations[role].offset, locations[role].length, sums[role]] for role in stored_roles
            ],
            "digests": [locations[role].digest for role in stored_roles],
        }
        if len(stored_roles) == len(spec.parts):
            return record
        named = [
            [role, location.shard, location.offset, location.length, location.digest]
            for role, location in locations.items()
            if role not in stored_roles
        ]
        return {**record, "named": named}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that is already in the sink; its blobs must have the offsets that would be assigned now.

        Raises ``UsageError`` ``zt2.resume-record``: the record is of another tensor or another layout.
        """
        spec = self._order.expect(record.get("name", ""))
        self._written = written_form(spec)
        locations = {}
        try:
            for role, shard, offset, length, digest in record.get("named", ()):
                location = BaseLocation(str(shard), int(offset))
                if self._base is None or not self._base.has(location, int(length)):
                    raise self._misfit(spec.name)
                locations[role] = self._name_in_base(location, int(length), digest)
            stored_parts = [part for part in spec.parts if part.role not in locations]
            rows = zip(stored_parts, record["blobs"], record["digests"], strict=True)
            fields = {part.role: (int(blob[1]), int(blob[2]), str(blob[3]), digest) for part, blob, digest in rows}
        except (KeyError, TypeError, ValueError, IndexError):
            raise self._misfit(spec.name) from None
        for part in canonical_parts(spec, self._written):
            if part.role in locations:
                continue
            offset, length, crc, digest = fields[part.role]
            if offset != align(self._tail) and offset not in self._blobs.offsets(length, crc):
                raise self._misfit(spec.name)
            self._add_blob(offset, length, crc)
            locations[part.role] = PartLocation(offset, length, digest, self._shard)
        self._order.restored(spec.name)
        self._accept(spec, locations)

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata, which are written last, in the manifest."""
        check_names(f"{self._name}: attributes", metadata)
        self._metadata = dict(metadata)

    def finish(self) -> list[str]:
        """Write the manifest and the footer, truncate the file after them, and close it."""
        self._order.finish()
        shards = {} if self._base is None else self._base.table(self._named)
        write_manifest(self._sink, self._tail, self.entries, self._metadata, shards)
        self._leave_base()
        return [self._name]

    def seal(self, algorithm: str) -> dict[str, Any]:
        """Complete a data shard, whose footer is zeros, and close it; return its size and digest."""
        self._order.finish()
        size = self._tail + FOOTER
        self._sink.write_at(self._tail, Footer(0, 0, 0).pack())
        self._sink.truncate(size)
        running = checksums.hasher(algorithm)
        for start, length in _chunks(size):
            running.update(self._read_after(0, start, length))
        self._sink.close()
        return {"size": size, "digest": running.text()}

    def abort(self) -> None:
        """Close the file in its present state and delete buffered parts."""
        for part in self._parts.values():
            self._drop(part)
        self._leave_base()
        self._sink.close()

    def _start(self) -> None:
        """Before the first tensor of this run, truncate bytes of an earlier run after the restored tensors."""
        if self._loose is None:
            self._sink.truncate(self._tail)
            self._loose = self._tail, self._tail

    def _leave_base(self) -> None:
        if self._base is not None:
            self._base.close()

    def _accept(self, spec: TensorSpec, locations: Mapping[str, PartLocation]) -> None:
        assert self._written is not None
        entry = describe(spec, self._written, locations)
        check_written(spec.name, entry)
        self.entries.add(spec.name, entry)

    def _misfit(self, name: str) -> UsageError:
        message = f"the record of an earlier run does not fit tensor {name!r}; start again without resuming"
        return UsageError(message, rule="zt2.resume-record", where=self._name)

    def _place_part(self, part: _Writing) -> PartLocation:
        """Return the final location of a complete part.

        If the base or this file has an equal blob, return the blob's location. Otherwise move the part to the end of
        the file.
        """
        if self._base is not None:
            for location in self._base.candidates(part.length, part.crc):
                if self._equal(part, partial(self._base.read, location)):
                    self._abandon(part)
                    return self._name_in_base(location, part.length, part.digest)
        for offset in self._blobs.offsets(part.length, part.crc):
            if self._equal(part, partial(self._read_after, offset)):
                self._abandon(part)
                return PartLocation(offset, part.length, part.digest, self._shard)
        offset = self._reserve()
        if part.spool is not None:
            position = offset
            for chunk in part.spool.chunks():
                self._sink.write_at(position, chunk)
                position += len(chunk)
            self._drop(part)
        elif part.offset is not None and part.offset != offset:
            self._move(part.offset, offset, part.length)
            self._abandon(part)
        self._add_blob(offset, part.length, part.crc)
        return PartLocation(offset, part.length, part.digest, self._shard)

    def _name_in_base(self, location: BaseLocation, length: int, digest: str | None) -> PartLocation:
        self._named.add(location.shard)
        return PartLocation(location.offset, length, digest, location.shard)

    def _add_blob(self, offset: int, length: int, crc: str) -> None:
        """Record a blob that stays at its offset; if the blob is new, the tail of the file moves to its end."""
        if self._blobs.add(length, crc, offset):
            self._tail = offset + length

    def _equal(self, part: _Writing, read: Callable[[int, int], bytes]) -> bool:
        """Return whether a part equals the bytes that ``read(start, length)`` returns.

        Equal checksums alone do not prove this.
        """
        if part.spool is not None:
            position = 0
            for chunk in part.spool.chunks():
                if read(position, len(chunk)) != chunk:
                    return False
                position += len(chunk)
            return True
        if part.offset is None:
            return True
        read_own = partial(self._read_after, part.offset)
        return all(read_own(start, size) == read(start, size) for start, size in _chunks(part.length))

    def _read_after(self, offset: int, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._sink.readinto(offset + start, memoryview(data))
        return bytes(data)

    def _move(self, source: int, target: int, length: int) -> None:
        """Move bytes towards the beginning of the file."""
        for start, size in _chunks(length):
            self._sink.write_at(target + start, self._read_after(source, start, size))

    def _reserve(self) -> int:
        """Return the next offset for a blob.

        If the gap before the offset may contain other bytes, they are overwritten with zeros.
        """
        offset, (start, end) = align(self._tail, CANONICAL), self._loose or (0, self._tail)
        start = max(start, self._tail)
        end = min(end, offset)
        if start < end:
            self._sink.write_at(start, bytes(end - start))
        return offset

    def _abandon(self, part: _Writing) -> None:
        """Record the range of a part's bytes in the file that became unused, because an equal blob exists."""
        self._drop(part)
        if part.offset is not None and part.length:
            start, end = self._loose or (0, 0)
            if end <= self._tail:  # the previous range is overwritten by now
                start = part.offset
                end = part.offset
            self._loose = min(start, part.offset), max(end, part.offset + part.length)

    def _drop(self, part: _Writing) -> None:
        if part.spool is not None:
            part.spool.close()
            part.spool = None


def write_manifest(
    sink: Sink, tail: int, entries: Entries, metadata: Mapping[str, Any], shards: Mapping[str, Any]
) -> None:
    """Write the manifest and the footer after ``tail``, truncate the file after them, and close it.

    Raises ``UnsupportedError`` ``zt2.manifest-too-large``.
    """
    size = entries.size(metadata, shards)
    if size > MAX_MANIFEST:
        raise UnsupportedError(
            f"expected a manifest of at most {MAX_MANIFEST} bytes, found {size}", rule="zt2.manifest-too-large"
        )
    offset = _reserve(sink, tail)
    digest = checksums.Xxh3()
    end = offset
    for chunk in entries.manifest(metadata, shards):
        digest.update(chunk)
        sink.write_at(end, chunk)
        end += len(chunk)
    sink.write_at(end, Footer(offset, size, digest.value()).pack())
    sink.truncate(end + FOOTER)
    sink.close()


def _reserve(sink: Sink, tail: int) -> int:
    offset = align(tail, CANONICAL)
    if offset > tail:
        sink.write_at(tail, bytes(offset - tail))
    return offset


def _chunks(length: int) -> list[tuple[int, int]]:
    return [(start, min(_CHUNK, length - start)) for start in range(0, length, _CHUNK)]
