"""Entries of manifests that are kept as they will be written: the same bytes as of all of them at once."""

from __future__ import annotations

import random

import msgspec
import pytest

from ingot.core.parsing import cbor
from ingot.ext.squizd.directory import Directory, EncodedEntries, Entry, build
from ingot.ext.squizd.directory import parse as parse_directory
from ingot.formats.zt2.blobs import Blobs
from ingot.formats.zt2.manifest import Entries

NAMES = ("b", "a", "aa", "é", "z" * 23, "z" * 24, "ß" * 12, "\U0001f600", "￿x", "a" * 300)


@pytest.mark.parametrize("count", [0, 1, 23, 24, 255, 256, 5000])
@pytest.mark.parametrize(("metadata", "shards"), [({}, {}), ({"k": [1]}, {}), ({"k": "v"}, {"1": {"size": 3}})])
def test_a_manifest_is_that_of_all_entries_in_order(count, metadata, shards):
    names = [*NAMES, *(f"t{number}" for number in range(count))][:count]
    random.Random(1).shuffle(names)
    said = {name: {"shape": [number], "layout": "dense", "parts": {}} for number, name in enumerate(names)}
    entries, others = Entries(), Entries()
    for number, (name, entry) in enumerate(said.items()):
        (entries if number % 3 else others).add(name, entry)
    entries.update(others)
    found = b"".join(entries.manifest(metadata, shards))
    more = {key: value for key, value in (("attributes", metadata), ("shards", shards)) if value}
    assert found == cbor.dumps({"objects": said, **more}, sort=True)


@pytest.mark.parametrize("digest", [None, "crc32c"])
@pytest.mark.parametrize("count", [0, 3, 24, 300])
def test_a_directory_is_that_of_all_entries_with_their_masks(count, digest):
    said = {f"t{number}": Entry((number,), "f32", "dense", 0, number) for number in range(count)}
    written = EncodedEntries()
    for number, (name, entry) in enumerate(said.items()):
        written.add(name, entry, late=number % 5 == 2)
    for number, name in enumerate(said):
        if number % 5 == 2:
            written.mask(name, (number, 7))
            said[name] = msgspec.structs.replace(said[name], mask=(number, 7))
    data = b"".join(build(Directory(1, {}, {"k": "v"}), written, digest, b"head"))
    assert int.from_bytes(data[4:12], "little") == len(data) - 12
    found = parse_directory(data[12:], "f")
    assert (dict(found.tensors), found.metadata) == (said, {"k": "v"})
    assert (found.ingot_digest is None) == (digest is None)
    if digest is None:
        assert data[12:] == cbor.dumps(msgspec.to_builtins(Directory(1, said, {"k": "v"})))


def test_blobs_of_one_length_and_checksum_are_all_told():
    blobs = Blobs()
    assert [blobs.add(5, "crc32c:0x0000000a", offset) for offset in (0, 64, 0, 128, 64)] == [1, 1, 0, 1, 0]
    assert blobs.add(6, "crc32c:0x0000000a", 0)
    assert blobs.offsets(5, "crc32c:0x0000000a") == [0, 64, 128]
    assert blobs.offsets(5, "crc32c:0x0000000b") == []
