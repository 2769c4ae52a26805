"""Writer of ``.wdelta``; all offsets follow from the specs, because every length is known.

The digest covers the header, which contains the parent hash. If the parent hash is known at the start, a thread
computes the digest while the file grows. If it is set later (``amend``), the file is hashed in one pass at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.core.bytes import checksums
from ingot.errors import IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.shared.order import Order
from ingot.formats.wdelta.carry import why_change_unsupported, why_unsupported
from ingot.formats.wdelta.digest import TrailingDigest
from ingot.formats.wdelta.header import HASH, describe, version_of
from ingot.formats.wdelta.layout import BY_CODEC, DIGEST, ITEM, MAX_HEADER, PREFIX, SPELLING, pack_head, pack_prefix
from ingot.model.bytesource import Buffer, Target
from ingot.model.delta import DeltaInfo, delta_of
from ingot.model.spec import PartSpec, TensorSpec

UNKNOWN = "0" * 64
"""Placeholder for an unknown parent hash."""


@dataclass(slots=True)
class _Blob:
    """An array to be written: the encoded head of its record, and the offset and length of its data."""

    head: bytes
    offset: int
    length: int


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> int:
    """Return the exact size of the file; raises the errors of ``WdeltaWriter``."""
    header, _ = header_size(specs, metadata)
    return PREFIX + header + _records_bytes(specs) + DIGEST


def header_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> tuple[int, DeltaInfo]:
    """Return the size of the header of a file of these tensors in bytes, and the description of the delta.

    Raises
    ------
    UnsupportedError
        ``wdelta.metadata``, ``wdelta.change``, ``wdelta.unsupported``, ``wdelta.header-too-large``.
    """
    for spec in specs:
        reason = why_unsupported(spec)
        if reason is not None:
            raise UnsupportedError(reason, rule="wdelta.unsupported", where=spec.name)
    info = info_of(specs, metadata)
    size = sum(map(len, describe(specs, metadata, info, version_of(specs))))
    if size > MAX_HEADER:
        raise UnsupportedError(
            f"expected a header of at most {MAX_HEADER} bytes, found {size}", rule="wdelta.header-too-large"
        )
    return size, info


def info_of(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> DeltaInfo:
    """Return the description of the delta; raises ``UnsupportedError`` if the format cannot express it."""
    info = delta_of(metadata)
    if info is None:
        raise UnsupportedError(
            "expected the description of a delta among the metadata, found ordinary weights", rule="wdelta.metadata"
        )
    reason = why_change_unsupported(info, [spec.name for spec in specs])
    if reason is not None:
        raise UnsupportedError(f"a .wdelta cannot store this delta: {reason}; write a .zt", rule="wdelta.change")
    return info


class WdeltaWriter(FormatWriter):
    """A writer of one ``.wdelta`` file; records have the order of the specs.

    ``metadata`` must contain the description of the delta. The parent hash and other identities may be placeholders of
    the same length until ``amend``. Raises the errors of ``header_size``.
    """

    def __init__(self, target: Target, name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> None:
        self._name = name
        self._specs = specs
        self._order = Order(specs, name)
        self._set_metadata(metadata)
        self._next = PREFIX + self._head_bytes  # offset of the next tensor's record
        self._blobs: dict[str, _Blob] = {}  # only for the open tensor, to limit memory
        self._end = self._next + _records_bytes(specs)
        self._sink = target.create(name)
        self._trail: TrailingDigest | None = None
        self._start_digest()
        self._crcs: dict[str, checksums.Hasher] = {}

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs and write the heads of its records."""
        self._order.begin(spec)
        self._assign_offsets(self._specs[self._order.done])
        self._crcs = {part.role: checksums.hasher("crc32c") for part in spec.parts}
        self._write_heads()

    def write(self, role: str, data: Buffer) -> None:
        """Append the next bytes of an array; raises an error if they exceed its length."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        spec = self._order.current
        if spec is None or not view.nbytes:
            return
        self._sink.write_at(self._blobs[role].offset + position, view)
        self._crcs[role].update(view.cast("B"))

    def end(self) -> dict[str, Any]:
        """Close the tensor and return a record of file, offset, length and CRC-32C of every array."""
        spec = self._order.end()
        self._advance()
        blobs = self._blobs.items()
        return {
            "name": spec.name,
            "blobs": [[self._name, blob.offset, blob.length, self._crcs[role].text()] for role, blob in blobs],
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote.

        Raises ``IntegrityError`` ``writer.record`` if that run used other offsets.
        """
        spec = self._order.expect(record["name"])
        self._assign_offsets(spec)
        expected = [[self._name, blob.offset, blob.length] for blob in self._blobs.values()]
        if [list(blob)[:3] for blob in record["blobs"]] != expected:
            raise IntegrityError(
                "writer.record",
                "the earlier run used other offsets in the file: start again without resuming",
                where=spec.name,
            )
        self._write_heads()
        self._order.restored(spec.name)
        self._advance()

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata; the header must keep its length, because the offsets of the arrays are fixed.

        Bytes that were already hashed are hashed again at the end.
        """
        length, _ = header_size(self._specs, metadata)
        if length != self._head_bytes:
            message = f"expected a header of {self._head_bytes} bytes as before, found {length}"
            raise UsageError(message, rule="writer.metadata", where=self._name)
        self._set_metadata(metadata)
        if self._trail is not None:
            self._trail.close()
            self._trail = None

    def finish(self) -> list[str]:
        """Write header and digest, truncate the file after them, and close it."""
        self._order.finish()
        if not self._has_parent_hash:
            raise UsageError(
                "expected the parent hash before the end, but it was never set",
                rule="wdelta.parent-hash",
                where=self._name,
            )
        if self._trail is None:
            self._start_digest()
        assert self._trail is not None
        self._sink.write_at(self._end, self._trail.finish(self._end))
        self._sink.truncate(self._end + DIGEST)
        self._sink.close()
        return [self._name]

    def abort(self) -> None:
        """Close the file in its present state."""
        if self._trail is not None:
            self._trail.close()
        self._sink.close()

    def _set_metadata(self, metadata: Mapping[str, Any]) -> None:
        self._head_bytes, self._info = header_size(self._specs, metadata)
        self._has_parent_hash = self._info.base.hashes.get(HASH, UNKNOWN) != UNKNOWN
        self._metadata = metadata

    def _start_digest(self) -> None:
        """Write prefix and header and start to hash, if the header is final."""
        if self._has_parent_hash:
            version = version_of(self._specs)
            offset = PREFIX
            self._sink.write_at(0, pack_prefix(version, self._head_bytes))
            for chunk in describe(self._specs, self._metadata, self._info, version):
                self._sink.write_at(offset, chunk)
                offset += len(chunk)
            self._trail = TrailingDigest(self._sink)

    def _assign_offsets(self, spec: TensorSpec) -> None:
        """Compute the locations of the next tensor's arrays.

        The position in the file does not change; ``_advance`` moves it to the end of these arrays.
        """
        self._blobs, start = {}, self._next
        for part in _parts_in_order(spec):
            head = _head_of(spec.name, part)
            length = part.length or 0
            self._blobs[part.role] = _Blob(head, start + len(head), length)
            start += len(head) + length

    def _write_heads(self) -> None:
        for blob in self._blobs.values():
            self._sink.write_at(blob.offset - len(blob.head), blob.head)

    def _advance(self) -> None:
        last = list(self._blobs.values())[-1]
        self._next = last.offset + last.length
        if self._trail is not None:
            self._trail.advance(self._next)


def _parts_in_order(spec: TensorSpec) -> list[PartSpec]:
    return [spec.part(field) for field in BY_CODEC[spec.codec].fields]


def _head_of(tensor: str, part: PartSpec) -> bytes:
    spelling = SPELLING[part.dtype]
    return pack_head(tensor, part.role, spelling, (part.length or 0) // ITEM[spelling][1])


def _records_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the number of bytes of all records."""
    return sum(len(_head_of(spec.name, part)) + (part.length or 0) for spec in specs for part in spec.parts)
