"""Writer of GGUF version 3, little-endian, as one file or a split; all offsets are computed from the specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any

from ingot.core.bytes import checksums
from ingot.errors import IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.formats.by_many import BlobLocation, Read, crc_record
from ingot.formats.gguf.cursor import MAX_ELEMENTS, MAX_HEADER
from ingot.formats.gguf.header import MAGIC, NUMBERS, describe_types, type_of, why_unsupported
from ingot.formats.gguf.metadata import (
    ABOUT,
    ALIGNMENT,
    COUNT,
    DEFAULT_ALIGNMENT,
    NUMBER,
    TENSORS,
    VERSION,
    encode_metadata,
    to_gguf_metadata,
    with_values,
)
from ingot.formats.gguf.reader import MAX_SPLITS, SUFFIX
from ingot.formats.shared.order import Order
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Sink, Target
from ingot.model.spec import TensorSpec


class File:
    """One file of an artifact: its header, the offset of each tensor, and the number of unwritten tensors."""

    def __init__(self, name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> None:
        self.name = name
        self.missing = len(specs)
        self.alignment = int(metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT))
        pairs, data = encode_metadata(metadata)
        head = [MAGIC, pack("<IQQ", VERSION, len(specs), pairs), data]
        offsets = {}
        position = 0
        for spec in specs:
            text = spec.name.encode()
            sizes = spec.shape[::-1]
            head += [pack("<Q", len(text)), text, pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
            head.append(pack("<IQ", NUMBERS[type_of(spec)], position))
            offsets[spec.name] = position
            position = self.padded(position + (spec.nbytes or 0))
        header = b"".join(head)
        elements = sum(len(value) for key, value in metadata.items() if key != ABOUT and isinstance(value, list))
        if len(header) > MAX_HEADER or elements > MAX_ELEMENTS:
            raise UnsupportedError(
                f"expected a header of at most {MAX_HEADER} bytes with {MAX_ELEMENTS} elements in arrays, found "
                f"{len(header)} with {elements}",
                rule="gguf.header-length",
                where=name,
            )
        self.head = header + bytes(self.padded(len(header)) - len(header))
        self.offsets = {tensor: len(self.head) + offset for tensor, offset in offsets.items()}
        self.size = len(self.head) + position
        self._sink: Sink | None = None

    def padded(self, position: int) -> int:
        """Return the next multiple of the alignment."""
        return -(-position // self.alignment) * self.alignment

    def write(self, target: Target, offset: int, data: Buffer) -> None:
        """Write ``data`` at an offset of the file; the first call creates the file."""
        if self._sink is None:
            self._sink = target.create(self.name)
        self._sink.write_at(offset, data)

    def complete(self, target: Target) -> None:
        """Write the header, give the file its exact length and close it."""
        self.write(target, 0, self.head)
        assert self._sink is not None
        self._sink.truncate(self.size)
        self.close()

    def close(self) -> None:
        """Close the file without completing it."""
        sink = self._sink
        self._sink = None
        if sink is not None:
            sink.close()


def files_of(name: str, artifact: Artifact, options: WriteOptions) -> list[tuple[File, list[TensorSpec]]]:
    """Return the files of an artifact, each with its tensors.

    Raises
    ------
    UnsupportedError
        ``gguf.unsupported``: a tensor that cannot be stored; ``gguf.metadata``, ``gguf.header-length``.
    UsageError
        ``gguf.split``: a size limit of less than a byte, or more files than ``MAX_SPLITS``.
    """
    specs = artifact.tensors
    Order(specs)
    for spec in specs:
        reason = why_unsupported(spec)
        if reason is not None:
            raise UnsupportedError(reason, rule="gguf.unsupported", where=spec.name)
    metadata = describe_types(to_gguf_metadata(artifact.metadata), specs, options.file_type)
    members = _split(specs, options.max_shard)
    if len(members) == 1:
        return [(File(name, specs, metadata), list(specs))]
    stem = name.removesuffix(SUFFIX)
    files = []
    for index, members_of_file in enumerate(members):
        # As llama-gguf-split and the Python package gguf do, only the first file gets the metadata of the model; every
        # file gets the keys of the split.
        values = metadata if index == 0 else {key: metadata[key] for key in (ALIGNMENT, ABOUT) if key in metadata}
        about = {NUMBER: ("u16", index), COUNT: ("u16", len(members)), TENSORS: ("i32", len(specs))}
        file = f"{stem}-{index + 1:05d}-of-{len(members):05d}{SUFFIX}"
        files.append((File(file, members_of_file, with_values(values, about)), members_of_file))
    return files


def _split(specs: Sequence[TensorSpec], max_bytes: int | None) -> list[list[TensorSpec]]:
    """Cut tensors, in order, into files of at most ``max_bytes`` each; a larger tensor gets its own file."""
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"expected files of at least one byte, found {max_bytes}", rule="gguf.split")
    members: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        size = spec.nbytes or 0
        if max_bytes is not None and members[-1] and filled + size > max_bytes:
            members.append([])
            filled = 0
        members[-1].append(spec)
        filled += size
    if len(members) > MAX_SPLITS:
        raise UsageError(
            f"expected at most {MAX_SPLITS} files, found {len(members)}: allow more bytes per file", rule="gguf.split"
        )
    return members


class GgufWriter(FormatWriter):
    """A writer of GGUF files; a file is completed when its last tensor is written."""

    def __init__(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> None:
        files = files_of(name, artifact, options)
        self._target = target
        self._files = [file for file, _ in files]
        self._file_of = {spec.name: file for file, members in files for spec in members}
        self._order = Order(artifact.tensors, name)
        self._digest = checksums.hasher("crc32c")

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs."""
        self._order.begin(spec)
        self._digest = checksums.hasher("crc32c")

    def write(self, role: str, data: Buffer) -> None:
        """Append bytes to the current tensor; raises an error if they exceed its length."""
        view = memoryview(data)
        position = self._order.write(role, view.nbytes)
        assert self._order.current is not None
        if view.nbytes:
            file = self._file_of[self._order.current.name]
            name = self._order.current.name
            file.write(self._target, file.offsets[name] + position, data)
            self._digest.update(view.cast("B"))

    def end(self) -> dict[str, Any]:
        """Close the tensor, pad it, and return a record of its file, offset, length and CRC-32C."""
        spec = self._order.end()
        file = self._file_of[spec.name]
        length = spec.nbytes or 0
        end = file.offsets[spec.name] + length
        if file.padded(end) > end:  # written explicitly: a resumed file may contain other bytes there
            file.write(self._target, end, bytes(file.padded(end) - end))
        self._finish_tensor(file)
        return {"name": spec.name, "blobs": [[file.name, end - length, length, self._digest.text()]]}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote with the same specs and options."""
        spec = self._order.expect(record["name"])
        file = self._file_of[spec.name]
        if [list(blob)[:2] for blob in record["blobs"]] != [[file.name, file.offsets[spec.name]]]:
            raise IntegrityError(
                "writer.record",
                "the earlier run used other offsets in the file: start again without resuming",
                where=record["name"],
            )
        self._order.restored(spec.name)
        self._finish_tensor(file)

    def file_of(self, name: str) -> str | None:
        """Return the file that contains a tensor of the specs."""
        return self._file_of[name].name

    def skip(self, name: str) -> None:
        """Skip a tensor that another process writes."""
        self._order.restored(name)

    def locate(self, name: str) -> list[BlobLocation]:
        """Return the file, offset and length of the next tensor's bytes."""
        file = self._file_of[name]
        return [(file.name, file.offsets[name], self._order.expect(name).nbytes or 0)]

    def record_of(self, name: str, locations: Sequence[BlobLocation], read: Read) -> dict[str, Any]:
        """Return the record that ``end`` returned for a tensor; see ``Skips.record_of``."""
        return crc_record(name, locations, read)

    def finish(self) -> list[str]:
        """Complete all files and return their names."""
        self._order.finish()
        for file in self._files:
            if not file.offsets:
                file.complete(self._target)
        return [file.name for file in self._files]

    def abort(self) -> None:
        """Close all files without completing them."""
        for file in self._files:
            file.close()

    def _finish_tensor(self, file: File) -> None:
        file.missing -= 1
        if file.missing == 0:
            file.complete(self._target)
