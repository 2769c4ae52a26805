"""Writing containers of version 2 in their canonical form: tensor after tensor, digests running as bytes pass.

A part gets its place when its tensor begins, as far as lengths are known. Parts behind one whose length only its bytes
tell wait in an unnamed temporary file each. Where a part turns out to be equal to an earlier one, byte for byte, it is
that one's blob, and what was written behind it moves up: so the layout depends on the bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ingot.core import checksums, encodings
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.order import Order
from ingot.formats.spool import Spool
from ingot.formats.zt2.blobs import Blobs
from ingot.formats.zt2.layout import CANONICAL, FOOTER, MAGIC, MAX_MANIFEST, Footer, align
from ingot.formats.zt2.manifest import Entries
from ingot.formats.zt2.meaning import Written
from ingot.formats.zt2.overlay import OpenBase, Place
from ingot.formats.zt2.rules import check_names
from ingot.formats.zt2.specs import (
    ALGORITHMS,
    Placed,
    check_written,
    describe,
    in_order,
    written_as,
)
from ingot.model.bytesource import Buffer, Sink
from ingot.model.spec import PartSpec, TensorSpec

_PIECE = 1 << 20


class _Writing:
    """One part being written: at ``offset`` of the file, or in a spool until its place is known."""

    def __init__(self, spec: PartSpec, offset: int | None, algorithm: str | None) -> None:
        self.spec, self.offset, self.length = spec, offset, 0
        self.spool: Spool | None = None
        self._crc = checksums.hasher("crc32c")
        self._digest = None if algorithm is None else checksums.hasher(algorithm)
        self._decoding = None if spec.encoding == "raw" else encodings.Decoding("part.zstd", spec.role)

    def update(self, data: memoryview) -> None:
        self._crc.update(data)
        self.length += data.nbytes
        if self._digest is not None:
            for piece in (data,) if self._decoding is None else self._decoding.pieces(data):
                self._digest.update(piece)

    @property
    def crc(self) -> str:
        return self._crc.text()

    @property
    def digest(self) -> str | None:
        """What the file states: of the decoded bytes."""
        return None if self._digest is None else self._digest.text()


class Zt2Writer(FormatWriter):
    """Writes one file into a sink; implements ``FormatWriter``.

    Parameters
    ----------
    sink : Sink
        Taken over: closed by ``finish`` and ``abort``.
    specs : sequence of TensorSpec
        The tensors to come, in order.
    metadata : mapping
        The file's own attributes: what CBOR can hold.
    digest : {"crc32c", "sha256", None}
        What is asked for; the first gives XXH3.
    name : str
        The file's name in records and messages.
    shard : str, optional
        What another file's manifest calls this one, which then ends with ``seal`` and has none.
    base : OpenBase, optional
        What this one is laid over: parts that are equal to a blob there are named and not stored. Taken over.

    Raises
    ------
    FormatError
        ``zt2.name``: a name of the metadata that the container does not take.
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
        self._sink, self._name, self._algorithm, self._shard = sink, name, ALGORITHMS[digest], shard
        self._base, self._named = base, set[str]()
        self._order = Order(specs, name)
        self.amend(metadata)
        self.entries = Entries()
        self._tail = len(MAGIC)
        self._loose: tuple[int, int] | None = None  # of bytes behind the tail that are no blob's
        self._parts: dict[str, _Writing] = {}
        self._written: Written | None = None
        self._blobs = Blobs()
        sink.write_at(0, MAGIC)

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor.

        Raises
        ------
        UsageError
            ``writer.order``: a tensor is open, or the spec is not the next one.
        UnsupportedError
            The container cannot carry the tensor; the rule says why.
        """
        self._written = written_as(spec)
        self._order.begin(spec)
        self._start()
        self._parts, place = {}, align(self._tail)
        known = True
        for part in in_order(spec, self._written):
            self._parts[part.role] = _Writing(part, place if known else None, self._algorithm)
            known = known and part.length is not None
            place = align(place + (part.length or 0))

    def write(self, role: str, data: Buffer) -> None:
        """Take the next stored bytes of one part; refuses more than its spec says."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        if not view.nbytes:
            return
        view, part = view.cast("B"), self._parts[role]
        if part.offset is None:
            part.spool = part.spool or Spool(self._sink)
            part.spool.write(view)
        else:
            self._sink.write_at(part.offset + position, view)
        part.update(view)

    def end(self) -> dict[str, Any]:
        """Close the tensor; its record has ``name``, ``blobs`` in the spec's order, and their ``digests``.

        Of parts that lie in the base ``named`` has role, shard, offset, bytes and digest instead.
        """
        spec = self._order.end()
        places = {role: self._settle(part) for role, part in self._parts.items()}
        self._accept(spec, places)
        sums = {role: part.crc for role, part in self._parts.items()}
        self._parts = {}
        own = [part.role for part in spec.parts if places[part.role].shard == self._shard]
        record: dict[str, Any] = {
            "name": spec.name,
            "blobs": [[self._name, places[role].offset, places[role].length, sums[role]] for role in own],
            "digests": [places[role].digest for role in own],
        }
        if len(own) == len(spec.parts):
            return record
        named = [
            [role, place.shard, place.offset, place.length, place.digest]
            for role, place in places.items()
            if role not in own
        ]
        return {**record, "named": named}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take back a tensor that lies in the sink already; its blobs must lie where they would be written now.

        Raises ``UsageError`` ``zt2.resume-record``: the record is not of the next tensor or not of this layout.
        """
        spec = self._order.expect(record.get("name", ""))
        self._written, places = written_as(spec), {}
        try:
            for role, shard, offset, length, digest in record.get("named", ()):
                place = Place(str(shard), int(offset))
                if self._base is None or not self._base.has(place, int(length)):
                    raise self._misfit(spec.name)
                places[role] = self._name_in_base(place, int(length), digest)
            here = [part for part in spec.parts if part.role not in places]
            stated = zip(here, record["blobs"], record["digests"], strict=True)
            found = {part.role: (int(blob[1]), int(blob[2]), str(blob[3]), digest) for part, blob, digest in stated}
        except (KeyError, TypeError, ValueError, IndexError):
            raise self._misfit(spec.name) from None
        for part in in_order(spec, self._written):
            if part.role in places:
                continue
            offset, length, crc, digest = found[part.role]
            if offset != align(self._tail) and offset not in self._blobs.at(length, crc):
                raise self._misfit(spec.name)
            self._take(offset, length, crc)
            places[part.role] = Placed(offset, length, digest, self._shard)
        self._order.restored(spec.name)
        self._accept(spec, places)

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata: it goes into the manifest, which is written last."""
        check_names(f"{self._name}: attributes", metadata)
        self._metadata = dict(metadata)

    def finish(self) -> list[str]:
        """Write the manifest and the footer, cut off whatever lies behind them, close."""
        self._order.finish()
        shards = {} if self._base is None else self._base.table(self._named)
        write_manifest(self._sink, self._tail, self.entries, self._metadata, shards)
        self._leave_base()
        return [self._name]

    def seal(self, algorithm: str) -> dict[str, Any]:
        """Complete a data shard, which has a footer of zeros, and close it; return its size and digest."""
        self._order.finish()
        size = self._tail + FOOTER
        self._sink.write_at(self._tail, Footer(0, 0, 0).pack())
        self._sink.truncate(size)
        running = checksums.hasher(algorithm)
        for start, length in _pieces(size):
            running.update(self._read_behind(0, start, length))
        self._sink.close()
        return {"size": size, "digest": running.text()}

    def abort(self) -> None:
        """Close the file as it is and drop what was spooled."""
        for part in self._parts.values():
            self._drop(part)
        self._leave_base()
        self._sink.close()

    def _start(self) -> None:
        """Before the first tensor that is written here, cut off what an earlier run left behind the others."""
        if self._loose is None:
            self._sink.truncate(self._tail)
            self._loose = self._tail, self._tail

    def _leave_base(self) -> None:
        if self._base is not None:
            self._base.close()

    def _accept(self, spec: TensorSpec, places: Mapping[str, Placed]) -> None:
        assert self._written is not None
        entry = describe(spec, self._written, places)
        check_written(spec.name, entry)
        self.entries.add(spec.name, entry)

    def _misfit(self, name: str) -> UsageError:
        message = f"the record of an earlier run does not fit tensor {name!r}; start anew without resuming"
        return UsageError(message, rule="zt2.resume-record", where=self._name)

    def _settle(self, part: _Writing) -> Placed:
        """Put a part that is complete into its place: an equal blob's, in the base too, or the end of the file."""
        if self._base is not None:
            for place in self._base.candidates(part.length, part.crc):
                if self._equal(part, partial(self._base.read, place)):
                    self._leave(part)
                    return self._name_in_base(place, part.length, part.digest)
        for offset in self._blobs.at(part.length, part.crc):
            if self._equal(part, partial(self._read_behind, offset)):
                self._leave(part)
                return Placed(offset, part.length, part.digest, self._shard)
        offset = self._reserve()
        if part.spool is not None:
            position = offset
            for chunk in part.spool.chunks():
                self._sink.write_at(position, chunk)
                position += len(chunk)
            self._drop(part)
        elif part.offset is not None and part.offset != offset:
            self._move(part.offset, offset, part.length)
            self._leave(part)
        self._take(offset, part.length, part.crc)
        return Placed(offset, part.length, part.digest, self._shard)

    def _name_in_base(self, place: Place, length: int, digest: str | None) -> Placed:
        self._named.add(place.shard)
        return Placed(place.offset, length, digest, place.shard)

    def _take(self, offset: int, length: int, crc: str) -> None:
        """Count a blob that lies where it is to stay."""
        if self._blobs.add(length, crc, offset):
            self._tail = offset + length

    def _equal(self, part: _Writing, read: Callable[[int, int], bytes]) -> bool:
        """Whether a part has the bytes that ``read`` returns by start and length; a checksum alone does not tell."""
        if part.spool is not None:
            position = 0
            for chunk in part.spool.chunks():
                if read(position, len(chunk)) != chunk:
                    return False
                position += len(chunk)
            return True
        if part.offset is None:
            return True
        own = partial(self._read_behind, part.offset)
        return all(own(start, size) == read(start, size) for start, size in _pieces(part.length))

    def _read_behind(self, offset: int, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._sink.readinto(offset + start, memoryview(data))
        return bytes(data)

    def _move(self, source: int, target: int, length: int) -> None:
        """Move bytes towards the beginning of the file."""
        for start, size in _pieces(length):
            self._sink.write_at(target + start, self._read_behind(source, start, size))

    def _reserve(self) -> int:
        """Return the next place for a blob; of the gap is written what other bytes may lie in."""
        offset, (start, end) = align(self._tail, CANONICAL), self._loose or (0, self._tail)
        start, end = max(start, self._tail), min(end, offset)
        if start < end:
            self._sink.write_at(start, bytes(end - start))
        return offset

    def _leave(self, part: _Writing) -> None:
        """Note that the bytes of a part lie where it is not, if they do."""
        self._drop(part)
        if part.offset is not None and part.length:
            start, end = self._loose or (0, 0)
            if end <= self._tail:  # what was left before is overwritten by now
                start, end = part.offset, part.offset
            self._loose = min(start, part.offset), max(end, part.offset + part.length)

    def _drop(self, part: _Writing) -> None:
        if part.spool is not None:
            part.spool.close()
            part.spool = None


def write_manifest(
    sink: Sink, tail: int, entries: Entries, metadata: Mapping[str, Any], shards: Mapping[str, Any]
) -> None:
    """Write the manifest and the footer behind ``tail``, cut off whatever lies behind them, close.

    Raises ``UnsupportedError`` ``zt2.manifest-too-large``.
    """
    size = entries.size(metadata, shards)
    if size > MAX_MANIFEST:
        raise UnsupportedError(
            f"expected a manifest of at most {MAX_MANIFEST} bytes, found {size}", rule="zt2.manifest-too-large"
        )
    offset = _reserve(sink, tail)
    digest, end = checksums.Xxh3(), offset
    for piece in entries.manifest(metadata, shards):
        digest.update(piece)
        sink.write_at(end, piece)
        end += len(piece)
    sink.write_at(end, Footer(offset, size, digest.value()).pack())
    sink.truncate(end + FOOTER)
    sink.close()


def _reserve(sink: Sink, tail: int) -> int:
    offset = align(tail, CANONICAL)
    if offset > tail:
        sink.write_at(tail, bytes(offset - tail))
    return offset


def _pieces(length: int) -> list[tuple[int, int]]:
    return [(start, min(_PIECE, length - start)) for start in range(0, length, _PIECE)]
