"""The format ``flat``: a magic, the length of a JSON header, the header, then the tensors' bytes in its order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.bytes.checked import element_count
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, IntegrityError, UnsupportedError
from ingot.formats.base import Catalog, FormatWriter, WriteOptions
from ingot.formats.shared.order import Order
from ingot.formats.shared.single import SingleFile
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, ByteSource, Target
from ingot.model.part import Part
from ingot.model.reading.ranges import read_bytes
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor

MAGIC = b"FLAT0001"
PREFIX = len(MAGIC) + 8
MAX_HEADER = 1 << 26


class FlatFormat(SingleFile):
    """Dense tensors in one file, uncompressed."""

    name = "flat"
    suffixes: tuple[str, ...] = (".flat",)
    summary = "dense tensors one after the other under a JSON header (example plugin)"

    def claims(self, name: str, head: bytes) -> bool:
        return head.startswith(MAGIC)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        if spec.codec != "dense" or any(part.encoding != "raw" for part in spec.parts):
            return f".flat stores dense tensors without compression, not codec {spec.codec}"
        return None

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        return range(len(specs))

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return PREFIX + len(encode_header(artifact)) + sum(spec.nbytes or 0 for spec in artifact.tensors)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FlatWriter:
        for spec in artifact.tensors:
            reason = self.why_unsupported(spec)
            if reason is not None:
                raise UnsupportedError(reason, rule="flat.carry", where=spec.name)
        return FlatWriter(target, name, artifact)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        header = read_header(source, name)
        offset = PREFIX + len(header)
        entries, metadata = parse_header(header, name)
        tensors = {}
        for key, (dtype, shape) in entries.items():
            row = DTYPES[dtype]
            nbytes = row.nbytes(element_count(shape, "flat.shape", f"{name}: {key}"))
            if nbytes > source.size - offset:
                raise FormatError("flat.size", f"{key!r} needs {nbytes} bytes beyond the end", where=name)
            part = Part(row.storage, nbytes, source, offset, None if row.is_storage else dtype, where=f"{name}: {key}")
            tensors[key] = Tensor(key, shape, dtype, "dense", {"data": part})
            offset += nbytes
        if offset != source.size:
            raise FormatError("flat.size", f"the header describes {offset} of {source.size} bytes", where=name)
        return Catalog(tensors, metadata, headers={name: header}, sources=(source,))


def encode_header(artifact: Artifact) -> bytes:
    """Return the JSON header: metadata, and dtype and shape by tensor name."""
    tensors = {spec.name: [spec.dtype, list(spec.shape)] for spec in artifact.tensors}
    return json.dumps({"metadata": dict(artifact.metadata), "tensors": tensors}).encode()


def read_header(source: ByteSource, name: str) -> bytes:
    """Return the bytes of the header; raise ``FormatError`` if the file is too short for it."""
    prefix = read_bytes(source, 0, min(PREFIX, source.size))
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if len(prefix) < PREFIX or not prefix.startswith(MAGIC) or length > min(MAX_HEADER, source.size - PREFIX):
        raise FormatError("flat.header", "the file is too short for its header; copy it again", where=name)
    return read_bytes(source, PREFIX, length)


def parse_header(header: bytes, name: str) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, Any]]:
    """Return dtype and shape by tensor name, and the metadata; raise ``FormatError`` for another structure."""
    root = strict_json(header, "flat.header", "flat.header", name)
    tensors, metadata = root.get("tensors"), root.get("metadata")
    if not isinstance(tensors, dict) or not isinstance(metadata, dict):
        raise FormatError("flat.header", "the header lacks tensors or metadata", where=name)
    entries = {}
    for key, value in tensors.items():
        match value:
            case [str(dtype), list(shape)] if dtype in DTYPES and all(type(n) is int and n >= 0 for n in shape):
                entries[key] = (dtype, tuple(shape))
            case _:
                raise FormatError("flat.header", f"{key!r} has no known dtype and shape", where=name)
    return entries, metadata


class FlatWriter(FormatWriter):
    """Writes tensors in the order of their specs."""

    def __init__(self, target: Target, name: str, artifact: Artifact) -> None:
        self._name, self._order = name, Order(artifact.tensors, name)
        self._header = encode_header(artifact)
        self._offset = PREFIX + len(self._header)
        self._crc = checksums.hasher("crc32c")
        self._sink = target.create(name)

    def begin(self, spec: TensorSpec) -> None:
        self._order.begin(spec)
        self._crc = checksums.hasher("crc32c")

    def write(self, role: str, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        position = self._order.write(role, view.nbytes)
        if view.nbytes:
            self._sink.write_at(self._offset + position, view)
            self._crc.update(view)

    def end(self) -> dict[str, Any]:
        spec = self._order.end()
        blob = [self._name, self._offset, spec.nbytes, self._crc.text()]
        self._offset += spec.nbytes or 0
        return {"name": spec.name, "blobs": [blob]}

    def restore(self, record: Mapping[str, Any]) -> None:
        spec = self._order.expect(record["name"])
        if [list(blob)[:3] for blob in record["blobs"]] != [[self._name, self._offset, spec.nbytes]]:
            raise IntegrityError("writer.record", "an earlier run wrote another layout: start again", where=spec.name)
        self._order.restored(spec.name)
        self._offset += spec.nbytes or 0

    def finish(self) -> list[str]:
        self._order.finish()
        self._sink.write_at(0, MAGIC + len(self._header).to_bytes(8, "little") + self._header)
        self._sink.truncate(self._offset)
        self._sink.close()
        return [self._name]

    def abort(self) -> None:
        self._sink.close()
