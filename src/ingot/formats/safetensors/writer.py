"""Writer of safetensors files. All offsets follow from the specs, so tensors may arrive in any order.

Keys and bytes have the order of the package ``safetensors`` 0.8: element types with the widest alignment first. Within
a type, names are in code-point order. The same tensors give the same file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import BY_SAFETENSORS, DTYPES, DType
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.columns import Rows
from ingot.errors import IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.formats.by_many import BlobLocation, Read, crc_record
from ingot.formats.safetensors.header import MAX_HEADER, METADATA, PREFIX, Entry, encode
from ingot.formats.safetensors.index import encode_index, index_name, shard_names, split
from ingot.formats.safetensors.patch import ALGORITHM, CODEC, why_patch_unsupported, written_metadata
from ingot.formats.safetensors.pieces import Carrier, FileEntry
from ingot.formats.shared.order import Order
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Sink, Target
from ingot.model.delta import KEY
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import TensorSpec

# the order of safetensors' enum Dtype, "in increasing alignment order" (safetensors/src/tensor.rs); files use the
# reverse order
_RISING = (
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
    "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
)
_RANK = {BY_SAFETENSORS[spelling].name: rank for rank, spelling in enumerate(_RISING.split())}


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why a safetensors file cannot store this tensor; None if it can."""
    row = DTYPES.get(spec.dtype)
    if spec.codec == CODEC and _is_text(spec.name):
        return why_patch_unsupported(spec)
    if spec.codec != DenseLayout.codec:
        return f"safetensors holds dense tensors, this one is {spec.codec}; convert with a dense recipe such as bf16"
    if row is None or row.safetensors is None:
        return f"safetensors has no element type {spec.dtype}"
    if spec.name == METADATA or not _is_text(spec.name):
        return f"safetensors cannot name a tensor {spec.name!r}"
    return _why_wrong_size(spec, row)


def _why_wrong_size(spec: TensorSpec, row: DType) -> str | None:
    if len(spec.parts) != 1 or spec.parts[0].role != "data" or spec.parts[0].encoding != "raw":
        return "safetensors holds one uncompressed part 'data' per tensor"
    bits = spec.size * row.bits
    if bits % 8:
        return f"expected a multiple of 8 bits, found {spec.size} elements of {row.bits} bits; pad the tensor"
    if spec.parts[0].length != bits // 8:
        return f"expected {bits // 8} bytes for shape {list(spec.shape)} in {spec.dtype}, found {spec.parts[0].length}"
    return None


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata after checking that it maps strings to strings.

    Raises ``UnsupportedError`` ``safetensors.metadata``.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or not _is_text(key) or not _is_text(value):
            raise UnsupportedError(
                f"expected metadata that maps UTF-8 text to UTF-8 text, found {str(key)[:80]!r} with "
                f"{type(value).__name__}",
                rule="safetensors.metadata",
            )
    return dict(metadata)


def file_metadata(
    specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digests: Mapping[str, str]
) -> dict[str, str]:
    """Return the ``__metadata__`` of a file: ``metadata`` after checks, or the metadata of a sparse patch.

    Raises the errors of ``checked_metadata`` and ``written_metadata``.
    """
    text = checked_metadata(metadata)
    return written_metadata(specs, text, digests) if is_patch(specs, text) else text


def is_patch(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> bool:
    """Return whether a file of these tensors is a sparse patch; no other safetensors file has digests."""
    return KEY in metadata and (not specs or any(spec.codec == CODEC for spec in specs))


def digest_placeholders(specs: Sequence[TensorSpec], digest: str | None, carrier: Carrier) -> dict[str, str]:
    """Return placeholders as long as the digests of a patch's entries; empty if ``digest`` is None."""
    if digest is None:
        return {}
    return {entry.key: manifest_digest.stand_in(ALGORITHM) for spec in specs for entry in carrier.file_entries(spec)}


class Shard:
    """A file of an artifact: its encoded header, the offset of each entry, and the number of tensors still to write."""

    def __init__(self, name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str], carrier: Carrier) -> None:
        self.name = name
        self._types: list[tuple[str, tuple[int, ...]]] = []
        self._type_index = array("I")
        self._begin = array("q")
        self._index_by_key = dict[str, int]()
        self._assign_offsets(specs, carrier)
        self.head = self._encode_header(metadata)
        self.size = len(self.head) + self._begin[-1]
        self.missing = len(specs)
        self.sink: Sink | None = None

    def _assign_offsets(self, specs: Sequence[TensorSpec], carrier: Carrier) -> None:
        """Compute the offset of every entry.

        To save memory, equal types and shapes are stored once, and integers in arrays.
        """
        type_indices: dict[tuple[str, tuple[int, ...]], int] = {}
        keys_by_rank: dict[int, list[tuple[str, int]]] = {}
        sizes: list[int] = []
        for spec in specs:
            for entry in carrier.file_entries(spec):
                type_ = entry.dtype, entry.shape
                type_index = type_indices.setdefault(type_, len(type_indices))
                if type_index == len(sizes):
                    sizes.append(entry.nbytes)
                keys_by_rank.setdefault(_RANK[entry.dtype], []).append((entry.key, type_index))
        self._types = [*type_indices]
        position = 0
        for rank in sorted(keys_by_rank, reverse=True):
            for key, type_index in sorted(keys_by_rank.pop(rank)):
                self._index_by_key[key] = len(self._type_index)
                self._type_index.append(type_index)
                self._begin.append(position)
                position += sizes[type_index]
        self._begin.append(position)
        if len(self._index_by_key) != len(self._type_index):
            raise UsageError("expected each key once", rule="writer.duplicate", where=self.name)

    def offset(self, key: str) -> int:
        """Return the offset of an entry's contents in the file."""
        return len(self.head) + self._begin[self._index_by_key[key]]

    @property
    def empty(self) -> bool:
        """Return whether there are no entries."""
        return not self._index_by_key

    def _entry(self, index: int) -> Entry:
        dtype, shape = self._types[self._type_index[index]]
        return Entry(DTYPES[dtype].safetensors or "", shape, (self._begin[index], self._begin[index + 1]))

    def _encode_header(self, metadata: Mapping[str, str]) -> bytearray:
        head = encode(Rows(self._index_by_key, self._entry), metadata)
        if metadata.get(manifest_digest.KEY) == manifest_digest.stand_in(ALGORITHM):
            head = head[:PREFIX] + manifest_digest.fill_json(bytes(head[PREFIX:]), ALGORITHM)
        if len(head) - PREFIX > MAX_HEADER:
            raise UnsupportedError(
                f"expected a header of at most {MAX_HEADER} bytes, found {len(head) - PREFIX}: write smaller shards",
                rule="safetensors.header-length",
                where=self.name,
            )
        return head

    def amend(self, metadata: Mapping[str, str]) -> None:
        """Replace the metadata; the header must keep its length."""
        head = self._encode_header(metadata)
        if len(head) != len(self.head):
            raise UsageError(
                f"expected a header of {len(self.head)} bytes as before, found {len(head)}",
                rule="writer.metadata",
                where=self.name,
            )
        self.head = head

    def open(self, target: Target) -> Sink:
        """Return the sink of the file, which the first call creates."""
        if self.sink is None:
            self.sink = target.create(self.name)
        return self.sink

    def complete(self, target: Target) -> None:
        """Write the header, set the file's exact length, and close it."""
        sink = self.open(target)
        sink.write_at(0, self.head)
        sink.truncate(self.size)
        self.close()

    def close(self) -> None:
        """Close the file in its current state."""
        sink = self.sink
        self.sink = None
        if sink is not None:
            sink.close()


class SafetensorsWriter(FormatWriter):
    """A writer of one file, or of shards with an index; ``carrier`` states what it can store.

    A shard is complete with its last tensor. Headers of sparse patches are written last, because they contain the
    identities of base and result.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        artifact: Artifact,
        options: WriteOptions,
        carrier: Carrier,
    ) -> None:
        specs = artifact.tensors
        metadata = artifact.metadata
        self._target = target
        self._name = name
        self._specs = specs
        self._carrier = carrier
        self._shards = layout(name, artifact, options, carrier)
        members = split(specs, options.max_shard, carrier)
        self._index = b""
        self._shard_by_tensor = dict[str, Shard]()
        if len(members) > 1:
            self._index = encode_index(members, [shard.name for shard in self._shards], carrier)
            self._shard_by_tensor = {
                spec.name: shard
                for shard, members_of_shard in zip(self._shards, members, strict=True)
                for spec in members_of_shard
            }
        self._late = KEY in metadata
        self._metadata = dict(metadata)
        self._patch_digests: dict[str, str] | None = {} if is_patch(specs, metadata) and options.digest else None
        self._order = Order(specs)
        self._entries: dict[str, FileEntry] = {}
        self._digests: dict[str, checksums.Hasher] = {}

    def _shard(self, name: str) -> Shard:
        """Return the file that contains the tensor ``name``."""
        return self._shard_by_tensor[name] if self._shard_by_tensor else self._shards[0]

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs; create its file if it is the file's first tensor."""
        self._order.begin(spec)
        shard = self._shard(spec.name)
        sink = shard.open(self._target)
        self._entries = {entry.role: entry for entry in self._carrier.file_entries(spec)}
        self._digests = {role: checksums.hasher("crc32c") for role in self._entries}
        for role, entry in self._entries.items():
            if entry.content is not None:
                content = entry.content()
                sink.write_at(shard.offset(entry.key), content)
                self._digests[role].update(content)

    def write(self, role: str, data: Buffer) -> None:
        """Append bytes to a part; raise an error if they exceed its entry."""
        size = memoryview(data).nbytes
        position = self._order.write(role, size)
        assert self._order.current is not None
        shard = self._shard(self._order.current.name)
        entry = self._entries[role]
        shard.open(self._target).write_at(shard.offset(entry.key) + position, data)
        self._digests[role].update(memoryview(data).cast("B") if size else b"")

    def end(self) -> dict[str, Any]:
        """Close the tensor; return a record with the file, offset, length and CRC-32C of each part."""
        spec = self._order.end()
        shard = self._shard(spec.name)
        blobs = [
            [shard.name, shard.offset(entry.key), entry.nbytes, self._digests[role].text()]
            for role, entry in self._entries.items()
        ]
        self._note(self._entries.values(), blobs)
        self._finish_tensor(shard)
        return {"name": spec.name, "blobs": blobs}

    def _note(self, entries: Iterable[FileEntry], blobs: Sequence[Sequence[Any]]) -> None:
        """Remember the digests of a sparse patch's entries, which its header will contain."""
        if self._patch_digests is not None:
            self._patch_digests.update((entry.key, blob[3]) for entry, blob in zip(entries, blobs, strict=True))

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote with the same specs and options."""
        spec = self._order.expect(record["name"])
        shard = self._shard(spec.name)
        blobs = [list(blob)[:2] for blob in record["blobs"]]
        if blobs != [[shard.name, shard.offset(entry.key)] for entry in self._carrier.file_entries(spec)]:
            raise IntegrityError(
                "writer.record",
                "the earlier run used other offsets in the file: start again without resuming",
                where=record["name"],
            )
        self._note(self._carrier.file_entries(spec), record["blobs"])
        self._order.restored(spec.name)
        self._finish_tensor(shard)

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata of a delta; the header must keep its length, because offsets of tensors are fixed."""
        if not self._late:
            raise UsageError("expected a delta: the metadata of other files is already written", rule="writer.metadata")
        self._metadata = dict(metadata)
        self._amend({} if self._patch_digests is None else digest_placeholders(self._specs, ALGORITHM, self._carrier))

    def _amend(self, digests: Mapping[str, str]) -> None:
        text = file_metadata(self._specs, self._metadata, digests)
        for shard in self._shards:
            shard.amend(text)

    def file_of(self, name: str) -> str | None:
        """Return the file that contains the tensor ``name``; None for a delta, whose headers are written last."""
        return None if self._late else self._shard(name).name

    def skip(self, name: str) -> None:
        """Skip a tensor that another process writes."""
        self._order.restored(name)

    def locate(self, name: str) -> list[BlobLocation]:
        """Return the locations of the next tensor's parts."""
        shard = self._shard(name)
        entries = self._carrier.file_entries(self._order.expect(name))
        return [(shard.name, shard.offset(entry.key), entry.nbytes) for entry in entries]

    def record_of(self, name: str, locations: Sequence[BlobLocation], read: Read) -> dict[str, Any]:
        """Return the record that ``end`` would return for a tensor; see ``Skips.record_of``."""
        return crc_record(name, locations, read)

    def finish(self) -> list[str]:
        """Complete all files, write the index if there are shards, and return the names of the files."""
        self._order.finish()
        if self._patch_digests is not None:
            self._amend(self._patch_digests)
        for shard in self._shards:
            if self._late or shard.empty:  # other shards were completed with their last tensor
                shard.complete(self._target)
        names = [shard.name for shard in self._shards]
        if len(self._shards) > 1:
            name = index_name(self._name)
            sink = self._target.create(name)
            sink.write_at(0, self._index)
            sink.truncate(len(self._index))
            sink.close()
            names.append(name)
        return names

    def abort(self) -> None:
        """Close all files in their present state."""
        for shard in self._shards:
            shard.close()

    def _finish_tensor(self, shard: Shard) -> None:
        shard.missing -= 1
        if shard.missing == 0 and not self._late:
            shard.complete(self._target)


def layout(name: str, artifact: Artifact, options: WriteOptions, carrier: Carrier) -> list[Shard]:
    """Return the files of an artifact, with the offset of every tensor.

    Raises ``UnsupportedError`` for a tensor that ``carrier`` rejects, ``UsageError`` for a repeated name.
    """
    specs = artifact.tensors
    metadata = artifact.metadata
    Order(specs)
    for spec in specs:
        reason = carrier.why_unsupported(spec)
        if reason is not None:
            raise UnsupportedError(reason, rule="safetensors.unsupported", where=spec.name)
    digests = digest_placeholders(specs, options.digest, carrier) if is_patch(specs, metadata) else {}
    text = file_metadata(specs, metadata, digests)
    shards = split(specs, options.max_shard, carrier)
    files = zip(shard_names(name, len(shards)), shards, strict=True)
    return [Shard(file, members, text, carrier) for file, members in files]


def files_size(name: str, artifact: Artifact, options: WriteOptions, carrier: Carrier) -> int:
    """Return the exact number of bytes of all files, including the index; raises the errors of ``layout``."""
    shards = layout(name, artifact, options, carrier)
    total = sum(shard.size for shard in shards)
    if len(shards) > 1:
        members = split(artifact.tensors, options.max_shard, carrier)
        total += len(encode_index(members, [shard.name for shard in shards], carrier))
    return total


def _is_text(text: str) -> bool:
    """Return whether ``text`` can be encoded in UTF-8; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
