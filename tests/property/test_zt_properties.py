"""Properties of the .zt reader and writer on generated tensors and manifests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES
from ingot.errors import FormatError, IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.zt.format import ZtFormat
from ingot.formats.zt.manifest import Component, Object
from ingot.formats.zt.reader import read_catalog
from ingot.formats.zt.rules import check_blobs, check_object, is_simple_object
from ingot.formats.zt.writer import ZtWriter
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryTarget
from tests.support.zt import manifest, zt_file

NAMES = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ATTRIBUTES = st.dictionaries(st.text(max_size=6).filter(lambda key: key != "dtype"), JSON, max_size=3)
DIGESTS = st.sampled_from(["crc32c", "sha256", None])


def first_overlap(spans: Iterable[tuple[int, int, str]]) -> tuple[str, str] | None:
    """Return the labels of the first two ``(start, end, label)`` spans that share a byte, in file order; else None."""
    end, last = 0, ""
    for start, stop, label in sorted(span for span in spans if span[1] > span[0]):
        if start < end:
            return last, label
        end, last = stop, label
    return None


@st.composite
def part(draw: st.DrawFn, role: str, dtype: str, data: bytes, type_: str | None = None) -> tuple[PartSpec, bytes]:
    """A part that holds ``data``, compressed or not, its length known beforehand or not."""
    if draw(st.booleans()):
        stored = zstandard.ZstdCompressor(level=1).compress(data)
        length = draw(st.sampled_from([len(stored), None]))
        return PartSpec(role, dtype, length, type_, "zstd", len(data)), stored
    return PartSpec(role, dtype, draw(st.sampled_from([len(data), None])), type_), data


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[TensorSpec, dict[str, bytes], dict[str, bytes]]]:
    """Specs with stored and decoded bytes."""
    made = []
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        count = 1
        for size in shape:
            count *= size
        content = {"data": draw(st.binary(min_size=dtype.nbytes(count), max_size=dtype.nbytes(count)))}
        codec = draw(st.sampled_from(["dense", "my.codec-1"]))
        if codec != "dense":
            content["more"] = draw(st.binary(max_size=40))
        type_ = None if dtype.is_storage else dtype.name
        parts, stored = [], {}
        for role, data in content.items():
            of = (dtype.storage, type_) if role == "data" else ("u8", None)
            spec, stored[role] = draw(part(role, of[0], data, of[1]))
            parts.append(spec)
        attributes = draw(ATTRIBUTES)
        made.append((TensorSpec(name, shape, dtype.name, codec, tuple(parts), attributes), stored, content))
    return made


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(tensors(), ATTRIBUTES, DIGESTS, st.lists(st.integers(0, 1000), max_size=3), st.randoms())
def test_what_is_written_is_read(made: Any, metadata: Any, digest: str | None, cuts: list[int], random: Any) -> None:
    specs = [spec for spec, _, _ in made]
    assert all(ZtFormat().why_unsupported(spec) is None for spec in specs)
    target = MemoryTarget()
    with ZtWriter(target.create("f"), specs, metadata=metadata, digest=digest, name="f") as writer:
        for spec, stored, _ in made:
            writer.begin(spec)
            queue = {role: pieces(data, cuts) for role, data in stored.items()}
            while queue:
                role = random.choice(sorted(queue))
                writer.write(role, queue[role].pop(0))
                if not queue[role]:
                    del queue[role]
            writer.end()
    data = bytes(target.files["f"])
    catalog = read_catalog(MemorySource(data, "f"))
    assert list(catalog.tensors) == [spec.name for spec in specs]
    assert catalog.metadata == metadata
    for spec, stored, content in made:
        tensor = catalog.tensors[spec.name]
        assert (tensor.shape, tensor.dtype, tensor.codec) == (spec.shape, spec.dtype, spec.codec)
        assert {key: value for key, value in tensor.params.items() if key != "dtype"} == spec.params
        assert list(tensor.parts) == [part.role for part in spec.parts]
        for role, part in tensor.parts.items():
            assert bytes(part.stored()) == stored[role]
            assert bytes(part.view()) == content[role]
    spans = [(p.offset, p.offset + p.length, "") for t in catalog.tensors.values() for p in t.parts.values()]
    assert first_overlap(spans) is None
    if all(part.length is not None for spec in specs for part in spec.parts):
        assert ZtFormat().size(Artifact(specs, metadata), WriteOptions(digest=digest)) == len(data)


LENGTHS = st.sampled_from([0, 1, 4, 8, 16, 17, 24, 48, 64, 2**40, 2**63 - 1])


@st.composite
def components(draw: st.DrawFn) -> Component:
    return Component(
        dtype=draw(st.sampled_from(["f32", "u8", "u64", "f9"])),
        offset=draw(st.sampled_from([0, 64, 128, 192, 65, 2**62])),
        length=draw(LENGTHS),
        type=draw(st.sampled_from([None, None, "f32", "f8_e5m2", "complex64", "f4_e2m1fn", "posit8"])),
        uncompressed_length=draw(st.sampled_from([None, None, 16, 8, 0, 2**60])),
        encoding=draw(st.sampled_from(["raw", "raw", "zstd", "lz4"])),
        digest=draw(st.sampled_from([None, "crc32c:0x00000000", "crc32c:0", "md5:1", "sha256:00", "x"])),
    )


ROLES = {
    "dense": ["data"],
    "sparse_csr": ["values", "indices", "indptr"],
    "sparse_coo": ["values", "coords"],
    "quantized_group": ["packed_weight", "scales"],
    "other": ["data"],
}


@st.composite
def objects(draw: st.DrawFn) -> Object:
    codec = draw(st.sampled_from(sorted(ROLES)))
    roles = [role for role in ROLES[codec] if draw(st.integers(0, 9))] + draw(st.sampled_from([[], [], ["extra"]]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 2**32, 2**62]), max_size=3)))
    return Object(shape, codec, {role: draw(components()) for role in roles})


@given(objects())
def test_the_fast_path_takes_only_what_the_rules_take(obj: Object) -> None:
    if is_simple_object(obj):
        check_object("f", "t", obj)


@given(st.integers(0, 8), st.sampled_from(["f32", "u8", "f64"]))
def test_the_fast_path_takes_the_usual_tensor(count: int, dtype: str) -> None:
    about = Object((count,), "dense", {"data": Component(dtype, 64, count * STORAGE_DTYPES[dtype].bits // 8)})
    assert is_simple_object(about) == (count > 0)


@given(objects())
def test_rules_refuse_and_never_crash(obj: Object) -> None:
    refused: str | None = None
    try:
        check_object("f", "t", obj)
    except FormatError as error:
        refused = error.rule
    if refused is None:
        assert set(ROLES[obj.format]) <= set(obj.components) or obj.format == "other"
        assert all(part.dtype in STORAGE_DTYPES for part in obj.components.values())
    else:
        assert refused.startswith("zt.")


@given(st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 300)), max_size=8), st.integers(8, 900))
def test_places_are_refused_exactly_where_a_plain_loop_would(spans: list[tuple[int, int]], end: int) -> None:
    """Several components may share one blob, as a whole."""
    blobs = [(max(block * 64, 0) + (block < 0), length) for block, length in spans]
    found = {str(i): Object((), "x", {"p": Component("u8", *blob)}) for i, blob in enumerate(blobs)}
    fine = all(offset % 64 == 0 and offset > 0 and offset + length <= end for offset, length in blobs)
    fine = fine and first_overlap((offset, offset + length, "") for offset, length in set(blobs)) is None
    if fine:
        check_blobs("f", found, end)
    else:
        with pytest.raises(FormatError):
            check_blobs("f", found, end)


FIELDS = st.sampled_from(
    ["version", "objects", "attributes", "shape", "format", "components", "dtype", "offset", "length"]
)
ANY = st.recursive(
    JSON | st.binary(max_size=4) | st.sampled_from(["1.2.0", "dense", "f32", "raw", 64, 16, [4]]),
    lambda inner: st.dictionaries(FIELDS | st.sampled_from(["t", "data"]), inner, max_size=4),
    max_leaves=12,
)


@given(ANY)
def test_any_value_as_manifest_is_refused_or_opens(value: Any) -> None:
    try:
        catalog = read_catalog(MemorySource(zt_file(value, {64: bytes(16)}), "f"))
    except IngotError as error:
        rule = error.rule
    else:
        rule = None if len(catalog.tensors) >= 0 else "negative"
    assert rule is None or rule.startswith(("zt.", "cbor."))


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_changed_bytes_end_in_an_ingot_error_or_nothing(position: int, patch: bytes) -> None:
    good = zt_file(manifest(), {64: bytes(16)})
    data = bytearray(good)
    at = position % len(good)
    data[at : at + len(patch)] = patch
    rules = []
    try:
        for tensor in read_catalog(MemorySource(bytes(data), "f")).tensors.values():
            rules += [None for part in tensor.parts.values() if part.view() is not None]
    except IngotError as error:
        rules.append(error.rule)
    assert all(rule is None or "." in rule for rule in rules)
