"""Writer of ``.zt``: appends one tensor after the other and computes digests from the bytes that pass.

Parts of known length get their offsets at ``begin``, so roles may alternate. The length of other parts depends on their
bytes (zstd, sparse). The first of these parts in the spec is written directly to the end of the file; each of the other
parts is buffered in an unnamed temporary file. So the layout depends on the lengths alone, never on the order or the
chunks of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import PartDigests, stand_in
from ingot.core.bytes.encodings import compress_frame
from ingot.errors import UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.by_many import BlobLocation, Read, read_place
from ingot.formats.shared.order import Order
from ingot.formats.shared.spool import Spool
from ingot.formats.zt.manifest import MAGIC, Blob, Entries, align, assign_offsets, build, describe, footer
from ingot.formats.zt.specs import attributes_of, check_spec, check_written, layout_order
from ingot.model.bytesource import Buffer, Sink
from ingot.model.spec import PartSpec, TensorSpec

_CRC = "crc32c"


class _Blob:
    """A part that is being written: at ``offset`` of the file, or buffered until its offset is known."""

    def __init__(self, spec: PartSpec, offset: int | None, digest: str | None) -> None:
        self.spec = spec
        self.offset = offset
        self.length = 0
        self.spool: Spool | None = None
        self.digests = PartDigests(spec.length, digest)

    def to_blob(self) -> Blob:
        return Blob(self.offset or 0, self.length, self.digests.digest, self.digests.chunks)


class ZtWriter(FormatWriter):
    """A writer of one ``.zt`` file into a sink.

    Parameters
    ----------
    sink : Sink
        The writer takes it over: ``finish`` and ``abort`` close it.
    specs : sequence of TensorSpec, optional
        The tensors to come, in order; ``restore`` needs them. Without specs any tensor may come next.
    metadata : mapping, optional
        The metadata of the file (root ``attributes``): values that CBOR can encode.
    digest : {"crc32c", "sha256", None}
        The digest that is written for every part.
    name : str
        The name of the file in records and messages.

    As a context manager it calls ``finish`` at the end, and ``abort`` on an exception::

        with ZtWriter(LocalTarget(folder).create("model.zt")) as writer:
            writer.begin(spec)
            writer.write("data", data)
            writer.end()
    """

    def __init__(
        self,
        sink: Sink,
        specs: Sequence[TensorSpec] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        digest: str | None = _CRC,
        name: str = "model.zt",
    ) -> None:
        if digest is not None and digest not in checksums.HASHERS:
            raise UsageError(
                f"expected a digest {' or '.join(checksums.HASHERS)} or None, found {digest!r}", rule="zt.digest-option"
            )
        self._sink = sink
        self._digest = digest
        self._name = name
        self._order = Order(specs, name)
        self._metadata = dict(metadata or {})
        self._entries = Entries()
        self._tail = len(MAGIC)
        self._blobs: dict[str, _Blob] = {}
        sink.write_at(0, MAGIC)

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor and assign an offset to every part of known length.

        Raises
        ------
        UsageError
            ``writer.order``, ``writer.duplicate``: a tensor is open, the spec is not the next one, or a name is
            repeated.
        UnsupportedError
            ``.zt`` cannot store the tensor; the rule states why.
        """
        check_spec(spec)
        self._order.begin(spec)
        offset_by_role = {}
        for part in spec.parts:
            if part.length is not None:
                offset_by_role[part.role] = self._reserve()
                self._tail += part.length
        unknown = [part.role for part in spec.parts if part.length is None]
        if unknown:
            offset_by_role[unknown[0]] = self._reserve()
        self._blobs = {part.role: _Blob(part, offset_by_role.get(part.role), self._digest) for part in spec.parts}

    def write(self, role: str, data: Buffer) -> None:
        """Append the next stored bytes of a part; raises an error if they exceed its length."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        if not view.nbytes:
            return
        view = view.cast("B")
        blob = self._blobs[role]
        if blob.offset is None:
            blob.spool = blob.spool or Spool(self._sink)
            blob.spool.write(view)
        else:
            self._sink.write_at(blob.offset + position, view)
        blob.digests.update(view)
        blob.length = position + view.nbytes

    def end(self) -> dict[str, Any]:
        """Close the tensor and return its record.

        The record contains ``name``, ``blobs`` in the spec's order, and the ``digests`` and ``chunks`` of the manifest.
        """
        for role, blob in self._blobs.items():
            if blob.spec.encoding == "zstd" and blob.length == 0:
                self.write(role, compress_frame(b""))  # an empty file is no valid zstd stream
        spec = self._order.end()
        self._settle()
        settled = [self._blobs[part.role].to_blob() for part in spec.parts]
        sums = [self._blobs[part.role].digests.crc for part in spec.parts]
        self._accept(spec, settled)
        self._blobs = {}
        return {
            "name": spec.name,
            "blobs": [[self._name, blob.offset, blob.length, crc] for blob, crc in zip(settled, sums, strict=True)],
            "digests": [blob.digest for blob in settled],
            "chunks": [None if blob.chunks is None else blob.chunks.hex() for blob in settled],
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that is already in the sink; its blobs must have the offsets that would be assigned now.

        Raises
        ------
        UsageError
            ``zt.resume-record``: the record is of another tensor or another layout.
        """
        spec = self._order.expect(record.get("name", ""))
        try:
            chunks = [None if digests is None else bytes.fromhex(digests) for digests in record["chunks"]]
            rows = zip(record["blobs"], record["digests"], chunks, strict=True)
            blobs = [Blob(int(entry[1]), int(entry[2]), digest, chunk_digests) for entry, digest, chunk_digests in rows]
            fits = len(blobs) == len(spec.parts) and all(self._has_chunks(blob) for blob in blobs)
        except (KeyError, TypeError, ValueError):
            fits = False
        if fits:
            order = layout_order(spec.parts)
            offsets, tail = assign_offsets(self._tail, [blobs[index].length for index in order])
            fits = offsets == [blobs[index].offset for index in order]
        if not fits:
            raise UsageError(
                f"the record of an earlier run does not fit tensor {spec.name!r}; start again without resuming",
                rule="zt.resume-record",
                where=self._name,
            )
        self._order.restored(spec.name)
        self._accept(spec, blobs)
        self._tail = tail

    def skip(self, name: str) -> None:
        """Pass over a tensor that another process writes; all lengths of its parts must be known."""
        spec = self._order.expect(name)
        _, self._tail = assign_offsets(
            self._tail, [spec.parts[index].length or 0 for index in layout_order(spec.parts)]
        )
        self._order.restored(name)

    def locate(self, name: str) -> list[BlobLocation]:
        """Return the locations of the next tensor's parts; all their lengths must be known."""
        parts = self._order.expect(name).parts
        order = layout_order(parts)
        offsets, _ = assign_offsets(self._tail, [parts[index].length or 0 for index in order])
        placed = dict(zip(order, offsets, strict=True))
        return [(self._name, placed[index], part.length or 0) for index, part in enumerate(parts)]

    def record_of(self, name: str, locations: Sequence[BlobLocation], read: Read) -> dict[str, Any]:
        """Return the record that ``end`` returned for a tensor, with the digests of the manifest; see
        ``Skips.record_of``."""
        digests = [PartDigests(length, self._digest) for _, _, length in locations]
        for blob, running in zip(locations, digests, strict=True):
            read_place(read, blob, running.update)
        return {
            "name": name,
            "blobs": [[*blob, running.crc] for blob, running in zip(locations, digests, strict=True)],
            "digests": [running.digest for running in digests],
            "chunks": [None if running.chunks is None else running.chunks.hex() for running in digests],
        }

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata, which are written last, in the manifest."""
        self._metadata = dict(metadata)

    def finish(self) -> list[str]:
        """Write the manifest and the footer, truncate the file after them, and close it."""
        self._order.finish()
        manifest = build(self._entries, self._metadata, self._digest)
        for segment in (*manifest, footer(sum(map(len, manifest)))):
            self._sink.write_at(self._tail, segment)
            self._tail += len(segment)
        self._sink.truncate(self._tail)
        self._sink.close()
        return [self._name]

    def abort(self) -> None:
        """Close the file in its present state and delete buffered parts."""
        self._drop_spools()
        self._sink.close()

    def __enter__(self) -> ZtWriter:
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exception_type is None:
            self.finish()
        else:
            self.abort()

    def _accept(self, spec: TensorSpec, blobs: Sequence[Blob]) -> None:
        entry = describe(spec, attributes_of(spec), blobs)
        check_written(spec, entry)
        self._entries.add(spec.name, entry)

    def _has_chunks(self, blob: Blob) -> bool:
        """Return whether the chunk digests of a part that an earlier run wrote have the expected length."""
        return len(blob.chunks or b"") == len(stand_in(self._digest, blob.length) or b"")

    def _reserve(self) -> int:
        """Move the tail to the next aligned offset and return it.

        The gap is written explicitly, because a resumed file may contain other bytes there.
        """
        offset = align(self._tail)
        if offset > self._tail:
            self._sink.write_at(self._tail, bytes(offset - self._tail))
        self._tail = offset
        return offset

    def _settle(self) -> None:
        """Append the buffered parts of the tensor to the file, and move the tail after the last part."""
        for role in [role for role, blob in self._blobs.items() if blob.spec.length is None]:
            blob = self._blobs[role]
            if blob.offset is None:
                position = blob.offset = self._reserve()
                for chunk in blob.spool.chunks() if blob.spool else ():
                    self._sink.write_at(position, chunk)
                    position += len(chunk)
            self._tail = blob.offset + blob.length
        self._drop_spools()

    def _drop_spools(self) -> None:
        for blob in self._blobs.values():
            if blob.spool is not None:
                blob.spool.close()
                blob.spool = None
