"""Write a Squish directory: a file per array, then the manifest, ``ingot.json`` and the sentinels."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import DTYPES, from_file
from ingot.core.numeric.exact_cast import narrow
from ingot.errors import IntegrityError, UnsupportedError, UsageError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.array_file import ArrayFile
from ingot.ext.squish.npydir.carry import ArraySpec, arrays_of
from ingot.ext.squish.npydir.names import (
    INT4_READY,
    MANIFEST,
    READY,
    SIDECAR,
    encode_manifest,
    file_of,
    require_distinct,
    safe_key,
)
from ingot.ext.squish.npydir.sidecar import Entry, Sidecar
from ingot.ext.squish.npydir.sidecar import encode as encode_sidecar
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.formats.shared.order import Order
from ingot.model.bytesource import Buffer, Target
from ingot.model.spec import TensorSpec

_INT4 = ("q4", "q4a")


class _ValueHasher:
    """Computes the digest of a tensor's values in its element type, while they are written in a wider type."""

    def __init__(self, digest: str, stored: str, dtype: str) -> None:
        self._hasher = checksums.hasher(digest)
        self._stored = stored
        self._dtype = dtype
        self._pending = b""

    def update(self, data: Buffer, /) -> None:
        if self._stored == self._dtype:
            self._hasher.update(data)
            return
        pending = self._pending + bytes(data)
        end = len(pending) - len(pending) % (DTYPES[self._stored].bits // 8)
        self._pending = pending[end:]
        values = narrow(from_file(np.frombuffer(pending[:end], np.uint8), self._stored), self._dtype)
        if values is None:
            raise UsageError(f"expected values that {self._dtype} can represent, found others", rule="npydir.narrowed")
        self._hasher.update(values.view(np.uint8).data)

    def text(self) -> str:
        return self._hasher.text()


@dataclass(slots=True)
class _Array:
    """An array file that is being written, and the hasher of its values for ``ingot.json`` (None without digests)."""

    file: ArrayFile
    digest: _ValueHasher | None

    def write(self, data: Buffer) -> None:
        self.file.write(data)
        if self.digest is not None and memoryview(data).nbytes:
            self.digest.update(memoryview(data).cast("B"))


class NpydirWriter(FormatWriter):
    """Writer of a Squish directory: its arrays, manifest, ``ingot.json`` and sentinels."""

    writes_shapes = True
    """Whether the original shape of a quantized tensor is stored in an array."""

    def __init__(
        self, target: Target, specs: Sequence[TensorSpec], metadata: Mapping[str, Any], options: WriteOptions
    ) -> None:
        self._target = target
        self._metadata = dict(metadata)
        self._digest = options.digest
        self._arrays = arrays_by_tensor(specs)
        self._order = Order(specs)
        self._dtypes = {spec.name: spec.dtype for spec in specs}
        self._shapes = {spec.name: spec.shape for spec in specs}
        self._entries: dict[str, Entry] = {}
        self._open: dict[str, _Array] = {}
        self._files: list[str] = []

    def _key(self, name: str) -> str:
        """Return the safe key that the tensor's files are named after."""
        return safe_key(name)

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs; create its files."""
        self._order.begin(spec)
        key = self._key(spec.name)
        dtype = self._dtypes[spec.name]
        for array in self._arrays[spec.name]:
            path = file_of(key, array.suffix)
            file = ArrayFile(self._target.create(path), path, array.dtype, array.shape)
            value_dtype = dtype if array.role == "data" else array.dtype
            self._open[array.role] = _Array(
                file, _ValueHasher(self._digest, array.dtype, value_dtype) if self._digest else None
            )

    def write(self, role: str, data: Buffer) -> None:
        """Append bytes to the array of the part ``role``."""
        self._order.write(role, memoryview(data).nbytes)
        self._open[role].write(data)

    def end(self) -> dict[str, Any]:
        """Close the tensor; return its record: ``name``, ``blobs`` in the order of the parts, and ``digests`` of the
        values."""
        name = self._order.end().name
        blobs = [opened.file.close() for opened in self._open.values()]
        texts = [opened.digest.text() if opened.digest else None for opened in self._open.values()]
        digests = {array.suffix: text for array, text in zip(self._arrays[name], texts, strict=True)}
        self._open = {}
        self._accept(name, digests)
        return {"name": name, "blobs": blobs, "digests": digests}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote with the same specs and options.

        Raises ``IntegrityError`` ``writer.record`` if the record does not match the specs.
        """
        name = self._order.expect(record["name"]).name
        key = self._key(name)
        expected = [
            [file_of(key, array.suffix), len(npy.encode(array.dtype, array.shape))] for array in self._arrays[name]
        ]
        if [list(blob)[:2] for blob in record["blobs"]] != expected or "digests" not in record:
            raise IntegrityError(
                "writer.record", "the earlier run wrote the files with a different layout: start again", where=name
            )
        self._order.restored(name)
        self._accept(name, dict(record["digests"]))

    def finish(self) -> list[str]:
        """Write the manifest, ``ingot.json`` and the sentinels, in this order; return all file names in the order of
        writing."""
        self._order.finish()
        manifest = encode_manifest(list(self._arrays))
        self._write_file(MANIFEST, manifest)
        self._write_file(SIDECAR, encode_sidecar(Sidecar(self._metadata, self._entries), manifest, self._digest))
        for name in sentinels(self._arrays):
            self._write_file(name, b"")
        return self._files

    def abort(self) -> None:
        """Close all open files without completing them."""
        for opened in self._open.values():
            opened.file.abort()
        self._open = {}

    def _accept(self, name: str, digests: dict[str, str | None]) -> None:
        key = self._key(name)
        self._files += [file_of(key, array.suffix) for array in self._arrays[name]]
        heads = _heads(self._arrays[name], self._digest)
        if self.writes_shapes and is_quantized(self._arrays[name]):
            shape = self._shapes[name]
            self._write_file(file_of(key, "shape"), shape_file(shape))
            digests = {**digests, "shape": shape_digest(shape, self._digest)}
            heads.update(_shape_head(shape, self._digest))
        self._entries[name] = Entry(self._dtypes[name], digests, heads)

    def _write_file(self, name: str, data: bytes) -> None:
        sink = self._target.create(name)
        sink.write_at(0, data)
        sink.truncate(len(data))
        sink.close()
        self._files.append(name)


def arrays_by_tensor(specs: Sequence[TensorSpec]) -> dict[str, tuple[ArraySpec, ...]]:
    """Return the arrays to write, by tensor name.

    Raises ``UnsupportedError`` ``npydir.carry`` or ``npydir.collision``; ``UsageError`` for a repeated name.
    """
    if len({spec.name for spec in specs}) != len(specs):
        raise UsageError("expected each tensor name once", rule="writer.duplicate")
    arrays = {}
    for spec in specs:
        try:
            arrays[spec.name] = arrays_of(spec)
        except UnsupportedError as error:
            raise error.add_location(spec.name) from None
    require_distinct(arrays)
    return arrays


def is_quantized(arrays: Sequence[ArraySpec]) -> bool:
    """Return whether the tensor is quantized, so that its original shape is stored in an array."""
    return arrays[0].role == "packed_weight"


def shape_values(shape: Sequence[int]) -> bytes:
    """Return the values of the array that stores a tensor's shape: little-endian 64-bit integers."""
    return struct.pack(f"<{len(shape)}q", *shape)


def shape_file(shape: Sequence[int]) -> bytes:
    """Return the bytes of the ``.npy`` file that stores a tensor's shape."""
    return npy.encode("i64", (len(shape),)) + shape_values(shape)


def shape_digest(shape: Sequence[int], digest: str | None) -> str | None:
    """Return the digest, of the algorithm ``digest``, of the array that stores a shape; None if ``digest`` is None."""
    return None if digest is None else checksums.digest(digest, shape_values(shape))


def head_digest(digest: str, dtype: str, shape: Sequence[int]) -> str:
    """Return the digest, of the algorithm ``digest``, of the header of an array with this dtype and shape."""
    return checksums.digest(digest, npy.encode(dtype, shape))


def _shape_head(shape: Sequence[int], digest: str | None) -> dict[str, str]:
    """Return the entry of ``heads`` for the array that stores a tensor's shape: its suffix and the digest of its
    header.

    Empty if ``digest``, the algorithm, is None.
    """
    return {} if digest is None else {"shape": head_digest(digest, "i64", (len(shape),))}


def _heads(arrays: Sequence[ArraySpec], digest: str | None) -> dict[str, str]:
    """Return the entries of ``heads`` for a tensor's arrays: the digests of their headers by suffix.

    Empty if ``digest``, the algorithm, is None.
    """
    return {} if digest is None else {item.suffix: head_digest(digest, item.dtype, item.shape) for item in arrays}


def sentinels(arrays: Mapping[str, Sequence[ArraySpec]]) -> list[str]:
    """Return the sentinels to write.

    If every quantized tensor has a four-bit form, they include the sentinel of the four-bit forms.
    """
    quantized = [specs[0].suffix for specs in arrays.values() if is_quantized(specs)]
    complete = bool(quantized) and all(suffix in _INT4 for suffix in quantized)
    return [READY, INT4_READY] if complete else [READY]


def directory_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digest: str | None) -> int:
    """Return the exact total size of all files in bytes."""
    arrays = arrays_by_tensor(specs)
    text = None if digest is None else checksums.digest(digest, b"")
    total = 0
    entries = {}
    for spec in specs:
        array_specs = arrays[spec.name]
        digests = {array.suffix: text for array in array_specs}
        heads = _heads(array_specs, digest)
        if is_quantized(array_specs):
            digests["shape"] = text
            heads.update(_shape_head(spec.shape, digest))
            total += len(shape_file(spec.shape))
        entries[spec.name] = Entry(spec.dtype, digests, heads)
        total += sum(len(npy.encode(array.dtype, array.shape)) for array in array_specs)
        total += sum(part.at_most for part in spec.parts)
    manifest = encode_manifest(spec.name for spec in specs)
    return total + len(manifest) + len(encode_sidecar(Sidecar(metadata, entries), manifest, digest))
