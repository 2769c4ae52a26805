"""The safetensors format: what every format promises, layout, shards, resume."""

from __future__ import annotations

import json

import pytest

from ingot.core.numeric.dtypes import BY_SAFETENSORS, DTYPES
from ingot.errors import IngotError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import WriteOptions
from ingot.formats.safetensors import writer as writer_module
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.formats.safetensors.header import MAX_HEADER
from ingot.model.artifact import Artifact
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryStore, MemoryTarget
from ingot.testing.formats import FormatSuite, Item, dense, feed
from tests.support.stores import FaultyStore


class TestSingleFile(FormatSuite):
    format = SafetensorsFormat()

    def test_every_safetensors_dtype_is_carried(self):
        for row in BY_SAFETENSORS.values():
            self.check([dense("x", (4, 2), row.name)])
        assert len(BY_SAFETENSORS) == 22

    def test_every_dtype_has_its_place_in_the_order(self):
        assert sorted(writer_module._RANK) == sorted(row.name for row in BY_SAFETENSORS.values())

    def test_data_is_aligned_and_the_header_padded(self):
        items = [dense("x" * length, (1,), "f64") for length in range(1, 17)]
        target, _ = self.write(items, {"k": "v"})
        data = bytes(target.files[self.file])
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        assert data[8 : 8 + length].rstrip(b" ").endswith(b"}")

    def test_without_metadata_there_is_no_key(self):
        target, _ = self.write(self.sample())
        assert b"__metadata__" not in target.files[self.file]

    def test_tensors_come_in_the_order_of_their_bytes(self):
        catalog = self.check(self.sample())
        offsets = [tensor.parts["data"].offset for tensor in catalog.tensors.values()]
        assert offsets == sorted(offsets)
        assert list(catalog.tensors) == ["a.weight", "b", "empty", "c"]

    def test_the_header_is_there_for_fingerprints(self):
        target, _ = self.write(self.sample())
        catalog = self.read(target)
        assert json.loads(catalog.headers[self.file])["b"]["dtype"] == "BF16"

    def test_a_source_that_fails_while_opening(self):
        target, _ = self.write(self.sample())
        for fail_at in (0, 1):
            for fault in ("error", "shrank", "short-read"):
                with pytest.raises(IngotError) as caught:
                    self.format.read(FaultyStore(MemoryStore(target.files), fail_at, fault), self.file)
                assert caught.value.rule.startswith("store.")

    def test_parts_say_where_they_are(self):
        target, _ = self.write(self.sample())
        part = self.read(target).tensors["b"].parts["data"]
        assert part.where == "model.safetensors: b: data"
        assert part.digest is None


class TestShards(FormatSuite):
    """Shards of at most 24 bytes, so that the sample needs several."""

    format = SafetensorsFormat()
    options = WriteOptions(max_shard=24)

    @pytest.mark.parametrize("done", [0, 1, 3, 4])
    def test_a_resumed_run_gives_the_same_bytes(self, done):
        super().test_a_resumed_run_gives_the_same_bytes(done)

    def test_the_index_is_as_transformers_writes_it(self):
        items = [
            dense("b", (4,), "f32"),
            dense("a", (2,), "f32", 1),
            dense("big", (100,), "u8", 2),
            dense("c", (1,), "u8"),
        ]
        target, names = self.write(items)
        assert names == [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json",
        ]
        text = bytes(target.files[names[3]]).decode()
        weight_map = {"a": names[1], "b": names[1], "big": names[0], "c": names[2]}
        expected = {"metadata": {"total_size": 125}, "weight_map": weight_map}
        assert text == json.dumps(expected, indent=2, sort_keys=True) + "\n"

    def test_metadata_is_in_every_shard(self):
        target, names = self.write(self.sample(), {"format": "pt"})
        assert all(b'{"__metadata__":{"format":"pt"}' in target.files[name] for name in names[:-1])

    def test_one_shard_needs_no_index(self):
        target, names = self.write([dense("x", (2,), "f32")])
        assert names == list(target.files) == ["model.safetensors"]

    def test_a_shard_is_not_begun_for_nothing(self):
        target, names = self.write([dense("big", (100,), "u8"), dense("huge", (200,), "u8")])
        assert len(names) == 3
        assert json.loads(target.files["model.safetensors.index.json"])["metadata"]["total_size"] == 300

    def test_a_limit_below_one_byte_is_refused(self):
        with pytest.raises(UsageError):
            self.format.writer(MemoryTarget(), "x", Artifact([]), WriteOptions(max_shard=0))


def read_shards(files: dict[str, bytes], index: object) -> object:
    raw = index if isinstance(index, bytes) else json.dumps(index).encode()
    store = MemoryStore({**files, "model.safetensors.index.json": raw})
    return SafetensorsFormat().read(store, "model.safetensors.index.json")


def one_file(*items: Item, metadata: dict[str, str] | None = None) -> bytes:
    target = MemoryTarget()
    writer = SafetensorsFormat().writer(
        target, "x", Artifact([item.spec for item in items], metadata or {}), WriteOptions()
    )
    for item in items:
        feed(writer, item)
    return bytes(target.files[writer.finish()[0]])


FILES = {
    "s1.safetensors": one_file(dense("a", (2,), "f32"), metadata={"format": "pt", "x": "1"}),
    "s2.safetensors": one_file(dense("b", (3,), "i16"), dense("c", (1,), "u8"), metadata={"format": "np"}),
}
WEIGHT_MAP = {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"}


class TestIndex:
    def rule(self, index, files=None):
        with pytest.raises(IngotError) as caught:
            read_shards(FILES if files is None else files, index)
        return caught.value.rule

    def test_it_reads_all_shards(self):
        catalog = read_shards(FILES, {"metadata": {"total_size": 15}, "weight_map": WEIGHT_MAP})
        assert list(catalog.tensors) == ["a", "b", "c"]
        assert catalog.metadata == {"format": "pt", "x": "1"}
        assert [note[0] for note in catalog.notes] == ["safetensors.metadata-differs"]
        assert sorted(catalog.headers) == ["model.safetensors.index.json", "s1.safetensors", "s2.safetensors"]

    def test_a_tensor_that_the_index_forgets_is_kept_and_told(self):
        catalog = read_shards(FILES, {"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})
        assert list(catalog.tensors) == ["a", "b", "c"]
        assert "safetensors.index-unlisted" in [note[0] for note in catalog.notes]

    @pytest.mark.parametrize("total", [14, 0, -1, 1e300, 1.5])
    def test_a_wrong_total_is_told(self, total):
        catalog = read_shards(FILES, {"metadata": {"total_size": total}, "weight_map": WEIGHT_MAP})
        assert ("safetensors.index-total-size" in [note[0] for note in catalog.notes]) == (total != 1e300)

    @pytest.mark.parametrize(
        "shard", ["../s1.safetensors", "/etc/passwd", "sub/s1.safetensors", "", ".", "..", "a\0b", "a\\b"]
    )
    def test_files_elsewhere_are_refused(self, shard):
        assert self.rule({"weight_map": {"a": shard}}) == "safetensors.index-escape"

    def test_a_missing_shard_is_named(self):
        with pytest.raises(IngotError) as caught:
            read_shards({}, {"weight_map": {"a": "gone.safetensors"}})
        assert caught.value.rule == "safetensors.index-missing-shard"
        assert "gone.safetensors" in str(caught.value)

    @pytest.mark.parametrize("weight_map", [{"z": "s1.safetensors"}, {"b": "s1.safetensors", "c": "s2.safetensors"}])
    def test_a_tensor_that_is_not_where_the_index_says(self, weight_map):
        assert self.rule({"weight_map": weight_map}) == "safetensors.index-missing-tensor"

    def test_a_tensor_in_two_shards(self):
        files = {**FILES, "s3.safetensors": FILES["s1.safetensors"]}
        assert self.rule({"weight_map": {"a": "s1.safetensors", "b": "s3.safetensors"}}, files) == (
            "safetensors.index-duplicate-tensor"
        )

    def test_a_large_index_of_nothing_is_refused_before_it_is_parsed(self, monkeypatch):
        names = {f"t{number}": "s1.safetensors" for number in range(60_000)}
        monkeypatch.setattr("ingot.formats.safetensors.index.strict_json", None)
        monkeypatch.setattr("ingot.formats.safetensors.index._parse_typical", None)
        assert self.rule(json.dumps({"weight_map": names}).encode()) == "safetensors.index-length"

    def test_an_index_as_writers_make_it_needs_no_closer_look(self, monkeypatch):
        monkeypatch.setattr("ingot.formats.safetensors.index.strict_json", None)
        index = {"metadata": {"total_size": 7, "by": "a: b"}, "weight_map": WEIGHT_MAP}
        assert sorted(read_shards(FILES, index).tensors) == sorted(WEIGHT_MAP)

    @pytest.mark.parametrize(
        ("index", "rule"),
        [
            (b"", "safetensors.index-json"),
            (b"\xff", "safetensors.index-json"),
            (b"[]", "safetensors.index-json"),
            (b"[" * 200_000, "safetensors.index-json"),
            (b'{"weight_map": {}, "metadata": {"total_size": NaN}}', "safetensors.index-json"),
            (b'{"weight_map": {}, "metadata": {"total_size": ' + b"9" * 5000 + b"}}", "safetensors.index-json"),
            (b'{"weight_map": {}} x', "safetensors.index-json"),
            (b'{"weight_map": {"a": "x", "a": "y"}}', "safetensors.index-duplicate-key"),
            (b'{"weight_map": {}, "weight_map": {}}', "safetensors.index-duplicate-key"),
            (b"{}", "safetensors.index-fields"),
            (b'{"weight_map": []}', "safetensors.index-fields"),
            (b'{"weight_map": {}, "metadata": []}', "safetensors.index-fields"),
            (b'{"weight_map": {"a": 1}}', "safetensors.index-fields"),
            (b'{"weight_map": {"a": null}}', "safetensors.index-fields"),
        ],
    )
    def test_bad_indexes(self, index, rule):
        assert self.rule(index) == rule

    def test_an_index_that_lists_itself(self):
        assert self.rule({"weight_map": {"a": "model.safetensors.index.json"}}).startswith("safetensors.")

    def test_a_damaged_shard_is_named(self):
        files = {**FILES, "s2.safetensors": FILES["s2.safetensors"][:-1]}
        with pytest.raises(IngotError) as caught:
            read_shards(files, {"weight_map": WEIGHT_MAP})
        assert caught.value.rule == "safetensors.data-length"
        assert "s2.safetensors" in str(caught.value)

    def test_all_shards_are_closed_when_one_is_bad(self, tmp_path, monkeypatch):
        from ingot.stores.local import LocalStore, PreadSource

        (tmp_path / "s1.safetensors").write_bytes(FILES["s1.safetensors"])
        (tmp_path / "s2.safetensors").write_bytes(b"bad")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": WEIGHT_MAP}))
        closed = []
        real = PreadSource.close
        monkeypatch.setattr(PreadSource, "close", lambda self: closed.append(self.name) or real(self))
        with pytest.raises(IngotError):
            SafetensorsFormat().read(LocalStore(tmp_path, io="pread"), "model.safetensors.index.json")
        assert any(name.endswith("s1.safetensors") for name in closed)


class TestRefusals:
    format = SafetensorsFormat()

    @pytest.mark.parametrize(
        "spec",
        [
            TensorSpec("x", (2, 2), "f32", "affine", (PartSpec("packed_weight", "u8", 2),)),
            TensorSpec("x", (1,), "complex128", "dense", (PartSpec("data", "f64", 16, "complex128"),)),
            TensorSpec("x", (1,), "unheard_of", "dense", (PartSpec("data", "u8", 1, "unheard_of"),)),
            TensorSpec("x", (2,), "f32", "dense", (PartSpec("data", "f32", 7),)),
            TensorSpec("x", (2,), "f32", "dense", (PartSpec("data", "f32", None, None, "zstd", 8),)),
            TensorSpec("x", (2,), "f32", "dense", (PartSpec("values", "f32", 8),)),
            TensorSpec("x", (2,), "f32", "dense", (PartSpec("data", "f32", 8), PartSpec("more", "f32", 8))),
            TensorSpec("x", (3,), "f4_e2m1fn", "dense", (PartSpec("data", "u8", 2, "f4_e2m1fn"),)),
            TensorSpec("x", (2, 1), "f6_e2m3fn", "dense", (PartSpec("data", "u8", 2, "f6_e2m3fn"),)),
            TensorSpec("__metadata__", (1,), "u8", "dense", (PartSpec("data", "u8", 1),)),
            TensorSpec("\ud800", (1,), "u8", "dense", (PartSpec("data", "u8", 1),)),
        ],
        ids=str,
    )
    def test_what_it_cannot_carry(self, spec):
        assert self.format.why_unsupported(spec)
        with pytest.raises(UnsupportedError) as caught:
            self.format.writer(MemoryTarget(), "x", Artifact([spec]), WriteOptions())
        assert caught.value.rule == "safetensors.unsupported"

    def test_it_carries_every_other_dtype(self):
        refused = {name for name in DTYPES if self.format.why_unsupported(dense("x", (4,), name).spec)}
        assert refused == {"complex128"}

    @pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {"a": {}}, {1: "a"}, {"a": "\ud800"}])
    def test_metadata_that_is_not_text(self, metadata):
        with pytest.raises(UnsupportedError) as caught:
            self.format.writer(MemoryTarget(), "x", Artifact([], metadata), WriteOptions())
        assert caught.value.rule == "safetensors.metadata"

    def test_a_name_twice(self):
        spec = dense("x", (1,), "u8").spec
        with pytest.raises(UsageError):
            self.format.writer(MemoryTarget(), "x", Artifact([spec, spec]), WriteOptions())

    def test_a_header_past_the_limit_of_readers(self, monkeypatch):
        assert MAX_HEADER == 100_000_000
        monkeypatch.setattr(writer_module, "MAX_HEADER", 40)
        with pytest.raises(UnsupportedError) as caught:
            self.format.writer(MemoryTarget(), "x", Artifact([dense("x", (1,), "u8").spec]), WriteOptions())
        assert caught.value.rule == "safetensors.header-length"

    def test_a_record_of_another_layout(self):
        items = [dense("x", (1,), "u8"), dense("y", (1,), "u8")]
        writer = self.format.writer(MemoryTarget(), "x", Artifact([item.spec for item in items]), WriteOptions())
        with pytest.raises(IntegrityError) as caught:
            writer.restore({"name": "x", "blobs": [["x", 3, 1, "crc32c:0x0"]]})
        assert caught.value.rule == "writer.record"

    def test_wrong_calls(self):
        writer = self.format.writer(MemoryTarget(), "x", Artifact([dense("x", (1,), "u8").spec]), WriteOptions())
        for call in (lambda: writer.write("data", b"x"), writer.end, writer.finish):
            with pytest.raises(UsageError):
                call()
        writer.begin(dense("x", (1,), "u8").spec)
        with pytest.raises(UsageError):
            writer.write("scales", b"x")
        writer.abort()


class TestEntry:
    format = SafetensorsFormat()

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ([], None),
            (["config.json"], None),
            (["model.safetensors", "other.safetensors", "model.safetensors.index.json"], "model.safetensors"),
            (["model-00001-of-00001.safetensors", "model.safetensors.index.json"], "model.safetensors.index.json"),
            (["a-1.safetensors", "a-2.safetensors", "a.safetensors.index.json"], "a.safetensors.index.json"),
            (["diffusion.safetensors"], "diffusion.safetensors"),
            (["a.safetensors", "b.safetensors"], None),
            (["a.safetensors.index.json", "b.safetensors.index.json"], None),
            (["MODEL.SAFETENSORS"], "MODEL.SAFETENSORS"),
        ],
    )
    def test_which_file_a_folder_means(self, names, expected):
        assert self.format.entry(names) == expected

    @pytest.mark.parametrize(
        ("name", "head", "expected"),
        [
            ("x.safetensors", b"", True),
            ("x.bin", b"\x40\0\0\0\0\0\0\0{", True),
            ("x.bin", b"\x40\0\0\0\0\0\0\0[", False),
            ("x.bin", b"\xff" * 8 + b"{", False),
            ("x.bin", b"\x40\0\0", False),
        ],
    )
    def test_which_bytes_it_claims(self, name, head, expected):
        assert self.format.claims(name, head) is expected
