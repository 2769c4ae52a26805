"""Appending to a container of version 2 (section 2.5), so that the file is valid at every moment.

The meaning of a file is defined by the footer at its end, which states the offset of the manifest. So a copy of the old
footer at the new end is written first, in one call that also extends the file. The old tensors are valid then, although
the bytes before the copy are holes. Blobs and the new manifest fill the holes. At last the new footer replaces the
copy, in one call within one page. No byte of the old file changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ingot.core.bytes import checksums, encodings
from ingot.core.parsing import cbor
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.shared.order import Order
from ingot.formats.zt2.layout import ALIGNMENT, CANONICAL, FOOTER, MAX_MANIFEST, Footer, align
from ingot.formats.zt2.manifest import Manifest, optional_value
from ingot.formats.zt2.reader import read_footer, read_manifest
from ingot.formats.zt2.specs import ALGORITHMS, PartLocation, canonical_parts, check_written, describe, written_form
from ingot.model.bytesource import Buffer, ByteSource, Sink
from ingot.model.spec import TensorSpec


class Zt2Appender(FormatWriter):
    """A writer that adds tensors to a file. Until ``finish``, readers of the file see its old tensors.

    Parameters
    ----------
    sink : Sink
        The file. ``finish`` and ``abort`` close it; ``abort`` cuts it to its old size.
    source : ByteSource
        The same file, for reading; it is not closed.
    specs : sequence of TensorSpec
        The tensors to add, in order. All lengths are known.
    digest : {"crc32c", "sha256", None}
        The requested digest; CRC-32C is written as XXH3.
    name : str
        The name of the file in messages.
    flush : callable
        Flushes the written bytes to disk.

    Raises
    ------
    UsageError
        ``append.duplicate``: the file has a tensor of this name.
    UnsupportedError
        ``zt2.data-shard``, ``zt2.manifest-too-large``; the container cannot store a tensor.
    FormatError, IntegrityError
        The file breaks a rule of ``spec/zt2.md``.
    """

    def __init__(
        self,
        sink: Sink,
        source: ByteSource,
        specs: Sequence[TensorSpec],
        *,
        digest: str | None,
        name: str,
        flush: Callable[[], None],
    ) -> None:
        self._sink = sink
        self._name = name
        self._flush = flush
        self._algorithm = ALGORITHMS[digest]
        self._order = Order(specs, name)
        raw, manifest = read_manifest(source)
        self._old_footer = read_footer(source)
        self._old_size = source.size
        duplicate = next((spec.name for spec in specs if spec.name in manifest.objects), None)
        if duplicate is not None:
            message = f"the file already has a tensor {duplicate[:200]!r}; rename the new one"
            raise UsageError(message, rule="append.duplicate", where=name)
        self._root = cast("dict[str, Any]", cbor.loads(raw, location=name, deterministic=True))
        self._entries: dict[str, Any] = {}
        self._locations: dict[str, dict[str, PartLocation]] = {}
        alignment = _alignment(manifest, self._old_footer)
        end = self._old_size
        for spec in specs:
            self._locations[spec.name], end = _assign_offsets(spec, end, alignment, self._algorithm)
            self._entries[spec.name] = describe(spec, written_form(spec), self._locations[spec.name])
        self._manifest_offset = align(end, alignment)
        length = len(self._manifest())  # digests have a fixed length, so that the manifest's length is known
        if length > MAX_MANIFEST:
            message = f"expected a manifest of at most {MAX_MANIFEST} bytes, found {length}"
            raise UnsupportedError(message, rule="zt2.manifest-too-large", where=name)
        self.size = align(self._manifest_offset + length + FOOTER, ALIGNMENT)
        """The size of the finished file; its footer does not cross a page."""
        self._started = False
        self._digests: dict[str, Any] = {}

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes of the file, which stay."""
        return cast("Mapping[str, Any]", self._root.get("attributes", {}))

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor. Raises ``UsageError`` ``writer.order``."""
        self._order.begin(spec)
        self._start()
        self._digests = {
            part.role: (
                None if self._algorithm is None else checksums.hasher(self._algorithm),
                None if part.encoding == "raw" else encodings.Decoding("part.zstd", part.role),
            )
            for part in spec.parts
        }

    def write(self, role: str, data: Buffer) -> None:
        """Append the next stored bytes of a part; raises an error if they exceed its length."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        if not view.nbytes:
            return
        view = view.cast("B")
        assert self._order.current is not None
        self._sink.write_at(self._locations[self._order.current.name][role].offset + position, view)
        digest, decoding = self._digests[role]
        if digest is not None:
            for chunk in (view,) if decoding is None else decoding.decode(view):
                digest.update(chunk)

    def end(self) -> dict[str, Any]:
        """Close the tensor and return an empty record.

        No record is needed: an interrupted run cannot be resumed, and leaves the file with its old tensors.
        """
        spec = self._order.end()
        locations = self._locations[spec.name]
        for role, (digest, _) in self._digests.items():
            if digest is not None:
                locations[role] = locations[role]._replace(digest=digest.text())
        self._entries[spec.name] = entry = describe(spec, written_form(spec), locations)
        check_written(spec.name, entry)
        return {}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` ``writer.order``: nothing can be resumed."""
        raise UsageError("appending cannot be resumed: start again", rule="writer.order", where=self._name)

    def finish(self) -> list[str]:
        """Write the manifest, flush it, and replace the footer; close the file."""
        self._order.finish()
        self._start()
        manifest = self._manifest()
        self._sink.write_at(self._manifest_offset, manifest)
        self._flush()
        footer = Footer(self._manifest_offset, len(manifest), checksums.xxh3(manifest))
        self._sink.write_at(self.size - FOOTER, footer.pack())
        self._flush()
        self._sink.close()
        return [self._name]

    def abort(self) -> None:
        """Cut the file to its old size, which ends with its old footer, and close it."""
        if self._started:
            self._sink.truncate(self._old_size)
        self._sink.close()

    def _start(self) -> None:
        """Extend the file by a copy of its footer."""
        if not self._started:
            self._started = True
            self._sink.write_at(self.size - FOOTER, self._old_footer.pack())

    def _manifest(self) -> bytes:
        return cbor.dumps({**self._root, "objects": {**self._root["objects"], **self._entries}}, sort=True)


def _assign_offsets(
    spec: TensorSpec, end: int, alignment: int, algorithm: str | None
) -> tuple[dict[str, PartLocation], int]:
    """Return the locations of a tensor's parts after ``end``, with digests of the right length, and the new end."""
    placeholder = None if algorithm is None else checksums.hasher(algorithm).text()
    locations = {}
    for part in canonical_parts(spec, written_form(spec)):
        assert part.length is not None
        offset = align(end, alignment)
        locations[part.role] = PartLocation(offset, part.length, placeholder)
        end = offset + part.length
    return locations, end


def _alignment(manifest: Manifest, footer: Footer) -> int:
    """Return the largest power of two, up to 65536, that divides the offsets of all blobs of the file."""
    offsets = footer.offset
    for obj in manifest.objects.values():
        for part in obj.parts.values():
            offsets |= 0 if optional_value(part.shard) else part.blob[0]
    return min(offsets & -offsets, CANONICAL)
