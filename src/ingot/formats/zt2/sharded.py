"""Writer of a container of version 2 as data shards and a manifest: ``model.zt`` describes ``model-00001.zt``, ....

A shard contains the canonical form of its tensors without a manifest; equal parts share a blob within a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.core.bytes.checksums import digest as digest_of
from ingot.core.parsing import cbor
from ingot.errors import UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.zt2.layout import FOOTER, MAGIC, align
from ingot.formats.zt2.manifest import Entries, frame
from ingot.formats.zt2.rules import check_names
from ingot.formats.zt2.shards import shard_file
from ingot.formats.zt2.specs import ALGORITHMS, PartLocation, canonical_parts, describe, written_form
from ingot.formats.zt2.writer import Zt2Writer, write_manifest
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Target
from ingot.model.spec import PartSpec, TensorSpec


class EntriesSize(NamedTuple):
    """The number of tensor entries, and the number of bytes that encode them."""

    tensors: int
    nbytes: int

    def manifest(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> int:
        """Return the number of bytes of a manifest with these entries."""
        return self.nbytes + sum(map(len, frame(self.tensors, metadata, shards)))


class _Extent(NamedTuple):
    """The bytes that a tensor adds to a file and its manifest.

    ``nbytes`` is the size of its manifest entry without name and offsets. ``begins`` are the offsets of its parts, and
    ``end`` is the end of the last part.
    """

    nbytes: int
    begins: tuple[int, ...]
    end: int


def entries_size(specs: Sequence[TensorSpec], digest: str | None, shard: str | None = None) -> tuple[EntriesSize, int]:
    """Return the size of the entries of tensors if no two parts are equal, and the end of their blobs.

    Placeholders stand for unknown digests; an unknown length counts as its maximum.
    """
    algorithm = ALGORITHMS[digest]
    placeholder = None if algorithm is None else digest_of(algorithm, b"")
    tail = len(MAGIC)
    nbytes = 0
    for spec in specs:
        extent = _extent(spec, placeholder, shard)
        start = align(tail)
        nbytes += extent.nbytes + _name_bytes(spec.name)
        for begin in extent.begins:
            nbytes += _number_bytes(start + begin)
            tail = start + extent.end
    return EntriesSize(len(specs), nbytes), tail


def _extent(spec: TensorSpec, digest: str | None, shard: str | None) -> _Extent:
    begins = []
    locations = dict[str, PartLocation]()
    tail = 0
    profile_form = written_form(spec)
    for part in canonical_parts(spec, profile_form):
        begins.append(align(tail))
        locations[part.role] = PartLocation(0, part.at_most, digest, shard)
        tail = begins[-1] + part.at_most
    entry = cbor.dumps([{"": describe(spec, profile_form, locations)}], sort=True)[
        3:
    ]  # wrapped, to check the nesting depth that it has in the root
    return _Extent(len(entry) - len(begins), (*begins,), tail)


def _name_bytes(name: str) -> int:
    """Return the number of bytes that ``name`` takes in CBOR; raises the errors of ``cbor.dumps``."""
    return len(name) + _number_bytes(len(name)) if name.isascii() else len(cbor.dumps(name))


def _number_bytes(number: int) -> int:
    """Return the number of bytes that the integer ``number`` takes in CBOR; raises the errors of ``cbor.dumps``.

    The head of a text of ``number`` bytes takes the same number of bytes.
    """
    if number < 1 << 32:
        return 1 if number < 24 else 2 if number < 1 << 8 else 3 if number < 1 << 16 else 5
    return len(cbor.dumps(number))


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digest: str | None) -> int:
    """Return the number of bytes of the file if no two parts are equal; an unknown length counts as its maximum."""
    entries, tail = entries_size(specs, digest)
    return align(tail) + entries.manifest(metadata, {}) + FOOTER


def blobs_end(tail: int, spec: TensorSpec) -> int:
    """Return the end of a tensor's blobs after ``tail``; an unknown length counts as its maximum."""
    parts: Sequence[PartSpec] = spec.parts if len(spec.parts) == 1 else canonical_parts(spec, written_form(spec))
    for part in parts:
        tail = align(tail) + part.at_most
    return tail


def split(specs: Sequence[TensorSpec], max_shard: int | None) -> list[Sequence[TensorSpec]]:
    """Cut tensors, in order, into shards of at most ``max_shard`` bytes; a larger tensor has its own shard.

    Raises ``UsageError`` ``zt2.max-shard``: less than a byte.
    """
    if max_shard is None:
        return [specs]
    if max_shard < 1:
        raise UsageError(f"expected shards of at least one byte, found {max_shard}", rule="zt2.max-shard")
    shards: list[list[TensorSpec]] = [[]]
    tail = len(MAGIC)
    for spec in specs:
        end = blobs_end(tail, spec)
        if shards[-1] and end + FOOTER > max_shard:
            shards.append([])
            end = blobs_end(len(MAGIC), spec)
        shards[-1].append(spec)
        tail = end
    return [*shards]


def size_of(artifact: Artifact, members: Sequence[Sequence[TensorSpec]], digest: str | None) -> int:
    """Return the number of bytes of all files; an upper limit if some parts are equal."""
    if len(members) == 1:
        return file_size(artifact.tensors, artifact.metadata, digest)
    nbytes = 0
    shards = dict[str, Any]()
    total = align(len(MAGIC)) + FOOTER
    for index, specs in enumerate(members):
        entries, end = entries_size(specs, digest, _label(index))
        nbytes += entries.nbytes
        shards[_label(index)] = {"size": end + FOOTER, "digest": digest_of(_algorithm(digest), b"")}
        total += end + FOOTER
    return total + EntriesSize(len(artifact.tensors), nbytes).manifest(artifact.metadata, shards)


def _algorithm(digest: str | None) -> str:
    """Return the algorithm for digests of complete shards, given the requested algorithm ``digest`` for parts.

    Shards always have a digest, even if ``digest`` is None.
    """
    return ALGORITHMS[digest] or "xxh3"


def _label(index: int) -> str:
    return f"{index + 1:05}"


class Zt2ShardsWriter(FormatWriter):
    """A writer of shards, one after the other, each by a ``Zt2Writer``, and of the manifest at the end.

    Parameters
    ----------
    target : Target
    name : str
        The file of the manifest.
    members : sequence of sequence of TensorSpec
        The tensors of each shard, in order.
    metadata : mapping
    digest : {"crc32c", "sha256", None}
        The digest of parts. A shard always has a digest: SHA-256 if ``digest`` is ``sha256``, else XXH3.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        members: Sequence[Sequence[TensorSpec]],
        metadata: Mapping[str, Any],
        digest: str | None,
    ) -> None:
        self._target = target
        self._name = name
        self._members = members
        self._digest = digest
        self._shard_index = {spec.name: index for index, specs in enumerate(members) for spec in specs}
        if len(self._shard_index) != sum(map(len, members)):
            raise UsageError("expected each tensor name once", rule="writer.duplicate", where=name)
        self._entries = Entries()
        self._shards: dict[str, Any] = {}
        self._open: Zt2Writer | None = None
        self.amend(metadata)

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor; raises the errors of ``Zt2Writer``, also if an earlier shard lacks tensors."""
        self._writer(spec.name).begin(spec)

    def write(self, role: str, data: Buffer) -> None:
        """Append the next stored bytes of a part."""
        assert self._open is not None
        self._open.write(role, data)

    def end(self) -> dict[str, Any]:
        """Close the tensor and return its record, which names the shard's file."""
        assert self._open is not None
        return self._open.end()

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that is already in its shard; raises the errors of ``Zt2Writer``."""
        self._writer(str(record.get("name", ""))).restore(record)

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata, which are written last, in the manifest."""
        check_names(f"{self._name}: attributes", metadata)
        self._metadata = dict(metadata)

    def finish(self) -> list[str]:
        """Complete all shards, write the manifest, and return the names, the manifest's last."""
        while len(self._shards) < len(self._members):
            self._next()
        sink = self._target.create(self._name)
        try:
            sink.write_at(0, MAGIC)
            write_manifest(sink, len(MAGIC), self._entries, self._metadata, self._shards)
        except BaseException:
            sink.close()
            raise
        return [*(shard_file(self._name, label) for label in self._shards), self._name]

    def abort(self) -> None:
        """Close the open file in its present state."""
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _writer(self, name: str) -> Zt2Writer:
        """Return the writer of a tensor's shard after completing earlier shards."""
        index = self._shard_index.get(name, len(self._shards))  # the shard's writer refuses an unknown name
        while len(self._shards) < index:
            self._next()
        return self._current()

    def _current(self) -> Zt2Writer:
        if self._open is None:
            index = min(len(self._shards), len(self._members) - 1)
            file = shard_file(self._name, _label(index))
            self._open = Zt2Writer(
                self._target.create(file),
                self._members[index],
                metadata={},
                digest=self._digest,
                name=file,
                shard=_label(index),
            )
        return self._open

    def _next(self) -> None:
        """Complete the shard that is being written."""
        writer = self._current()
        self._shards[_label(len(self._shards))] = writer.seal(_algorithm(self._digest))
        self._entries.update(writer.entries)
        self._open = None
