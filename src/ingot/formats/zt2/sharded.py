"""Writing a container of version 2 as data shards beside a manifest: ``model.zt`` describes ``model-00001.zt``, ....

Each shard is what the canonical form makes of its tensors, without a manifest; equal parts share a blob within a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.bytes.checksums import digest as digest_of
from ingot.errors import UsageError
from ingot.formats.base import FormatWriter
from ingot.formats.zt2.layout import FOOTER, MAGIC, align
from ingot.formats.zt2.manifest import Entries
from ingot.formats.zt2.rules import check_names
from ingot.formats.zt2.shards import shard_file
from ingot.formats.zt2.sizes import Said, blobs_end, file_size, stand_ins
from ingot.formats.zt2.specs import ALGORITHMS
from ingot.formats.zt2.writer import Zt2Writer, write_manifest
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Target
from ingot.model.spec import TensorSpec


def split(specs: Sequence[TensorSpec], max_shard: int | None) -> list[Sequence[TensorSpec]]:
    """Cut tensors into shards of at most ``max_shard`` bytes, as they come; a larger tensor has one of its own.

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
    """Return the bytes of all files if no two parts were equal."""
    if len(members) == 1:
        return file_size(artifact.tensors, artifact.metadata, digest)
    nbytes, shards, total = 0, dict[str, Any](), align(len(MAGIC)) + FOOTER
    for index, specs in enumerate(members):
        said, end = stand_ins(specs, digest, _label(index))
        nbytes += said.nbytes
        shards[_label(index)] = {"size": end + FOOTER, "digest": digest_of(_algorithm(digest), b"")}
        total += end + FOOTER
    return total + Said(len(artifact.tensors), nbytes).manifest(artifact.metadata, shards)


def _algorithm(digest: str | None) -> str:
    """Return what a whole shard's digest is: there always is one."""
    return ALGORITHMS[digest] or "xxh3"


def _label(index: int) -> str:
    return f"{index + 1:05}"


class Zt2ShardsWriter(FormatWriter):
    """Writes shards one after the other, each by a ``Zt2Writer``, and the manifest last; implements ``FormatWriter``.

    Parameters
    ----------
    target : Target
    name : str
        The manifest's file.
    members : sequence of sequence of TensorSpec
        The tensors of each shard, in order.
    metadata : mapping
    digest : {"crc32c", "sha256", None}
        Of parts; a shard always has one, XXH3 unless SHA-256 is asked for.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        members: Sequence[Sequence[TensorSpec]],
        metadata: Mapping[str, Any],
        digest: str | None,
    ) -> None:
        self._target, self._name, self._members, self._digest = target, name, members, digest
        self._at = {spec.name: index for index, specs in enumerate(members) for spec in specs}
        if len(self._at) != sum(map(len, members)):
            raise UsageError("expected each tensor name once", rule="writer.duplicate", where=name)
        self._entries = Entries()
        self._shards: dict[str, Any] = {}
        self._open: Zt2Writer | None = None
        self.amend(metadata)

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor; errors as of ``Zt2Writer``, also where a shard before lacks tensors."""
        self._writer(spec.name).begin(spec)

    def write(self, role: str, data: Buffer) -> None:
        """Take the next stored bytes of one part."""
        assert self._open is not None
        self._open.write(role, data)

    def end(self) -> dict[str, Any]:
        """Close the tensor; its record names the shard's file."""
        assert self._open is not None
        return self._open.end()

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take back a tensor that lies in its shard already; errors as of ``Zt2Writer``."""
        self._writer(str(record.get("name", ""))).restore(record)

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata: it goes into the manifest, which is written last."""
        check_names(f"{self._name}: attributes", metadata)
        self._metadata = dict(metadata)

    def finish(self) -> list[str]:
        """Complete all shards, write the manifest; return the names, the manifest's last."""
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
        """Close the file that is open as it is."""
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _writer(self, name: str) -> Zt2Writer:
        """Return the writer of a tensor's shard; those before it are completed."""
        wanted = self._at.get(name, len(self._shards))  # an unknown name the shard's writer refuses
        while len(self._shards) < wanted:
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
