"""The bytes of files before they are written, if no two parts are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.core.bytes.checksums import digest as digest_of
from ingot.core.parsing import cbor
from ingot.formats.zt2.layout import FOOTER, MAGIC, align
from ingot.formats.zt2.manifest import frame
from ingot.formats.zt2.specs import ALGORITHMS, PartLocation, canonical_parts, describe, written_form
from ingot.model.spec import PartSpec, TensorSpec


class EntriesSize(NamedTuple):
    """The number of tensor entries, and their bytes."""

    tensors: int
    nbytes: int

    def manifest(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> int:
        """Return the bytes of a manifest with these entries."""
        return self.nbytes + sum(map(len, frame(self.tensors, metadata, shards)))


class _Extent(NamedTuple):
    """The size of a tensor: bytes of its entry without name and offsets, offsets of its parts, and the end of the
    last part."""

    nbytes: int
    begins: tuple[int, ...]
    end: int


def entries_size(specs: Sequence[TensorSpec], digest: str | None, shard: str | None = None) -> tuple[EntriesSize, int]:
    """Return the size of the entries of tensors if no two parts are equal, and the end of their blobs.

    Placeholders stand for unknown digests; an unknown length counts as its maximum.
    """
    algorithm = ALGORITHMS[digest]
    placeholder = None if algorithm is None else digest_of(algorithm, b"")
    tail, nbytes = len(MAGIC), 0
    for spec in specs:
        extent = _extent(spec, placeholder, shard)
        start = align(tail)
        nbytes += extent.nbytes + _name_bytes(spec.name)
        for begin in extent.begins:
            nbytes += _number_bytes(start + begin)
            tail = start + extent.end
    return EntriesSize(len(specs), nbytes), tail


def _extent(spec: TensorSpec, digest: str | None, shard: str | None) -> _Extent:
    begins, locations, tail = [], dict[str, PartLocation](), 0
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
    """Return the encoded bytes of a name; raises the errors of ``cbor.dumps``."""
    return len(name) + _number_bytes(len(name)) if name.isascii() else len(cbor.dumps(name))


def _number_bytes(number: int) -> int:
    """Return the encoded bytes of an integer, or of the length of a text; raises the errors of ``cbor.dumps``."""
    if number < 1 << 32:
        return 1 if number < 24 else 2 if number < 1 << 8 else 3 if number < 1 << 16 else 5
    return len(cbor.dumps(number))


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digest: str | None) -> int:
    """Return the bytes of the file if no two parts are equal; an unknown length counts as its maximum."""
    entries, tail = entries_size(specs, digest)
    return align(tail) + entries.manifest(metadata, {}) + FOOTER


def blobs_end(tail: int, spec: TensorSpec) -> int:
    """Return the end of a tensor's blobs after ``tail``; an unknown length counts as its maximum."""
    parts: Sequence[PartSpec] = spec.parts if len(spec.parts) == 1 else canonical_parts(spec, written_form(spec))
    for part in parts:
        tail = align(tail) + part.at_most
    return tail
