"""Properties of Squish directories: what is written is read, and changed bytes never end in a crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.affine.codec import AffineCodec
from ingot.errors import IngotError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.format import NpydirFormat
from ingot.ext.squish.npydir.reader import read_catalog
from ingot.formats.base import WriteOptions
from ingot.formats.detect import listing
from ingot.model.artifact import Artifact
from ingot.model.spec import TensorSpec
from ingot.stores.memory import MemoryStore, MemoryTarget
from ingot.testing.formats import Item, dense, feed
from tests.support.reading import checked, read_all

FORMAT = NpydirFormat()
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=12) | st.sampled_from(
    ["a.b", "a__b", "_"]
)
DTYPES = st.sampled_from(["f64", "f32", "f16", "i64", "u8", "bool", "complex64"])
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
OPTIONS = (
    {"bits": 8, "group": "row", "scales": "f32"},
    {"bits": 8, "group": 8, "scales": "f32"},
    {"bits": 4, "group": 4, "symmetric": False, "zero_kind": "offset", "scales": "f32"},
    {"bits": 4, "group": 8, "zero_point": 7, "scales": "f32"},
    {"bits": 3, "group": 64, "cut": "flat", "symmetric": False, "scales": "f32"},
)
CORPUS = {
    folder.name: {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    for folder in sorted((Path(__file__).parent.parent / "golden" / "npydir" / "valid").iterdir())
}


@st.composite
def items(draw: st.DrawFn) -> Item:
    name = draw(NAMES)
    if draw(st.booleans()):
        return dense(name, draw(SHAPES), draw(DTYPES), draw(st.integers(0, 99)))
    options, shape = draw(st.sampled_from(OPTIONS)), (draw(st.integers(1, 3)) * 2, draw(st.integers(1, 3)) * 32)
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(0, 1, shape).astype(np.float32)
    encoder = AffineCodec().encoder(shape, "f32", options)
    parts = {role: np.ascontiguousarray(array).tobytes() for role, array in encoder.encode(values).items()}
    return Item(TensorSpec(name, shape, "f32", encoder.codec, encoder.parts, dict(encoder.params)), parts)


@settings(max_examples=60)
@given(st.lists(items(), max_size=4), st.sampled_from(["crc32c", "sha256", None]), st.integers(1, 500))
def test_what_is_written_is_read(found: list[Item], digest: str | None, step: int) -> None:
    target, specs, options = MemoryTarget(), [item.spec for item in found], WriteOptions(digest=digest)
    try:
        order = FORMAT.order(specs)
        writer = FORMAT.writer(target, "manifest.json", Artifact(specs, {"a": [1, "b"]}), options)
    except IngotError as error:
        collides = error.rule in ("npydir.collision", "writer.duplicate")
        assert collides or any(FORMAT.why_unsupported(spec) for spec in specs)
        return
    for index in order:
        feed(writer, found[index], step)
    assert sorted(writer.finish()) == sorted(target.files)
    assert FORMAT.size(Artifact(specs, {"a": [1, "b"]}), options) == sum(map(len, target.files.values()))
    store = MemoryStore(target.files)
    assert FORMAT.entry(listing(store)) == "manifest.json"
    catalog = read_catalog(store)
    assert list(catalog.tensors) == [spec.name for spec in specs]
    for item in found:
        tensor = catalog.tensors[item.spec.name]
        assert (tensor.shape, tensor.dtype, tensor.codec) == (item.spec.shape, item.spec.dtype, item.spec.codec)
        assert {role: bytes(part.stored()) for role, part in tensor.parts.items()} == item.parts
        if tensor.codec == "affine":
            AffineCodec().check(tensor)
            stated = item.spec
            again = type(tensor)(stated.name, stated.shape, stated.dtype, stated.codec, tensor.parts, stated.params)
            assert np.array_equal(AffineCodec().decode(tensor, "f32"), AffineCodec().decode(again, "f32"))


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, bytes]:
    files = dict(CORPUS[draw(st.sampled_from(sorted(CORPUS)))])
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(files)))
        data, kind = bytearray(files[name]), draw(st.sampled_from(["flip", "cut", "grow", "drop", "swap"]))
        if kind == "drop" and len(files) > 1:
            del files[name]
            continue
        if kind == "swap":
            data = bytearray(files[draw(st.sampled_from(sorted(files)))])
        elif kind == "flip" and data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        elif kind == "cut":
            data = data[: draw(st.integers(0, len(data)))]
        else:
            data += draw(st.binary(max_size=8))
        files[name] = bytes(data)
    return files


@settings(max_examples=300)
@given(mutated())
def test_changed_directories_are_read_or_refused(files: dict[str, bytes]) -> None:
    try:
        read_all(read_catalog(MemoryStore(files)))
    except IngotError as error:
        checked(error)


@settings(max_examples=200)
@given(st.binary(max_size=80) | st.text("{}'\"()[], :0123456789descrfortanshpTFl<f4", max_size=120).map(str.encode))
def test_headers_are_read_or_refused(text: bytes) -> None:
    head = npy.MAGIC + b"\1\0" + len(text).to_bytes(2, "little") + text
    try:
        assert npy.header_span(head[:12], "x") == len(head)
        npy.parse(head, "x")
    except IngotError as error:
        checked(error)


@given(DTYPES, SHAPES)
def test_headers_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    head = npy.encode(dtype, shape)
    assert npy.header_span(head[:12], "x") == len(head)
    assert npy.parse(head, "x") == npy.NpyHeader(dtype, shape, len(head))
