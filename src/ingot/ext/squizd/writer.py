"""Write ``.squizd`` files: first the blocks in the order of layers, at the end header, index, tables and appendices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ingot.core.bytes.checksums import fnv1a64
from ingot.core.numeric.blocks import block_count
from ingot.errors import UsageError
from ingot.ext.squizd.appendix import write_coreml, write_draft
from ingot.ext.squizd.carry import storage_form
from ingot.ext.squizd.directory import VERSION, Directory, build
from ingot.ext.squizd.layout import (
    HEADER,
    INDEX_ENTRY,
    DraftMeta,
    Header,
    IndexEntry,
    Sparsity,
    align,
    sparsity_crc,
    split_metadata,
)
from ingot.ext.squizd.placement import PlacedTensor, flags_of, lay_out, layers_in_order, place_tensors
from ingot.ext.squizd.section import Section, TensorWriter
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Target
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.spec import TensorSpec
from ingot.model.stacks import Flags


class SquizdWriter(FormatWriter):
    """A writer of one ``.squizd`` file.

    Raises ``UnsupportedError`` ``squizd.carry``, ``squizd.mixed-encodings``, ``squizd.mixed-blocks`` or
    ``squizd.id-collision`` for tensors that the file cannot store, alone or in combination.
    """

    def __init__(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> None:
        specs = artifact.tensors
        layers, count = layers_in_order(specs, name)
        self._specs = specs
        self._name = name
        self._options = options
        self._arch, self._metadata = split_metadata(artifact.metadata)
        self._attachments = artifact.attachments
        self._placement = place_tensors(specs, layers, count)
        self._start = HEADER + INDEX_ENTRY * count
        tables = 0
        if self._placement.tables.counts:  # all lengths are known, because quantized tensors have no unknown lengths
            tables = lay_out(self._placement, self._start)[1].tail
        self._sink = target.create(name)
        self._section = Section(self._sink, self._placement, self._start, tables, options.digest)
        self._order = self._section.order
        self._open: tuple[PlacedTensor, TensorWriter] | None = None

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs."""
        self._order.expect(spec.name)
        placed = self._placement.tensors[self._order.done]
        if spec is not placed.spec:  # it may state lengths that the announced spec left open
            placed = replace(placed, spec=spec, storage=storage_form(spec))
        self._open = (placed, self._section.begin(placed))

    def write(self, role: str, data: Buffer) -> None:
        """Append the next bytes of a part."""
        if self._open is None:
            raise UsageError("no tensor is open", rule="writer.role", where=self._name)
        self._open[1].write(role, data)

    def end(self) -> dict[str, Any]:
        """Complete the tensor; return a record with the locations of its parts and scale entries, digests, and its
        mask.
        """
        if self._open is None:
            raise UsageError("no tensor is open", rule="writer.role", where=self._name)
        placed, writer = self._open
        record = self._section.end(placed, writer)
        self._open = None
        return {**record, "blobs": [[self._name, *blob] for blob in record["blobs"]]}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote."""
        self._order.expect(record["name"])
        self._section.restore(self._placement.tensors[self._order.done], record)
        self._order.restored(record["name"])

    def finish(self) -> list[str]:
        """Write the scale tables, appendices, directory, header and layer index, and close the file; return its
        name.
        """
        self._order.finish()
        tail = self._section.finish()
        directory, end, draft = self._finish_appendices(tail)
        tables = tail - self._placement.tables.size if self._placement.tables.counts else 0
        head = self._head(tables, draft)
        for segment in build(directory, self._section.entries, self._options.digest, head):
            self._sink.write_at(end, segment)
            end += memoryview(segment).nbytes
        self._sink.write_at(0, head)  # written last: without these bytes, no reader accepts an incomplete file
        self._sink.truncate(end)
        self._sink.close()
        return [self._name]

    def abort(self) -> None:
        """Close the file in its present state."""
        self._section.abandon()
        self._sink.close()

    def _finish_appendices(self, tail: int) -> tuple[Directory, int, DraftMeta]:
        """Write draft head and Core ML package after the tables; return directory, its offset, and the head's
        metadata."""
        attached = self._attachments
        digest = self._options.digest
        draft = DraftMeta()
        draft_digest = None
        coreml_digest = None
        end = tail
        if attached.draft is not None:
            start = align(end)
            self._sink.write_at(end, bytes(start - end))
            draft, draft_digest = write_draft(self._sink, attached.draft, start, digest, attached.draft_vocab)
            end = start + draft.length
        if attached.coreml is not None:
            end, coreml_digest = write_coreml(self._sink, attached.coreml, end)
        directory = Directory(VERSION, {}, self._metadata, draft_digest, coreml_digest)
        return directory, end, draft

    def _head(self, tables: int, draft: DraftMeta) -> bytes:
        """Return the bytes of the header and the layer index; ``tables`` is the offset of the scale tables."""
        flags = flags_of(self._specs)
        flags |= Flags.EAGLE if draft.offset else Flags(0)
        flags |= Flags.ANE_COREML if self._attachments.coreml is not None else Flags(0)
        sparsity = self._sparsity()
        header = Header(
            flags=flags,
            arch=self._arch,
            layer_count=self._placement.layer_count,
            sparsity_crc=sparsity_crc(sparsity.pack()) if flags & Flags.SPARSE else 0,
            draft_hash=fnv1a64(draft.pack()) if draft.offset else 0,
            sparsity=sparsity,
            draft=draft,
        )
        cursor = self._section.cursor
        index = [
            IndexEntry(layer, start, end - start, tables if mask is None else mask)
            for layer, ((start, end), mask) in enumerate(zip(cursor.spans, cursor.mask_starts, strict=True))
        ]
        return header.pack() + b"".join(entry.pack() for entry in index)

    def _sparsity(self) -> Sparsity:
        """Return the metadata of pruning: the mean share of dropped blocks, over the layers with masks."""
        if all(spec.codec != BlocksLayout.codec for spec in self._specs):
            return Sparsity()
        pruned = {
            placed.spec.name: (placed.layer, BlocksLayout.from_tensor(placed.spec))
            for placed in self._placement.tensors
            if placed.spec.codec == BlocksLayout.codec
        }
        shares: dict[int, list[float]] = {}
        for name, (layer, layout) in pruned.items():
            blocks = block_count(layout.channels, layout.block)
            kept_blocks = self._section.mask_of[name].bit_count()
            shares.setdefault(layer, []).append(1 - kept_blocks / max(blocks, 1))
        means = [sum(values) / len(values) for values in shares.values()]
        return Sparsity(1, next(iter(pruned.values()))[1].block, len(shares), sum(means) / len(means))
