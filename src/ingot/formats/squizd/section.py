"""Writing a section of weight blocks with its scale tables: the model's own, and a draft head's."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ingot.core.chunk_digests import PartDigests, as_stated
from ingot.formats.order import Order
from ingot.formats.spool import Spool
from ingot.formats.squizd.blocks import settled
from ingot.formats.squizd.carry import SCALE_ROLES
from ingot.formats.squizd.directory import Written
from ingot.formats.squizd.entry_writer import EntryWriter
from ingot.formats.squizd.layout import SCALE_ENTRY
from ingot.formats.squizd.place import Cursor, Placed, Placement, entry_of
from ingot.formats.squizd.scales import table_header
from ingot.model.bytesource import Buffer, Sink

Blob = tuple[int, int, str]


class _Role:
    """One part being written: its digests, and where its bytes go (nowhere yet: a spool or memory)."""

    def __init__(self, length: int | None, digest: str | None) -> None:
        self.written = 0
        self.kept = bytearray()
        self.spool: Spool | None = None
        self.digests = PartDigests(length, digest)

    def take(self, data: memoryview) -> None:
        self.digests.update(data)
        self.written += data.nbytes


class TensorWriter:
    """Writes one tensor: its block's header and parts at ``offset``, scales and zero points into ``scales``.

    The mask is kept in memory until ``finish``; the rest streams.
    """

    def __init__(
        self,
        sink: Sink,
        placed: Placed,
        offset: int,
        digest: str | None,
        order: Order,
        scales: EntryWriter | None = None,
    ) -> None:
        order.begin(placed.spec)
        self._sink, self._offset, self._order, self._scales = sink, offset, order, scales
        self.block = placed.form.block
        self._pieces = {piece.role: piece for piece in self.block.pieces}
        self._roles = {part.role: _Role(part.length, digest) for part in placed.spec.parts}
        self._write_header()

    def write(self, role: str, data: Buffer) -> None:
        """Take the next bytes of a part; more than its length are refused."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        if not view.nbytes:
            return
        view, sink = view.cast("B"), self._roles[role]
        piece = self._pieces.get(role)
        if piece is None and role in SCALE_ROLES and self._scales is not None:
            self._scales.write(role, view)
        elif piece is None:
            sink.kept += view
        elif piece.start is None:
            sink.spool = sink.spool or Spool(self._sink)
            sink.spool.write(view)
        else:
            self._sink.write_at(self._offset + piece.start + position, view)
        sink.take(view)

    def finish(self) -> int:
        """Check that all bytes came, settle what waited; return the block's end."""
        self._order.end()
        if self.block.length is None:
            self._settle()
        for piece, following in zip(self.block.pieces[:-1], self.block.pieces[1:], strict=True):
            end = (piece.start or 0) + (piece.length or 0)
            if following.start is not None and following.start > end:
                self._sink.write_at(self._offset + end, bytes(following.start - end))
        return self._offset + (self.block.length or 0)

    def blobs(self) -> list[Blob]:
        """Return offset, length and CRC-32C of each part that lies in the block."""
        return [
            (self._offset + (piece.start or 0), self._roles[piece.role].written, self._roles[piece.role].digests.crc)
            for piece in self.block.pieces
        ]

    def scale_blobs(self) -> list[Blob]:
        """Return the same of the scale entries."""
        return [] if self._scales is None else [self._scales.blob()]

    def digests(self) -> dict[str, str]:
        """Return the digest of every part, as the directory states it."""
        parts = ((role, part.digests.digest) for role, part in self._roles.items())
        return {role: digest for role, digest in parts if digest is not None}

    def chunks(self) -> dict[str, str]:
        """Return the digests of chunks that the directory states, as hexadecimal digits."""
        parts = ((role, part.digests.chunks) for role, part in self._roles.items())
        return {role: chunks.hex() for role, chunks in parts if chunks is not None}

    def mask(self) -> bytes:
        """Return the mask's bytes, empty where there is none."""
        return bytes(self._roles["mask"].kept) if "mask" in self._roles else b""

    def close(self) -> None:
        """Drop what waits in temporary files."""
        for sink in self._roles.values():
            if sink.spool is not None:
                sink.spool.close()

    def _settle(self) -> None:
        """Lengths are known now: append what waited, and write the header again."""
        self.block = settled(self.block, {role: part.written for role, part in self._roles.items()})
        for piece in self.block.pieces:
            spool, position = self._roles[piece.role].spool, self._offset + (piece.start or 0)
            for chunk in spool.chunks() if spool is not None else ():
                self._sink.write_at(position, chunk)
                position += len(chunk)
        self._write_header()

    def _write_header(self) -> None:
        self._sink.write_at(self._offset, self.block.header)


class Section:
    """Writes blocks one after the other behind ``start``, masks behind each layer, and tables behind the last layer.

    ``tables`` is where the tables will begin; needed where anything is quantized, and then known beforehand.
    """

    def __init__(self, sink: Sink, placement: Placement, start: int, tables: int, digest: str | None) -> None:
        self._sink, self._placement, self._tables, self._digest = sink, placement, tables, digest
        self.order = Order([placed.spec for placed in placement.tensors])
        self.cursor = Cursor(start, placement.layer_count)
        self.entries = Written()
        self.mask_of: dict[str, int] = {}  # bit i: block i is kept
        self._masks: list[list[bytes]] = [[] for _ in range(placement.layer_count)]
        self._mask_places: dict[str, tuple[int, int, int]] = {}
        self._flushed = 0
        self._writer: TensorWriter | None = None

    def begin(self, placed: Placed) -> TensorWriter:
        """Start a tensor's block."""
        gap, offset = self.cursor.block(placed.layer, placed.form.block.lead)
        self._flush_masks()
        self._sink.write_at(gap, bytes(offset - gap))
        self._writer = TensorWriter(self._sink, placed, offset, self._digest, self.order, self._scales_of(placed))
        return self._writer

    def end(self, placed: Placed, writer: TensorWriter) -> dict[str, Any]:
        """Close the tensor; return what ``restore`` needs."""
        offset = self.cursor.tail
        end = writer.finish()
        blobs = writer.blobs() + self._neutral(placed) + writer.scale_blobs()
        record = {
            "name": placed.spec.name,
            "blobs": blobs,
            "end": end,
            "digests": writer.digests(),
            "chunks": writer.chunks(),
            "mask": writer.mask().hex(),
        }
        self._accept(placed, offset, record)
        self.abandon()
        return record

    def restore(self, placed: Placed, record: Mapping[str, Any]) -> None:
        """Take a tensor back as an earlier run wrote it."""
        _, offset = self.cursor.block(placed.layer, placed.form.block.lead)
        self._flush_masks()
        self._accept(placed, offset, record)

    def finish(self) -> int:
        """Write what follows the blocks: the last masks, and the tables' headers. Return the end of the tables."""
        end = self.cursor.finish()
        self._flush_masks()
        for count in self._placement.tables.counts:
            self._sink.write_at(end, table_header(count))
            end += len(table_header(count)) + count * SCALE_ENTRY
        for name, (layer, behind, size) in self._mask_places.items():
            mask_end = (self.cursor.mask_starts[layer] or 0) + behind
            self.entries.mask(name, (mask_end, size))
        return end

    def abandon(self) -> None:
        """Drop an open tensor."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _accept(self, placed: Placed, offset: int, record: Mapping[str, Any]) -> None:
        self.cursor.tail = int(record["end"])
        spec, tables = placed.spec, self._placement.tables
        if record["mask"]:
            mask = bytes.fromhex(record["mask"])
            self._mask_places[spec.name] = (placed.layer, self.cursor.mask(len(mask)), len(mask))
            self._masks[placed.layer].append(mask)
            self.mask_of[spec.name] = int.from_bytes(mask, "little")
        chunks = {role: as_stated(bytes.fromhex(digits)) for role, digits in record["chunks"].items()}
        entry = entry_of(placed, offset, tables, self._tables, dict(record["digests"]), chunks)
        self.entries.add(spec.name, entry, late=bool(record["mask"]))

    def _flush_masks(self) -> None:
        """Write the masks of the layers that were closed since."""
        while self._flushed < self.cursor.closed:
            position = self.cursor.mask_starts[self._flushed]
            if position is not None:
                self._sink.write_at(position, b"".join(self._masks[self._flushed]))
            self._flushed += 1

    def _scales_of(self, placed: Placed) -> EntryWriter | None:
        """Return what takes the tensor's scales, None where it has none."""
        form, tables = placed.form, self._placement.tables
        if not form.first:
            return None
        dtype, name = form.scale_dtype or "f32", placed.spec.name
        if form.second is None:
            return EntryWriter(self._sink, tables.first_at(self._tables, placed), placed.id, dtype, name)
        second = placed.id | 1 << 63
        return EntryWriter(self._sink, tables.second_at(self._tables, placed), second, dtype, name)

    def _neutral(self, placed: Placed) -> list[Blob]:
        """Write the one entry that stands in the first table for a tensor whose scales are in the second."""
        if placed.form.second is None:
            return []
        offset = self._placement.tables.first_at(self._tables, placed)
        entry = EntryWriter(self._sink, offset, placed.id, "f32", placed.spec.name)
        entry.write(SCALE_ROLES[0], memoryview(struct.pack("<f", 1.0)))
        return [entry.blob()]
