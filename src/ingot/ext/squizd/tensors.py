"""Build tensors from weight blocks and directory entries, after checks that they agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import ChunkDigests, read_chunks
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squizd.blocks import Block
from ingot.ext.squizd.carry import StorageForm, storage_form
from ingot.ext.squizd.directory import Entry
from ingot.ext.squizd.layout import SCALE_ENTRY, SUB_BLOCK_BIT, tensor_id
from ingot.ext.squizd.scales import EntrySource, Run
from ingot.formats.shared.dense_columns import DenseColumns, DenseTensors
from ingot.model.bytesource import ByteSource, MemorySource
from ingot.model.layouts.affine import SCALE_DTYPES, SCALES, ZEROS
from ingot.model.layouts.base import codec_of
from ingot.model.layouts.sparse import MASK, BlocksLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor with the location of its data in the file: its spec, its storage, and the offset of its block.

    ``run`` is the range of its scale entries. ``digests`` maps roles of parts to digests, and ``chunks`` maps them to
    digests of chunks. ``mask`` is the offset of the mask in the file. If the bits in the file have another order or
    meaning, ``mask`` is None and ``mask_bytes`` is the mask.
    """

    spec: TensorSpec
    storage: StorageForm
    offset: int
    run: Run | None = None
    mask: int | None = None
    digests: Mapping[str, str] | None = None
    chunks: Mapping[str, ChunkDigests | None] = field(default_factory=dict)
    mask_bytes: bytes | None = None


def from_entry(name: str, entry: Entry, block: Block, location: str) -> Located:
    """Return the tensor of a directory entry and the block that it refers to.

    Raises ``FormatError`` ``squizd.directory-conflict`` if they contradict each other.
    """
    codec = codec_of(entry.codec)
    spec = TensorSpec(name, entry.shape, entry.dtype, codec, tuple(_parts(entry, block)), entry.params)
    try:
        storage = storage_form(spec)
    except (UnsupportedError, TypeError, ValueError, KeyError) as error:
        raise FormatError("squizd.directory-conflict", f"the directory does not fit: {error}", where=location) from None
    if storage.block.header != block.header:
        raise FormatError(
            "squizd.directory-conflict",
            f"expected a {storage.block.magic.decode()} block of shape {list(storage.block.shape)} "
            f"{dict(storage.block.properties)}, "
            f"found {block.magic.decode()} of shape {list(block.shape)} {dict(block.properties)}",
            where=location,
        )
    counts = (entry.first[1] if entry.first else 0, entry.second[1] if entry.second else None)
    if counts != (storage.first, storage.second):
        raise FormatError(
            "squizd.directory-conflict",
            f"expected {storage.first} and {storage.second or 0} scale entries, found {counts[0]} and {counts[1] or 0}",
            where=location,
        )
    if entry.mask is not None and codec != BlocksLayout.codec:
        raise FormatError(
            "squizd.directory-conflict", f"expected no mask with codec {entry.codec[:80]}", where=location
        )
    for role, text in entry.digests.items():
        if all(role != part.role for part in spec.parts):
            raise FormatError("squizd.directory-conflict", f"expected no digest of part {role!r}", where=location)
        checksums.algorithm_of(text, "squizd.digest", location)
    chunks = _chunks_of(entry, spec, location)
    run = run_of(name, entry)
    return Located(spec, storage, entry.offset, run, entry.mask[0] if entry.mask else None, entry.digests, chunks)


def run_of(name: str, entry: Entry) -> Run | None:
    """Return the entries that contain a tensor's scales: its entries of the second round, else of the first, else
    None.
    """
    id = tensor_id(entry.layer, name)
    if entry.second is not None:
        return Run(*entry.second, id | SUB_BLOCK_BIT)
    return None if entry.first is None else Run(*entry.first, id)


def _chunks_of(entry: Entry, spec: TensorSpec, location: str) -> dict[str, ChunkDigests | None]:
    lengths = {part.role: part.length or 0 for part in spec.parts}
    if not entry.chunks.keys() <= lengths.keys():
        raise FormatError("squizd.chunk-digests", f"expected chunks of {list(lengths)}", where=location)
    return {
        role: read_chunks(declared, entry.digests.get(role), lengths[role], "squizd.chunk-digests", location)
        for role, declared in entry.chunks.items()
    }


def _parts(entry: Entry, block: Block) -> Iterator[PartSpec]:
    if codec_of(entry.codec) == BlocksLayout.codec:
        yield PartSpec(MASK, "u8", entry.mask[1] if entry.mask else 0)
    for part in block.parts:
        yield PartSpec(part.role, part.dtype, part.length, part.type)
    if entry.scales is not None:
        count = (entry.second or entry.first or (0, 0))[1]
        length = count * DTYPES[entry.scales].bits // 8 if entry.scales in SCALE_DTYPES else 0
        yield PartSpec(SCALES, entry.scales, length)
        if entry.zeros:
            yield PartSpec(ZEROS, entry.scales, length)


@runtime_checkable
class InColumns(Protocol):
    """A mapping of located tensors that stores most dense tensors as columns."""

    def dense(self) -> DenseColumns: ...


def tensors_of(source: ByteSource, located: Mapping[str, Located], *, verify: bool) -> LazyMap[Tensor]:
    """Return a tensor for each of ``located``, in file order; tensors are built on access."""

    def build(name: str) -> Tensor:
        located_tensor = located[name]
        spec = located_tensor.spec
        parts = {part.role: _part(source, located_tensor, part, verify=verify) for part in spec.parts}
        return Tensor(spec.name, spec.shape, spec.dtype, spec.codec, parts, dict(spec.params))

    dense = located.dense() if isinstance(located, InColumns) else None
    return LazyMap(located, build) if dense is None else DenseTensors(dense, source, verify=verify).lazy(located, build)


def _part(source: ByteSource, located: Located, part: PartSpec, *, verify: bool) -> Part:
    location = f"{source.name}: tensor {located.spec.name[:200]!r} part {part.role!r}"
    offset = located.mask or 0
    occupies = None
    if part.role in ("scales", "zeros"):
        assert located.run is not None
        absent = not any(spec.role == "zeros" for spec in located.spec.parts)
        source = EntrySource(source, located.run, part.role, part.dtype, absent_zeros=absent, location=location)
        offset = 0
        entries = located.storage.first + (located.storage.second or 0)
        occupies = entries * SCALE_ENTRY if part.role == "scales" else 0  # an entry contains both
    elif part.role == MASK and located.mask_bytes is not None:
        source = MemorySource(located.mask_bytes, source.name)
        occupies = part.length
    elif located.mask is None or part.role != MASK:
        starts = {block_part.role: block_part.start or 0 for block_part in located.storage.block.parts}
        offset = located.offset + starts[part.role]
    return Part(
        dtype=part.dtype,
        length=part.length or 0,
        source=source,
        offset=offset,
        type=part.type,
        digest=(located.digests or {}).get(part.role),
        chunks=located.chunks.get(part.role),
        where=location,
        verify=verify,
        occupies=occupies,
    )
