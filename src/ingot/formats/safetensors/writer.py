"""Writing: every offset is known from the specs, so that tensors go to their places in whatever order they come.

Order of keys and bytes is that of the package ``safetensors`` 0.8: element types with the widest alignment first, names
in code-point order within a type. A file of the same tensors is the same file.
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
from ingot.formats.by_many import Place, Read, crc_record
from ingot.formats.safetensors.header import MAX_HEADER, METADATA, PREFIX, Entry, encode
from ingot.formats.safetensors.index import encode_index, index_name, shard_names, split
from ingot.formats.safetensors.patch import ALGORITHM, CODEC, refusal, written_metadata
from ingot.formats.safetensors.pieces import Carrier, Piece
from ingot.formats.shared.order import Order
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Sink, Target
from ingot.model.delta import KEY
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import TensorSpec

# The order of safetensors' enum Dtype, "in increasing alignment order" (safetensors/src/tensor.rs); files run down it.
_RISING = (
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
    "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
)
_RANK = {BY_SAFETENSORS[spelling].name: rank for rank, spelling in enumerate(_RISING.split())}


def refuses(spec: TensorSpec) -> str | None:
    """Why a safetensors file cannot hold this tensor; None if it can."""
    row = DTYPES.get(spec.dtype)
    if spec.codec == CODEC and _is_text(spec.name):
        return refusal(spec)
    if spec.codec != DenseLayout.codec:
        return f"safetensors holds dense tensors, this one is {spec.codec}; convert with a dense recipe such as bf16"
    if row is None or row.safetensors is None:
        return f"safetensors has no element type {spec.dtype}"
    if spec.name == METADATA or not _is_text(spec.name):
        return f"safetensors cannot name a tensor {spec.name!r}"
    return _refuses_size(spec, row)


def _refuses_size(spec: TensorSpec, row: DType) -> str | None:
    if len(spec.parts) != 1 or spec.parts[0].role != "data" or spec.parts[0].encoding != "raw":
        return "safetensors holds one uncompressed part 'data' per tensor"
    bits = spec.size * row.bits
    if bits % 8:
        return f"{spec.size} elements of {row.bits} bits are no whole number of bytes"
    if spec.parts[0].length != bits // 8:
        return f"expected {bits // 8} bytes for shape {list(spec.shape)} in {spec.dtype}, found {spec.parts[0].length}"
    return None


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata if it is strings to strings.

    Raises ``UnsupportedError`` ``safetensors.metadata``.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or not _is_text(key) or not _is_text(value):
            raise UnsupportedError(
                f"safetensors metadata maps strings to strings; {str(key)[:80]!r} is {type(value).__name__}",
                rule="safetensors.metadata",
            )
    return dict(metadata)


def file_metadata(
    specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digests: Mapping[str, str]
) -> dict[str, str]:
    """Return what stands under ``__metadata__``: the metadata as it is, or that of a sparse patch; errors as there."""
    text = checked_metadata(metadata)
    return written_metadata(specs, text, digests) if is_patch(specs, text) else text


def is_patch(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> bool:
    """Whether a file of these tensors is a sparse patch, the only one that has digests."""
    return KEY in metadata and (not specs or any(spec.codec == CODEC for spec in specs))


def stand_ins(specs: Sequence[TensorSpec], digest: str | None, carrier: Carrier) -> dict[str, str]:
    """Return texts as long as the digests of a patch's entries; none where none are wanted."""
    if digest is None:
        return {}
    return {piece.key: manifest_digest.stand_in(ALGORITHM) for spec in specs for piece in carrier.pieces(spec)}


class Shard:
    """One file: its header, the place of each entry, and whether it is complete."""

    def __init__(self, name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str], carrier: Carrier) -> None:
        self.name = name
        self._kinds: list[tuple[str, tuple[int, ...]]] = []
        self._number, self._begin, self._at = array("I"), array("q"), dict[str, int]()
        self._lay(specs, carrier)
        self.head = self._encoded(metadata)
        self.size = len(self.head) + self._begin[-1]
        self.missing = len(specs)
        self.sink: Sink | None = None

    def _lay(self, specs: Sequence[TensorSpec], carrier: Carrier) -> None:
        """Give every entry its place. There are many: what they share is kept once, and numbers in arrays."""
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        found: dict[int, list[tuple[str, int]]] = {}
        sizes: list[int] = []
        for spec in specs:
            for piece in carrier.pieces(spec):
                kind = piece.dtype, piece.shape
                number = known.setdefault(kind, len(known))
                if number == len(sizes):
                    sizes.append(piece.nbytes)
                found.setdefault(_RANK[piece.dtype], []).append((piece.key, number))
        self._kinds = [*known]
        position = 0
        for rank in sorted(found, reverse=True):
            for key, number in sorted(found.pop(rank)):
                self._at[key] = len(self._number)
                self._number.append(number)
                self._begin.append(position)
                position += sizes[number]
        self._begin.append(position)
        if len(self._at) != len(self._number):
            raise UsageError("expected each key once", rule="writer.duplicate", where=self.name)

    def place(self, key: str) -> int:
        """Return where the bytes of an entry begin in the file."""
        return len(self.head) + self._begin[self._at[key]]

    @property
    def empty(self) -> bool:
        """Whether there are no entries."""
        return not self._at

    def _entry(self, at: int) -> Entry:
        dtype, shape = self._kinds[self._number[at]]
        return Entry(DTYPES[dtype].safetensors or "", shape, (self._begin[at], self._begin[at + 1]))

    def _encoded(self, metadata: Mapping[str, str]) -> bytearray:
        head = encode(Rows(self._at, self._entry), metadata)
        if metadata.get(manifest_digest.KEY) == manifest_digest.stand_in(ALGORITHM):
            head = head[:PREFIX] + manifest_digest.fill_json(bytes(head[PREFIX:]), ALGORITHM)
        if len(head) - PREFIX > MAX_HEADER:
            raise UnsupportedError(
                f"the header would pass {MAX_HEADER} bytes: write smaller shards",
                rule="safetensors.header-length",
                where=self.name,
            )
        return head

    def amend(self, metadata: Mapping[str, str]) -> None:
        """Replace the metadata, which must take as many bytes as before."""
        head = self._encoded(metadata)
        if len(head) != len(self.head):
            raise UsageError(
                f"expected a header of {len(self.head)} bytes as before, found {len(head)}",
                rule="writer.metadata",
                where=self.name,
            )
        self.head = head

    def open(self, target: Target) -> Sink:
        """Return the file's sink, created when it is first needed."""
        if self.sink is None:
            self.sink = target.create(self.name)
        return self.sink

    def complete(self, target: Target) -> None:
        """Write the header, give the file its exact length and close it."""
        sink = self.open(target)
        sink.write_at(0, self.head)
        sink.truncate(self.size)
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.close()


class SafetensorsWriter(FormatWriter):
    """A writer of what ``carrier`` carries, one file or shards with an index.

    A shard is complete with its last tensor; headers of sparse patches are written at the end, since they tell what
    base and result are.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        artifact: Artifact,
        options: WriteOptions,
        carrier: Carrier,
    ) -> None:
        specs, metadata = artifact.tensors, artifact.metadata
        self._target, self._name, self._specs, self._carrier = target, name, specs, carrier
        self._shards = layout(name, artifact, options, carrier)
        members = split(specs, options.max_shard, carrier)
        self._index, self._of = b"", dict[str, Shard]()
        if len(members) > 1:
            self._index = encode_index(members, [shard.name for shard in self._shards], carrier)
            self._of = {spec.name: shard for shard, held in zip(self._shards, members, strict=True) for spec in held}
        self._late = KEY in metadata
        self._metadata = dict(metadata)
        self._found: dict[str, str] | None = {} if is_patch(specs, metadata) and options.digest else None
        self._order = Order(specs)
        self._pieces: dict[str, Piece] = {}
        self._digests: dict[str, checksums.Hasher] = {}

    def _shard(self, name: str) -> Shard:
        """Return the file that a tensor of the specs lies in."""
        return self._of[name] if self._of else self._shards[0]

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs; its file is created now if it is the first there."""
        self._order.begin(spec)
        shard = self._shard(spec.name)
        sink = shard.open(self._target)
        self._pieces = {piece.role: piece for piece in self._carrier.pieces(spec)}
        self._digests = {role: checksums.hasher("crc32c") for role in self._pieces}
        for role, piece in self._pieces.items():
            if piece.content is not None:
                content = piece.content()
                sink.write_at(shard.place(piece.key), content)
                self._digests[role].update(content)

    def write(self, role: str, data: Buffer) -> None:
        """Append to one part's bytes; more than its entry has are refused."""
        size = memoryview(data).nbytes
        position = self._order.write(role, size)
        assert self._order.current is not None
        shard, piece = self._shard(self._order.current.name), self._pieces[role]
        shard.open(self._target).write_at(shard.place(piece.key) + position, data)
        self._digests[role].update(memoryview(data).cast("B") if size else b"")

    def end(self) -> dict[str, Any]:
        """Close the tensor; the record tells each part's file, offset, length and CRC-32C."""
        spec = self._order.end()
        shard = self._shard(spec.name)
        blobs = [
            [shard.name, shard.place(piece.key), piece.nbytes, self._digests[role].text()]
            for role, piece in self._pieces.items()
        ]
        self._note(self._pieces.values(), blobs)
        self._done(shard)
        return {"name": spec.name, "blobs": blobs}

    def _note(self, entries: Iterable[Piece], blobs: Sequence[Sequence[Any]]) -> None:
        """Keep the digests of a patch's entries for its header."""
        if self._found is not None:
            self._found.update((piece.key, blob[3]) for piece, blob in zip(entries, blobs, strict=True))

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take back a tensor that an earlier run wrote with the same specs and options."""
        spec = self._order.expect(record["name"])
        shard = self._shard(spec.name)
        blobs = [list(blob)[:2] for blob in record["blobs"]]
        if blobs != [[shard.name, shard.place(piece.key)] for piece in self._carrier.pieces(spec)]:
            raise IntegrityError(
                "writer.record", "the earlier run laid the file out differently: start anew", where=record["name"]
            )
        self._note(self._carrier.pieces(spec), record["blobs"])
        self._order.restored(spec.name)
        self._done(shard)

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata of a delta, which must take as many bytes as before: tensors have their places."""
        if not self._late:
            raise UsageError("expected a delta: other metadata is written early", rule="writer.metadata")
        self._metadata = dict(metadata)
        self._amend({} if self._found is None else stand_ins(self._specs, ALGORITHM, self._carrier))

    def _amend(self, digests: Mapping[str, str]) -> None:
        text = file_metadata(self._specs, self._metadata, digests)
        for shard in self._shards:
            shard.amend(text)

    def file_of(self, name: str) -> str | None:
        """Return the file that a tensor of the specs lies in; None of a delta, whose headers come last."""
        return None if self._late else self._shard(name).name

    def skip(self, name: str) -> None:
        """Pass over a tensor that another process writes."""
        self._order.restored(name)

    def locate(self, name: str) -> list[Place]:
        """Return where the parts of the next tensor lie."""
        shard = self._shard(name)
        pieces = self._carrier.pieces(self._order.expect(name))
        return [(shard.name, shard.place(piece.key), piece.nbytes) for piece in pieces]

    def record_of(self, name: str, places: Sequence[Place], read: Read) -> dict[str, Any]:
        """As ``Skips.record_of``."""
        return crc_record(name, places, read)

    def finish(self) -> list[str]:
        """Complete all files, write the index if there are shards; return the names."""
        self._order.finish()
        if self._found is not None:
            self._amend(self._found)
        for shard in self._shards:
            if self._late or shard.empty:  # the others were completed with their last tensor
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
        """Close all files as they are."""
        for shard in self._shards:
            shard.close()

    def _done(self, shard: Shard) -> None:
        shard.missing -= 1
        if shard.missing == 0 and not self._late:
            shard.complete(self._target)


def layout(name: str, artifact: Artifact, options: WriteOptions, carrier: Carrier) -> list[Shard]:
    """Place every tensor of every file.

    Raises ``UnsupportedError`` for a tensor that ``carrier`` refuses, ``UsageError`` for a repeated name.
    """
    specs, metadata = artifact.tensors, artifact.metadata
    Order(specs)
    for spec in specs:
        reason = carrier.refuses(spec)
        if reason is not None:
            raise UnsupportedError(reason, rule="safetensors.unsupported", where=spec.name)
    digests = stand_ins(specs, options.digest, carrier) if is_patch(specs, metadata) else {}
    text = file_metadata(specs, metadata, digests)
    shards = split(specs, options.max_shard, carrier)
    files = zip(shard_names(name, len(shards)), shards, strict=True)
    return [Shard(file, members, text, carrier) for file, members in files]


def files_size(name: str, artifact: Artifact, options: WriteOptions, carrier: Carrier) -> int:
    """Return the exact bytes of all files, index included; errors as ``layout``."""
    shards = layout(name, artifact, options, carrier)
    total = sum(shard.size for shard in shards)
    if len(shards) > 1:
        members = split(artifact.tensors, options.max_shard, carrier)
        total += len(encode_index(members, [shard.name for shard in shards], carrier))
    return total


def _is_text(text: str) -> bool:
    """Whether ``text`` has a UTF-8 form: a lone surrogate has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
