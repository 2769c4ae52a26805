"""Write the sections after the weights: the draft head and the Core ML package (SQUIZD document, sections 7 and 9)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.core.bytes import checksums
from ingot.errors import UnsupportedError
from ingot.ext.squizd.carry import storage_form
from ingot.ext.squizd.directory import VERSION, Directory, build
from ingot.ext.squizd.layout import COREML_HEADER, COREML_MAGIC, DRAFT_HEADER, DRAFT_MAGIC, DraftMeta
from ingot.ext.squizd.placement import Placement, lay_out, order, place_tensors
from ingot.ext.squizd.section import Section, TensorWriter
from ingot.model.bytesource import Buffer, Sink
from ingot.model.draft_head_names import is_nameless
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.part import Part, StoredReader
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor
from ingot.naming.names import layer_of

_CHUNK = 4 << 20


def draft_specs(draft: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Return the specs of a draft head in file order; raises ``UnsupportedError`` for tensors that cannot be stored."""
    specs = []
    for tensor in draft.values():
        spec = tensor.spec()
        try:
            storage_form(spec)
        except UnsupportedError as error:
            raise error.add_location(f"draft head: {spec.name}") from None
        if spec.codec == BlocksLayout.codec:
            raise UnsupportedError(
                "expected a draft head without masks, found a pruned tensor; convert the head to .safetensors first",
                rule="squizd.carry",
                where=f"draft head: {spec.name}",
            )
        specs.append(spec)
    return [specs[index] for index in order(specs)]


def draft_layers(names: Sequence[str]) -> int:
    """Return the number of decoder layers of a draft head: numbered layers, or EAGLE-3's single ``midlayer``."""
    if is_nameless(names):
        return len({name.split(".")[1] for name in names})
    numbers = {layer for name in names if (layer := layer_of(name)) is not None}
    return len(numbers) or int(any(name.startswith("midlayer.") for name in names))


def draft_vocab(draft: Mapping[str, Tensor]) -> int:
    """Return the number of tokens in the draft's vocabulary: the rows of ``d2t``, else of its output head, else 0."""
    for name in ("d2t", "lm_head.weight"):
        if name in draft and draft[name].shape:
            return int(draft[name].shape[0])
    return 0


def draft_placement(draft: Mapping[str, Tensor]) -> Placement:
    """Return the placement of a draft head's tensors in its section, all in one layer."""
    specs = draft_specs(draft)
    return place_tensors(specs, [0] * len(specs), 1)


def write_draft(
    sink: Sink, draft: Mapping[str, Tensor], start: int, digest: str | None, vocab: int = 0
) -> tuple[DraftMeta, str | None]:
    """Write the section of a draft head: magic, number of layers, blocks, scale tables, and its own directory.

    Returns its metadata for the header, and the digest of its directory.
    """
    placement = draft_placement(draft)
    layers = draft_layers(list(draft))
    sink.write_at(start, DRAFT_MAGIC + struct.pack("<I", layers))
    _, end = lay_out(placement, start + DRAFT_HEADER)
    section = Section(sink, placement, start + DRAFT_HEADER, end.tail, digest)
    for placed in placement.tensors:
        writer = section.begin(placed)
        try:
            copy_parts(draft[placed.spec.name], writer)
            section.end(placed, writer)
        finally:
            section.abandon()
    tail = section.finish()
    data = b"".join(build(Directory(VERSION, {}), section.entries))
    sink.write_at(tail, data)
    meta = DraftMeta(start, tail + len(data) - start, layers, draft_vocab(draft) or vocab)
    return meta, None if digest is None else checksums.digest(digest, data)


def copy_parts(tensor: Tensor, writer: TensorWriter) -> None:
    """Copy a tensor's stored parts and check their digests."""
    buffer = np.empty(_CHUNK, np.uint8)
    for role, part in tensor.parts.items():
        reader = StoredReader(part)
        for begin in range(0, part.length, _CHUNK):
            chunk = buffer[: min(_CHUNK, part.length - begin)].data
            reader.readinto(chunk)
            writer.write(role, chunk)
        reader.finish()


def write_coreml(sink: Sink, package: Part, start: int) -> tuple[int, str]:
    """Write the zipped package at ``start``; return the end of the section and the SHA-256 of the zip."""
    sink.write_at(start, COREML_MAGIC + struct.pack("<Q", package.length))
    position = start + COREML_HEADER
    running = checksums.hasher("sha256")
    reader = StoredReader(package)
    buffer = np.empty(_CHUNK, np.uint8)
    for begin in range(0, package.length, _CHUNK):
        chunk: Buffer = buffer[: min(_CHUNK, package.length - begin)].data
        reader.readinto(memoryview(chunk))
        running.update(chunk)
        sink.write_at(position, chunk)
        position += memoryview(chunk).nbytes
    reader.finish()
    return position, running.text()
