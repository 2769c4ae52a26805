"""The test suite of formats.

A format's test file subclasses ``FormatSuite`` and sets its format; ``options`` may set another digest, or shards::

    class TestMine(FormatSuite):
        format = MyFormat()

If the format stores other tensors than dense ones, override ``item``; if it requires metadata, ``described``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
import pytest

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES
from ingot.errors import IngotError, IntegrityError
from ingot.formats.base import Catalog, Format, FormatWriter, WriteOptions
from ingot.formats.detect import listing
from ingot.model.artifact import Artifact
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryStore, MemoryTarget

AWKWARD_NAMES = (
    "",
    " ",
    "a.b",
    "a b",
    'quo"te',
    "back\\slash",
    "sla/sh",
    "new\nline",
    "tab\t",
    "\x00",
    "\x7f",
    "é",
    "重み",
    "🧊",
    "a:b",
)
METADATA = {"format": "pt", "clé": 'valeur "entre"\n', "": "", "a:b": "c:d"}


@dataclass(frozen=True)
class Item:
    """A tensor that the suite writes: its spec and the bytes of each part."""

    spec: TensorSpec
    parts: Mapping[str, bytes]


def dense(name: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Item:
    """Return a dense tensor of random bytes; 0 and 1 for bool."""
    row = DTYPES[dtype]
    size = row.nbytes(prod(shape))
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, np.uint8).tobytes()
    part = PartSpec("data", row.storage, size, None if row.is_storage else dtype)
    return Item(TensorSpec(name, shape, dtype, "dense", (part,)), {"data": data})


def feed(writer: FormatWriter, item: Item, step: int = 1000) -> dict[str, Any]:
    """Write one tensor in chunks of ``step`` bytes; return the writer's record."""
    writer.begin(item.spec)
    for role, data in item.parts.items():
        for start in range(0, len(data), step):
            writer.write(role, data[start : start + step])
    return writer.end()


class FormatSuite:
    """Base class of the tests of a format."""

    format: ClassVar[Format]
    options: ClassVar[WriteOptions] = WriteOptions()

    def item(self, name: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Item:
        """Return a tensor of random values that the format can store."""
        return dense(name, shape, dtype, seed)

    def described(self, items: Sequence[Item], metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the metadata to write with these items: ``metadata``, plus entries that the format requires."""
        return dict(metadata or {})

    @property
    def file(self) -> str:
        """The name of the file that the suite writes."""
        return self.format.file_name("model")

    def write(self, items: Sequence[Item], metadata: Mapping[str, Any] | None = None) -> tuple[MemoryTarget, list[str]]:
        """Write items in the format's order; return the target and the names of the finished files."""
        target = MemoryTarget()
        items = self.ordered(items)
        specs = [item.spec for item in items]
        writer = self.format.writer(target, self.file, Artifact(specs, self.described(items, metadata)), self.options)
        for item in items:
            feed(writer, item)
        names = writer.finish()
        assert sorted(names) == sorted(target.files)
        return target, names

    def ordered(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in the order that the format's writer requires."""
        return [items[index] for index in self.format.order([item.spec for item in items])]

    def read(self, target: MemoryTarget) -> Catalog:
        """Open the files that the suite wrote; return their catalog."""
        store = MemoryStore(target.files)
        entry = self.format.entry(listing(store))
        assert entry is not None
        return self.format.read(store, entry)

    def check(self, items: Sequence[Item], metadata: Mapping[str, Any] | None = None) -> Catalog:
        """Write items, read them back, and compare specs, bytes and metadata."""
        target, _ = self.write(items, metadata)
        specs = [item.spec for item in items]
        metadata = self.described(items, metadata)
        assert self.format.size(Artifact(specs, metadata), self.options) == sum(map(len, target.files.values()))
        catalog = self.read(target)
        assert sorted(catalog.tensors) == sorted(spec.name for spec in specs)
        assert dict(catalog.metadata) == metadata
        for item in items:
            tensor = catalog.tensors[item.spec.name]
            assert tensor is catalog.tensors[item.spec.name]
            assert (tensor.shape, tensor.dtype, tensor.codec) == (item.spec.shape, item.spec.dtype, item.spec.codec)
            assert list(tensor.parts) == [part.role for part in item.spec.parts]
            for part in item.spec.parts:
                stored = tensor.parts[part.role]
                assert (stored.dtype, stored.type, stored.encoding) == (part.dtype, part.type, part.encoding)
                assert bytes(stored.stored()) == item.parts[part.role]
        return catalog

    def carried(self, items: Sequence[Item]) -> list[Item]:
        """Return the items that the format can store."""
        return [item for item in items if self.format.why_unsupported(item.spec) is None]

    def sample(self) -> list[Item]:
        """Return four tensors of different types, one of them empty."""
        shapes = {"a.weight": ((3, 4), "f32"), "b": ((5,), "bf16"), "empty": ((0, 3), "f16"), "c": ((7,), "u8")}
        return [self.item(name, shape, dtype, seed) for seed, (name, (shape, dtype)) in enumerate(shapes.items())]

    def test_it_implements_what_its_traits_promise(self) -> None:
        assert isinstance(self.format, Format)
        promised = {"looks_inside": "confirms", "overlays": "overlay", "carries_receipt": "with_receipt"}
        for trait, method in promised.items():
            if getattr(self.format.traits, trait):
                assert getattr(type(self.format), method) is not getattr(Format, method)

    def test_every_storage_dtype_is_carried(self) -> None:
        refused = [name for name in STORAGE_DTYPES if self.format.why_unsupported(self.item("x", (2, 4), name).spec)]
        assert refused == []

    def test_round_trip_of_each_dtype(self, subtests: pytest.Subtests) -> None:
        for dtype in DTYPES:
            with subtests.test(dtype):
                items = self.carried([self.item("x", (4, 6), dtype), self.item("y", (8,), dtype, 1)])
                if items:
                    self.check(items)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1, 1, 1, 1, 1, 1), (1000,)])
    def test_round_trip_of_a_shape(self, shape: tuple[int, ...]) -> None:
        self.check([self.item("x", shape, "f32")])

    def test_round_trip_of_nothing(self) -> None:
        self.check([])

    def test_round_trip_of_awkward_names(self) -> None:
        items = self.carried([self.item(name, (2,), "i16", seed) for seed, name in enumerate(AWKWARD_NAMES)])
        assert len(items) > len(AWKWARD_NAMES) // 2
        self.check(items)

    def test_round_trip_of_metadata(self) -> None:
        self.check(self.sample(), METADATA)

    def test_round_trip_of_many_tensors(self) -> None:
        self.check([self.item(f"layers.{index}.w", (2, 2), "f16", index) for index in range(1500)])

    def test_nothing_given_is_changed(self) -> None:
        items = self.sample()
        metadata = dict(METADATA)
        before = copy.deepcopy([item.spec for item in items])
        self.check(items, metadata)
        assert [item.spec for item in items] == before
        assert metadata == METADATA

    def test_pieces_do_not_matter(self) -> None:
        items = self.ordered(self.sample())
        target, _ = self.write(items)
        chunked = MemoryTarget()
        writer = self.format.writer(
            chunked, self.file, Artifact([item.spec for item in items], self.described(items)), self.options
        )
        for item in items:
            feed(writer, item, step=1)
        writer.finish()
        assert chunked.files == target.files

    def test_records_tell_where_the_bytes_are(self) -> None:
        items = self.ordered(self.sample())
        target = MemoryTarget()
        writer = self.format.writer(
            target, self.file, Artifact([item.spec for item in items], self.described(items)), self.options
        )
        records = [feed(writer, item) for item in items]
        writer.finish()
        for item, record in zip(items, records, strict=True):
            assert record["name"] == item.spec.name
            for (file, offset, length, digest), data in zip(record["blobs"], item.parts.values(), strict=True):
                stored = bytes(target.files[file][offset : offset + length])
                assert stored == data
                assert checksums.same(digest, checksums.digest("crc32c", stored))

    @pytest.mark.parametrize("finished", [0, 1, 3, 4])
    def test_a_resumed_run_gives_the_same_bytes(self, finished: int) -> None:
        items = self.ordered(self.sample())
        specs = [item.spec for item in items]
        uninterrupted, _ = self.write(items, METADATA)
        target = MemoryTarget()
        metadata = self.described(items, METADATA)
        first = self.format.writer(target, self.file, Artifact(specs, metadata), self.options)
        records = [feed(first, item) for item in items[:finished]]
        if finished < len(items):  # killed in the middle of a tensor
            first.begin(specs[finished])
            role, data = next(iter(items[finished].parts.items()))
            first.write(role, data[:1])
        first.abort()
        second = self.format.writer(target, self.file, Artifact(specs, metadata), self.options)
        for record in records:
            second.restore(record)
        for item in items[finished:]:
            feed(second, item)
        second.finish()
        assert target.files == uninterrupted.files

    def test_tensors_out_of_order_are_refused(self) -> None:
        items = self.ordered(self.sample())
        writer = self.format.writer(
            MemoryTarget(), self.file, Artifact([item.spec for item in items], self.described(items)), self.options
        )
        with pytest.raises(IngotError):
            writer.begin(items[1].spec)
        writer.abort()

    def test_missing_bytes_and_tensors_are_refused(self) -> None:
        items = self.ordered(self.sample())
        writer = self.format.writer(
            MemoryTarget(), self.file, Artifact([item.spec for item in items], self.described(items)), self.options
        )
        with pytest.raises(IngotError):
            writer.finish()
        writer.begin(items[0].spec)
        role, data = next(iter(items[0].parts.items()))
        writer.write(role, data[:-1])
        with pytest.raises(IngotError):
            writer.end()
        writer.abort()

    def test_more_bytes_than_stated_are_refused(self) -> None:
        items = self.ordered(self.sample())
        writer = self.format.writer(
            MemoryTarget(), self.file, Artifact([item.spec for item in items], self.described(items)), self.options
        )
        writer.begin(items[0].spec)
        with pytest.raises(IngotError):  # at once, or when the tensor is closed
            _write_and_end(writer, items[0])
        writer.abort()

    def test_an_unknown_codec_is_carried_or_refused_with_a_reason(self) -> None:
        spec = TensorSpec("x", (2,), "f32", "unheard_of", (PartSpec("data", "u8", 3), PartSpec("more", "u8", 2)))
        reason = self.format.why_unsupported(spec)
        if reason is None:
            self.check([Item(spec, {"data": b"abc", "more": b"de"})])
        else:
            assert reason

    def test_truncation_anywhere_is_refused(self) -> None:
        target, names = self.write(self.sample(), METADATA)
        store = MemoryStore(target.files)
        entry = self.format.entry(listing(store))
        assert entry is not None
        for name in names:
            data = bytes(target.files[name])
            for length in range(len(data)):
                cut = MemoryStore({**target.files, name: data[:length]})
                if name != entry or not data[length:].isspace():
                    with pytest.raises(IngotError) as caught:
                        self.format.read(cut, entry)
                    assert caught.value.rule
                    continue
                with suppress(IntegrityError):  # text without its last blanks may be valid
                    assert sorted(self.format.read(cut, entry).tensors) == sorted(self.read(target).tensors)

    def test_it_claims_its_own_files(self) -> None:
        target, names = self.write(self.sample())
        entry = self.format.entry(sorted(target.files))
        assert entry in names
        assert self.format.claims(entry, bytes(target.files[entry][:16]))
        assert not self.format.claims("x.bin", b"\x80\x02}q\x00(X\x0c\x00\x00\x00enc")
        assert not self.format.claims("x", b"")
        assert self.format.entry(["config.json", "README.md"]) is None


def _write_and_end(writer: FormatWriter, item: Item) -> None:
    """Write all parts, the first one with an additional byte."""
    for index, (role, data) in enumerate(item.parts.items()):
        writer.write(role, data + b"x" * (index == 0))
    writer.end()
