"""Write the weight blocks and scale tables of a section, which belongs to the model or to a draft head."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import PartDigests, declare_chunks
from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.errors import UnsupportedError
from ingot.ext.squizd.blocks import with_lengths
from ingot.ext.squizd.carry import SCALE_ROLES
from ingot.ext.squizd.directory import EncodedEntries
from ingot.ext.squizd.layout import SCALE_ENTRY
from ingot.ext.squizd.placement import Cursor, PlacedTensor, Placement, entry_of
from ingot.ext.squizd.scales import ENTRY, table_header
from ingot.formats.shared.order import Order
from ingot.formats.shared.spool import Spool
from ingot.model.bytesource import Buffer, Sink

FIELD = {"scales": "scale", "zeros": "zero"}
"""The field of a scale entry that stores the values of a part, by the part's role."""

Array = np.ndarray[Any, np.dtype[Any]]

_CRC = "crc32c"
_CHUNK = 1 << 14
# For 16-bit floats: the bits of infinity, and the bit that is clear in a signalling NaN.
_NAN_BITS = {"f16": (0x7C00, 0x0200), "bf16": (0x7F80, 0x0040)}


class EntryWriter:
    """Writes the scale entries of a tensor at ``offset`` of a sink; scales may come before or after zero points.

    An entry contains a scale and a zero point. It is written when the first of them arrives, and read back and
    completed when the other arrives, so that no entries are buffered. Values of ``dtype`` (f32, f16 or bf16) are
    converted to f32 exactly.
    """

    def __init__(self, sink: Sink, offset: int, id: int, dtype: str, location: str) -> None:
        self._sink = sink
        self._offset = offset
        self._id = id
        self._dtype = dtype
        self._location = location
        self._done = dict.fromkeys(FIELD, 0)
        self._incomplete = dict.fromkeys(FIELD, b"")

    def write(self, role: str, data: memoryview) -> None:
        """Append the next bytes of ``role``; they may begin or end within a value.

        Raises ``UnsupportedError`` ``squizd.carry`` for a signalling NaN.
        """
        step = _CHUNK * numpy_dtype(self._dtype).itemsize
        item = numpy_dtype(self._dtype).itemsize
        for start in range(0, data.nbytes, step):
            chunk = self._incomplete[role] + bytes(data[start : start + step])
            complete = len(chunk) // item * item
            self._incomplete[role] = chunk[complete:]
            self._fill(role, from_file(np.frombuffer(chunk, np.uint8, complete), self._dtype))

    def blob(self) -> tuple[int, int, str]:
        """Return the offset of the entries, their number of bytes, and their CRC-32C."""
        running = checksums.hasher(_CRC)
        count = max(self._done.values())
        for start in range(0, count, _CHUNK):
            running.update(self._read(start, min(_CHUNK, count - start)).tobytes())
        return self._offset, count * SCALE_ENTRY, running.text()

    def _fill(self, role: str, values: Array) -> None:
        self._require_exact(values)
        start = self._done[role]
        written = max(self._done.values())
        entries = self._read(start, min(written - start, values.size))
        fresh = np.zeros(values.size, ENTRY)
        fresh["id"] = self._id
        fresh[: entries.size] = entries
        fresh[FIELD[role]] = values
        self._sink.write_at(self._offset + start * SCALE_ENTRY, fresh.tobytes())
        self._done[role] = start + values.size

    def _read(self, start: int, count: int) -> Array:
        """Return ``count`` scale entries from entry ``start`` on, which were written before."""
        entries = np.empty(count, ENTRY)
        if count:
            self._sink.readinto(self._offset + start * SCALE_ENTRY, entries.view(np.uint8).data)
        return entries

    def _require_exact(self, values: Array) -> None:
        """Raise an error for a signalling NaN of 16 bits, because the conversion to f32 makes it quiet."""
        infinity, quiet = _NAN_BITS.get(self._dtype, (0, 0))
        if not infinity:
            return
        magnitudes = values.view(np.uint16) & 0x7FFF
        if ((magnitudes > infinity) & (magnitudes & quiet == 0)).any():
            raise UnsupportedError(
                f"{self._location!r}: expected scales without a signalling NaN, which entries cannot store; quantize "
                "this tensor again",
                rule="squizd.carry",
            )


Blob = tuple[int, int, str]


class _Role:
    """A part that is being written: its digests, and its bytes if they are buffered until its offset is known."""

    def __init__(self, length: int | None, digest: str | None) -> None:
        self.written = 0
        self.buffered = bytearray()
        self.spool: Spool | None = None
        self.digests = PartDigests(length, digest)

    def take(self, data: memoryview) -> None:
        self.digests.update(data)
        self.written += data.nbytes


class TensorWriter:
    """A writer of one tensor: header and parts of its block are written at ``offset``, scale entries by ``scales``.

    The mask stays in memory. Parts whose offset is not yet known go to temporary files. All other parts are written
    directly to the sink.
    """

    def __init__(
        self,
        sink: Sink,
        placed: PlacedTensor,
        offset: int,
        digest: str | None,
        order: Order,
        scales: EntryWriter | None = None,
    ) -> None:
        order.begin(placed.spec)
        self._sink = sink
        self._offset = offset
        self._order = order
        self._scales = scales
        self.block = placed.storage.block
        self._block_parts = {part.role: part for part in self.block.parts}
        self._roles = {part.role: _Role(part.length, digest) for part in placed.spec.parts}
        self._write_header()

    def write(self, role: str, data: Buffer) -> None:
        """Append the next bytes of a part; raises an error if they exceed its length."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        if not view.nbytes:
            return
        view = view.cast("B")
        role_state = self._roles[role]
        block_part = self._block_parts.get(role)
        if block_part is None and role in SCALE_ROLES and self._scales is not None:
            self._scales.write(role, view)
        elif block_part is None:
            role_state.buffered += view
        elif block_part.start is None:
            role_state.spool = role_state.spool or Spool(self._sink)
            role_state.spool.write(view)
        else:
            self._sink.write_at(self._offset + block_part.start + position, view)
        role_state.take(view)

    def finish(self) -> int:
        """Check that the parts are complete, write buffered parts, and return the offset of the end of the block."""
        self._order.end()
        if self.block.length is None:
            self._settle()
        for part, following in zip(self.block.parts[:-1], self.block.parts[1:], strict=True):
            end = (part.start or 0) + (part.length or 0)
            if following.start is not None and following.start > end:
                self._sink.write_at(self._offset + end, bytes(following.start - end))
        return self._offset + (self.block.length or 0)

    def blobs(self) -> list[Blob]:
        """Return offset, length and CRC-32C of each part in the block."""
        return [
            (self._offset + (part.start or 0), self._roles[part.role].written, self._roles[part.role].digests.crc)
            for part in self.block.parts
        ]

    def scale_blobs(self) -> list[Blob]:
        """Return offset, length and CRC-32C of the scale entries; an empty list if the tensor has no scales."""
        return [] if self._scales is None else [self._scales.blob()]

    def digests(self) -> dict[str, str]:
        """Return the digest of each part by role; empty if the file has no digests."""
        parts = ((role, part.digests.digest) for role, part in self._roles.items())
        return {role: digest for role, digest in parts if digest is not None}

    def chunks(self) -> dict[str, str]:
        """Return the chunk digests of each large part by role, as text.

        The text contains the digests of all chunks of the part, concatenated, in hexadecimal digits.
        """
        parts = ((role, part.digests.chunks) for role, part in self._roles.items())
        return {role: chunks.hex() for role, chunks in parts if chunks is not None}

    def mask(self) -> bytes:
        """Return the bytes of the mask; empty without a mask."""
        return bytes(self._roles["mask"].buffered) if "mask" in self._roles else b""

    def close(self) -> None:
        """Delete the temporary files of buffered parts."""
        for sink in self._roles.values():
            if sink.spool is not None:
                sink.spool.close()

    def _settle(self) -> None:
        """Write the buffered parts, whose offsets are known now, and the block's header with all lengths."""
        self.block = with_lengths(self.block, {role: part.written for role, part in self._roles.items()})
        for part in self.block.parts:
            spool = self._roles[part.role].spool
            position = self._offset + (part.start or 0)
            for chunk in spool.chunks() if spool is not None else ():
                self._sink.write_at(position, chunk)
                position += len(chunk)
        self._write_header()

    def _write_header(self) -> None:
        self._sink.write_at(self._offset, self.block.header)


class Section:
    """A writer of a section that begins at ``start``: blocks, masks after each layer, and tables after the last layer.

    ``tables`` is the offset of the scale tables. If a tensor has scales, it must be known in advance, because scale
    entries are written together with the block.
    """

    def __init__(self, sink: Sink, placement: Placement, start: int, tables: int, digest: str | None) -> None:
        self._sink = sink
        self._placement = placement
        self._tables = tables
        self._digest = digest
        self.order = Order([placed.spec for placed in placement.tensors])
        self.cursor = Cursor(start, placement.layer_count)
        self.entries = EncodedEntries()
        self.mask_of: dict[str, int] = {}  # bit i is set if block i is kept
        self._masks: list[list[bytes]] = [[] for _ in range(placement.layer_count)]
        self._mask_ranges: dict[str, tuple[int, int, int]] = {}
        self._flushed = 0
        self._writer: TensorWriter | None = None

    def begin(self, placed: PlacedTensor) -> TensorWriter:
        """Start the block of a tensor."""
        gap, offset = self.cursor.block(placed.layer, placed.storage.block.lead)
        self._flush_masks()
        self._sink.write_at(gap, bytes(offset - gap))
        self._writer = TensorWriter(self._sink, placed, offset, self._digest, self.order, self._scales_of(placed))
        return self._writer

    def end(self, placed: PlacedTensor, writer: TensorWriter) -> dict[str, Any]:
        """Complete the tensor; return its record for ``restore``."""
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

    def restore(self, placed: PlacedTensor, record: Mapping[str, Any]) -> None:
        """Add a tensor that an earlier run wrote; ``record`` is the result of ``end`` in that run."""
        _, offset = self.cursor.block(placed.layer, placed.storage.block.lead)
        self._flush_masks()
        self._accept(placed, offset, record)

    def finish(self) -> int:
        """Write the last masks and the headers of the tables after the blocks; return the end of the tables."""
        end = self.cursor.finish()
        self._flush_masks()
        for count in self._placement.tables.counts:
            self._sink.write_at(end, table_header(count))
            end += len(table_header(count)) + count * SCALE_ENTRY
        for name, (layer, offset_in_layer, size) in self._mask_ranges.items():
            mask_end = (self.cursor.mask_starts[layer] or 0) + offset_in_layer
            self.entries.mask(name, (mask_end, size))
        return end

    def abandon(self) -> None:
        """Discard the tensor that is being written, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _accept(self, placed: PlacedTensor, offset: int, record: Mapping[str, Any]) -> None:
        self.cursor.tail = int(record["end"])
        spec = placed.spec
        tables = self._placement.tables
        if record["mask"]:
            mask = bytes.fromhex(record["mask"])
            self._mask_ranges[spec.name] = (placed.layer, self.cursor.mask(len(mask)), len(mask))
            self._masks[placed.layer].append(mask)
            self.mask_of[spec.name] = int.from_bytes(mask, "little")
        chunks = {role: declare_chunks(bytes.fromhex(digits)) for role, digits in record["chunks"].items()}
        entry = entry_of(placed, offset, tables, self._tables, dict(record["digests"]), chunks)
        self.entries.add(spec.name, entry, late=bool(record["mask"]))

    def _flush_masks(self) -> None:
        """Write the masks of the layers that were closed since the last call."""
        while self._flushed < self.cursor.closed:
            position = self.cursor.mask_starts[self._flushed]
            if position is not None:
                self._sink.write_at(position, b"".join(self._masks[self._flushed]))
            self._flushed += 1

    def _scales_of(self, placed: PlacedTensor) -> EntryWriter | None:
        """Return the writer of a tensor's scale entries; None for a tensor without scales."""
        storage = placed.storage
        tables = self._placement.tables
        if not storage.first:
            return None
        dtype = storage.scale_dtype or "f32"
        name = placed.spec.name
        if storage.second is None:
            return EntryWriter(self._sink, tables.first_at(self._tables, placed), placed.id, dtype, name)
        second = placed.id | 1 << 63
        return EntryWriter(self._sink, tables.second_at(self._tables, placed), second, dtype, name)

    def _neutral(self, placed: PlacedTensor) -> list[Blob]:
        """Write the first-round entry of a tensor whose scales are in the second round: scale 1 and zero point 0.

        Returns the offset, length and CRC-32C of the entry; an empty list for other tensors.
        """
        if placed.storage.second is None:
            return []
        offset = self._placement.tables.first_at(self._tables, placed)
        entry = EntryWriter(self._sink, offset, placed.id, "f32", placed.spec.name)
        entry.write(SCALE_ROLES[0], memoryview(struct.pack("<f", 1.0)))
        return [entry.blob()]
