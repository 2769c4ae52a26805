"""The bytes of files before they are written, if no two parts are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.core import cbor
from ingot.core.checksums import digest as digest_of
from ingot.formats.zt2.layout import FOOTER, MAGIC, align
from ingot.formats.zt2.manifest import around
from ingot.formats.zt2.specs import ALGORITHMS, Placed, describe, in_order, written_as
from ingot.model.spec import PartSpec, TensorSpec


class Said(NamedTuple):
    """The entries of tensors: how many there are, and their bytes."""

    tensors: int
    nbytes: int

    def manifest(self, metadata: Mapping[str, Any], shards: Mapping[str, Any]) -> int:
        """Return the bytes of a manifest with these entries."""
        return self.nbytes + sum(map(len, around(self.tensors, metadata, shards)))


class _Extent(NamedTuple):
    """A tensor's entry without its name and its offsets; where its parts begin behind the first, and the last ends."""

    nbytes: int
    begins: tuple[int, ...]
    end: int


def stand_ins(specs: Sequence[TensorSpec], digest: str | None, shard: str | None = None) -> tuple[Said, int]:
    """Return what a manifest says of tensors if no two parts are equal, and where their blobs end.

    Digests stand in for those that are not known yet; an unknown length counts as the most that it can be.
    """
    algorithm = ALGORITHMS[digest]
    stand_in = None if algorithm is None else digest_of(algorithm, b"")
    tail, said = len(MAGIC), 0
    for spec in specs:
        extent = _extent(spec, stand_in, shard)
        start = align(tail)
        said += extent.nbytes + _name_bytes(spec.name)
        for begin in extent.begins:
            said += _number_bytes(start + begin)
            tail = start + extent.end
    return Said(len(specs), said), tail


def _extent(spec: TensorSpec, digest: str | None, shard: str | None) -> _Extent:
    begins, places, tail = [], dict[str, Placed](), 0
    written = written_as(spec)
    for part in in_order(spec, written):
        begins.append(align(tail))
        places[part.role] = Placed(0, part.at_most, digest, shard)
        tail = begins[-1] + part.at_most
    entry = cbor.dumps([{"": describe(spec, written, places)}], sort=True)[3:]  # as deep as it lies in the root
    return _Extent(len(entry) - len(begins), (*begins,), tail)


def _name_bytes(name: str) -> int:
    """Return the bytes of a name; errors as ``cbor.dumps``."""
    return len(name) + _number_bytes(len(name)) if name.isascii() else len(cbor.dumps(name))


def _number_bytes(number: int) -> int:
    """Return the bytes of a number, or those that say how long a text is; errors as ``cbor.dumps``."""
    if number < 1 << 32:
        return 1 if number < 24 else 2 if number < 1 << 8 else 3 if number < 1 << 16 else 5
    return len(cbor.dumps(number))


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, Any], digest: str | None) -> int:
    """Return the bytes of the file if no two parts were equal; an unknown length counts as the most that it can be."""
    said, tail = stand_ins(specs, digest)
    return align(tail) + said.manifest(metadata, {}) + FOOTER


def blobs_end(tail: int, spec: TensorSpec) -> int:
    """Return where a tensor's blobs end that begin behind ``tail``; an unknown length counts as the most it can be."""
    parts: Sequence[PartSpec] = spec.parts if len(spec.parts) == 1 else in_order(spec, written_as(spec))
    for part in parts:
        tail = align(tail) + part.at_most
    return tail
