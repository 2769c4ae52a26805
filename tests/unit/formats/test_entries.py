"""Entries of manifests that are kept as they will be written: the same bytes as of all of them at once."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from ingot.core import cbor, checksums
from ingot.engine.resources import _RESERVE_PER_TENSOR
from ingot.formats.many import Compact
from ingot.formats.squizd.carry import form_of
from ingot.formats.squizd.directory import Directory, Entry, Written, build, encoded
from ingot.formats.squizd.directory import parse as parse_directory
from ingot.formats.squizd.place import Placed as SquizdPlaced
from ingot.formats.squizd.place import Tables
from ingot.formats.squizd.templates import entry_of
from ingot.formats.squizd.templates import template as squizd_template
from ingot.formats.table import FORMATS
from ingot.formats.zt2.blobs import Blobs
from ingot.formats.zt2.kinds import template as zt2_template
from ingot.formats.zt2.manifest import Entries
from ingot.formats.zt2.specs import Placed, describe, written_as
from ingot.model.spec import PartSpec, TensorSpec

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
    written = Written()
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


SHAPES = [(7,), (16, 16), (), (1, 300, 2)]


@pytest.mark.parametrize("algorithm", [None, "xxh3", "sha256"])
@pytest.mark.parametrize("shard", [None, "00012"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_entry_of_container_2_made_of_a_template_is_the_described_one(shape, shard, algorithm):
    spec = TensorSpec("t", shape, "f16", "dense", (PartSpec("data", "f16", 2 * math.prod(shape)),))
    form = zt2_template(spec, algorithm, shard)
    assert form is not None
    for name in NAMES:
        for offset in (0, 1 << 16, 1 << 32):
            text = algorithm and checksums.digest(algorithm, name.encode())
            place = {"data": Placed(offset, 2 * math.prod(shape), text, shard)}
            whole = cbor.dumps([{name: describe(spec.named(name), written_as(spec), place)}], sort=True)[2:]
            assert form.entry(name, (offset,), text) == whole


def test_there_is_no_template_for_what_is_not_a_plain_dense_tensor():
    parts = (PartSpec("data", "f16", 8),)
    assert zt2_template(TensorSpec("t", (3,), "f16", "dense", parts), "xxh3", None) is None
    assert zt2_template(TensorSpec("t", (0,), "f16", "dense", (PartSpec("data", "f16", 0),)), "xxh3", None) is None
    assert zt2_template(TensorSpec("t", (4,), "f16", "dense", parts, {"k": 1}), "xxh3", None) is None


@pytest.mark.parametrize("algorithm", [None, "crc32c", "sha256"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_entry_of_a_directory_made_of_a_template_is_the_described_one(shape, algorithm):
    spec = TensorSpec("t", shape, "f16", "dense", (PartSpec("data", "f16", 2 * math.prod(shape)),))
    form = form_of(spec)
    made = squizd_template(spec, form, algorithm)
    for name in NAMES:
        for layer, offset in ((0, 0), (23, 64), (65534, 1 << 33)):
            text = algorithm and checksums.digest(algorithm, name.encode())
            digests = {} if text is None else {"data": text}
            whole = entry_of(SquizdPlaced(spec, form, layer), offset, Tables(), 0, digests, {})
            assert made.entry(name, (layer, offset), text) == cbor.dumps(name) + encoded(whole)


def test_blobs_of_one_length_and_checksum_are_all_told():
    blobs = Blobs()
    assert [blobs.add(5, "crc32c:0x0000000a", offset) for offset in (0, 64, 0, 128, 64)] == [1, 1, 0, 1, 0]
    assert blobs.add(6, "crc32c:0x0000000a", 0)
    assert blobs.at(5, "crc32c:0x0000000a") == [0, 64, 128]
    assert blobs.at(5, "crc32c:0x0000000b") == []


@pytest.mark.parametrize("name", ["zt", "zt2", "safetensors", "squizd", "wdelta"])
def test_writers_that_keep_little_say_so(name):
    format = FORMATS[name]
    assert isinstance(format, Compact)
    assert format.per_tensor < _RESERVE_PER_TENSOR
