"""The canonical form: where blobs lie, which of them are shared, what stays out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.run import prepare
from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.zt2.format import Zt2Format
from ingot.formats.zt2.layout import CANONICAL, MAGIC
from ingot.formats.zt2.profiles import written_forms
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.specs import is_simple, written_form
from ingot.formats.zt2.types import ITEM_BYTES
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import Item, feed

Parts = dict[str, bytes]


def written(tensors: dict[str, Parts], order: Callable[[list[str]], list[str]] = sorted, before: bytes = b"") -> bytes:
    """Write tensors of a codec of nobody, with these parts; ``order`` is that in which parts come.

    ``before`` are the bytes that the file has already.
    """
    target, format = MemoryTarget(), Zt2Format()
    target.files["x.zt"] = bytearray(before)
    specs = [
        TensorSpec(name, (1,), "u8", "x.own/1", tuple(PartSpec(role, "u8", len(data)) for role, data in parts.items()))
        for name, parts in sorted(tensors.items())
    ]
    writer = format.writer(target, "x.zt", Artifact(specs, {}), WriteOptions())
    for spec in specs:
        writer.begin(spec)
        for role in order(list(tensors[spec.name])):
            writer.write(role, tensors[spec.name][role])
        writer.end()
    writer.finish()
    return bytes(target.files["x.zt"])


def places(data: bytes) -> dict[str, tuple[int, int]]:
    objects = read_manifest(MemorySource(data))[1].objects
    return {f"{name}/{role}": part.blob for name, obj in objects.items() for role, part in obj.parts.items()}


def test_equal_parts_are_one_blob_and_what_follows_moves_up() -> None:
    one, other = b"1" * 70_000, b"2" * 10
    tensors = {"a": {"x": one, "y": other}, "b": {"w": other, "x": one, "z": b"3" * 100_000}, "c": {"x": other}}
    data = written(tensors)
    assert places(data) == {
        "a/x": (CANONICAL, 70_000),
        "a/y": (3 * CANONICAL, 10),
        "b/w": (3 * CANONICAL, 10),
        "b/x": (CANONICAL, 70_000),
        "b/z": (4 * CANONICAL, 100_000),
        "c/x": (3 * CANONICAL, 10),
    }
    assert data == written(tensors, lambda roles: sorted(roles, reverse=True))
    assert data[4 * CANONICAL : 4 * CANONICAL + 100_000] == b"3" * 100_000
    used = {span for start, size in places(data).values() for span in range(start, start + size)}
    gaps = bytes(data[at] for at in range(len(MAGIC), 6 * CANONICAL) if at not in used)
    assert not any(gaps)


def test_gaps_are_zeros_whatever_lay_there() -> None:
    chance = random.Random(7)
    sizes = (1, 10, 70_000, 2 * CANONICAL, 2 * CANONICAL - 1, 150_000)
    for _ in range(20):
        pieces = [bytes([1 + number]) * chance.choice(sizes) for number in range(6)]
        tensors = {name: {role: chance.choice(pieces) for role in "xyz"[: chance.randrange(1, 4)]} for name in "abcdef"}
        data = written(tensors)
        assert written(tensors, lambda roles: sorted(roles, reverse=True)) == data
        assert written(tensors, before=b"\xff" * (len(data) + 100_000)) == data
        covered = bytearray(data)
        for offset, length in places(data).values():
            covered[offset : offset + length] = bytes(length)
        manifest = int.from_bytes(data[-40:-32], "little")
        assert not any(covered[len(MAGIC) : manifest])


@pytest.mark.parametrize("name", ["", "\0", "\ud800", "b" * 1025, "ü" * 513])
def test_names_that_break_a_rule_are_refused_before_a_byte_is_written(name: str) -> None:
    first = TensorSpec("a", (8,), "u8", DenseLayout.codec, (PartSpec("data", "u8", 8),))
    spec = replace(first, name=name)
    assert "names of 1 to 1024 bytes" in str(Zt2Format().why_unsupported(spec))
    target = MemoryTarget()
    writer: Any = Zt2Format().writer(target, "x.zt", Artifact([first, spec], {}), WriteOptions())
    feed(writer, Item(first, {"data": bytes(8)}))
    before = bytes(target.files["x.zt"])
    with pytest.raises(IngotError) as caught:
        feed(writer, Item(spec, {"data": bytes(range(8))}))
    assert caught.value.rule == "zt2.name"
    assert bytes(target.files["x.zt"]) == before


def test_what_is_plainly_fine_is_so_closely() -> None:
    for dtype, bytes_each in ITEM_BYTES.items():
        spec = TensorSpec("w", (3,), dtype, DenseLayout.codec, (PartSpec("data", dtype, 3 * bytes_each),))
        assert is_simple(spec)
        written_form(spec)


@pytest.mark.parametrize("tied", [False, True])
def test_a_dry_run_tells_whether_its_size_is_exact(tmp_path: Path, tied: bool) -> None:
    weights = np.arange(100_000, dtype=np.float32)
    ingot.save(tmp_path / "a.zt", {"a": weights, "b": weights if tied else weights[1:]})
    with prepare(tmp_path / "a.zt", tmp_path / "b.zt", None, None, container=2) as prepared:
        size, exact = prepared.plan.size, prepared.plan.size_exact
    ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", container=2)
    found = (tmp_path / "b.zt").stat().st_size
    assert exact is not tied
    assert found < size - weights.nbytes // 2 if tied else found == size


def test_equal_checksums_alone_do_not_make_one_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.core.bytes.checksums.Crc32c.text", lambda self: "crc32c:0x00000000")
    data = written({"a": {"x": b"1" * 10}, "b": {"x": b"2" * 10}})
    assert places(data)["b/x"] == (2 * CANONICAL, 10)


def test_the_way_there_and_back_is_exact_and_the_same_every_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((64, 128)).astype(np.float32)
    sparse = np.where(rng.random((64, 128)) < 0.1, weights, 0)
    recipe = tmp_path / "mixed.toml"
    recipe.write_text(
        "[[rules]]\nmatch = '*csr*'\ncodec = 'sparse_csr'\n"
        "[[rules]]\nmatch = '*coo*'\ncodec = 'sparse_coo'\n"
        "[[rules]]\nmatch = '*zip*'\ncodec = 'dense'\nencoding = 'zstd'\n"
        "[[rules]]\nmatch = '*int*'\ncodec = 'affine'\noptions = { bits = 4, group = 32 }\n"
    )
    names = ("csr.weight", "coo.weight", "zip.weight", "int.weight", "flag")
    arrays = {name: sparse if name[0] == "c" else weights for name in names[:4]}
    ingot.save(tmp_path / "plain.zt", {**arrays, "flag": np.array([True, False])})
    ingot.convert(tmp_path / "plain.zt", tmp_path / "one.zt", recipe)
    ingot.convert(tmp_path / "one.zt", tmp_path / "two.zt", container=2)
    ingot.convert(tmp_path / "two.zt", tmp_path / "back.zt", container=1)
    ingot.convert(tmp_path / "back.zt", tmp_path / "again.zt", container=2)
    assert (tmp_path / "two.zt").read_bytes() == (tmp_path / "again.zt").read_bytes()
    assert not [item for item in ingot.verify(tmp_path / "two.zt") if item.level == "error"]
    with ingot.open(tmp_path / "one.zt") as one, ingot.open(tmp_path / "two.zt") as two:
        assert (one.format, two.format) == ("zt", "zt2")
        assert two["zip.weight"].parts["data"].encoding == "zt.zstd-seekable/1"
        assert {name: tensor.codec for name, tensor in two.items()} == {name: one[name].codec for name in one}
        assert np.array_equal(two["zip.weight"][3:5], weights[3:5])
        for name in one:
            assert one[name].numpy().tobytes() == two[name].numpy().tobytes()


def test_a_container_that_a_format_does_not_have_is_refused(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"a": np.zeros(2, np.float32)})
    for target, version in (("b.zt", 3), ("b.safetensors", 2)):
        with pytest.raises(IngotError) as caught:
            ingot.convert(tmp_path / "a.zt", tmp_path / target, container=version)
        assert caught.value.rule == "convert.container"


@pytest.mark.parametrize("codec", ["affine", "~affine", "unheard_of", "x.custom/1", "zt2:sparse_csr"])
def test_ids_of_codecs_come_back(codec: str) -> None:
    spec = TensorSpec("x", (2,), "u8", codec, (PartSpec("p", "u8", 3),), {"note": [1, None, {"a": 2.5}]})
    assert Zt2Format().why_unsupported(spec) is None
    assert len({way.layout for way in written_forms(spec)}) == 1
