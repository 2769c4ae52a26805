"""Reading .zt: what a catalog holds, laziness, digests, hostile bytes."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.bytes import checksums, packed
from ingot.core.parsing import cbor
from ingot.errors import CodecError, FormatError, IngotError, IntegrityError
from ingot.formats.base import Catalog
from ingot.formats.zt.format import ZtFormat
from ingot.formats.zt.reader import read_catalog
from ingot.model.bytesource import MemorySource
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore
from tests.support.zt import component, manifest, tensor, zstd_frame, zt_file

F32 = np.arange(4, dtype="<f4").tobytes()
GOOD = zt_file(
    manifest({"t": tensor(components={"data": component(digest=checksums.digest("crc32c", F32))})}), {64: F32}
)
Read = Callable[..., Catalog]


class CountingSource(MemorySource):
    """Remembers which ranges were asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, "counted")
        self.asked: list[tuple[int, int]] = []
        self.closed = False

    def view(self, offset: int, length: int) -> memoryview:
        self.asked.append((offset, length))
        return super().view(offset, length)

    def close(self) -> None:
        self.closed = True


def test_a_catalog_holds_what_the_manifest_says(read: Read) -> None:
    objects = {
        "b": tensor(attributes={"k": [1]}),
        "a": tensor([2, 1], components={"data": component("u8", 128, 2, type="f8_e5m2")}),
    }
    data = zt_file(manifest(objects, attributes={"license": "x"}), {64: F32, 128: b"ab"})
    found = read(data)
    assert list(found.tensors) == ["b", "a"]
    assert "a" in found.tensors
    assert "c" not in found.tensors
    assert len(found.tensors) == 2
    assert found.metadata == {"license": "x"}
    assert found.tensors["b"].params == {"k": [1]}
    assert found.tensors["a"].shape == (2, 1)
    assert found.tensors["a"].dtype == "f8_e5m2"
    assert found.tensors["a"].codec == "dense"
    assert found.tensors["a"].parts["data"].dtype == "u8"
    assert found.tensors["a"] is found.tensors["a"]
    assert list(found.headers) == ["model.zt"]
    assert found.headers["model.zt"] == cbor.dumps(manifest(objects, attributes={"license": "x"}))
    np.testing.assert_array_equal(found.tensors["b"].parts["data"].array(), np.arange(4, dtype="f4"))


def test_opening_touches_no_blob() -> None:
    source = CountingSource(GOOD)
    found = read_catalog(source)
    assert [tensor.nbytes for tensor in found.tensors.values()] == [16]
    (size,) = struct.unpack("<Q", GOOD[-16:-8])
    start = len(GOOD) - 16 - size
    assert source.asked == [(0, 8), (len(GOOD) - 16, 16), (start, size)]


def test_a_refused_file_is_closed() -> None:
    source = CountingSource(GOOD[:-1])
    store = MemoryStore({})
    store.open = lambda name: source  # type: ignore[method-assign,assignment]  # a double that sees the close
    with pytest.raises(FormatError):
        ZtFormat().read(store, "x")
    assert source.closed


def test_raw_parts_of_a_mapped_file_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "m.zt").write_bytes(GOOD)
    found = ZtFormat().read(LocalStore(tmp_path, io="mmap"), "m.zt")
    first, second = (found.tensors["t"].parts["data"].array() for _ in range(2))
    assert np.shares_memory(first, second)
    assert first.ctypes.data % 64 == 0


@pytest.mark.parametrize("verify", [True, False])
def test_digests_are_checked_unless_turned_off(read: Read, verify: bool) -> None:
    data = bytearray(GOOD)
    data[70] ^= 1
    part = read(bytes(data), verify=verify).tensors["t"].parts["data"]
    if not verify:
        assert len(part.view()) == 16
        return
    with pytest.raises(IntegrityError) as caught:
        part.view()
    assert caught.value.rule == "part.digest-mismatch"


def test_every_truncation_is_refused(read: Read) -> None:
    frame = zstd_frame(F32)
    objects = {
        "t": tensor(),
        "z": tensor(
            components={"data": component(offset=128, length=len(frame), encoding="zstd", uncompressed_length=16)}
        ),
    }
    data = zt_file(manifest(objects, attributes={"k": "v"}), {64: F32, 128: frame})
    for cut in range(len(data)):
        with pytest.raises(FormatError) as caught:
            read(data[:cut])
        assert caught.value.rule in ("zt.header-magic", "zt.truncated", "zt.footer-magic")


def test_every_truncation_before_a_whole_footer_is_refused(read: Read) -> None:
    """Bytes lost in the middle: the footer is whole, so the manifest's own rules have to see it."""
    (size,) = struct.unpack("<Q", GOOD[-16:-8])
    start = len(GOOD) - 16 - size
    for cut in range(8, start + size):
        with pytest.raises(IngotError) as caught:
            read(GOOD[:cut] + GOOD[-16:])
        assert caught.value.rule is not None


@pytest.mark.parametrize("step", [1, 127])
def test_no_changed_byte_of_the_manifest_gets_past_as_another_error(read: Read, step: int) -> None:
    (size,) = struct.unpack("<Q", GOOD[-16:-8])
    for position in range(len(GOOD) - 16 - size, len(GOOD)):
        data = bytearray(GOOD)
        data[position] = (data[position] + step) % 256
        try:
            for found in read(bytes(data)).tensors.values():
                for part in found.parts.values():
                    part.view()
        except IngotError:
            pass


def test_a_hundred_thousand_tensors(read: Read) -> None:
    count = 100_000
    objects = {
        f"layers.{i}.weight": tensor([1], components={"data": component("u8", 64 + 64 * i, 1)}) for i in range(count)
    }
    body = bytearray(64 * (count + 1))
    body[64::64] = bytes(i % 251 for i in range(count))
    data = zt_file(manifest(objects), {64: bytes(body[64:])})
    found = read(data)
    assert len(found.tensors) == count
    name = "layers.99999.weight"
    assert bytes(found.tensors[name].parts["data"].view()) == bytes([99999 % 251])
    objects[name] = tensor([2], components={"data": component("u8", 64, 2)})
    with pytest.raises(FormatError) as caught:
        read(zt_file(manifest(objects), {64: bytes(body[64:])}))
    assert caught.value.rule == "zt.blob-overlap"
    assert name in str(caught.value)


def test_a_stated_manifest_size_allocates_nothing(read: Read) -> None:
    tracemalloc.start()
    for size in (2**30, 2**30 + 1, 2**63, 2**64 - 1):
        with pytest.raises(FormatError):
            read(zt_file(manifest(), {64: F32}, size=size))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_packed_parts_with_too_many_decoded_bytes_are_refused(read: Read) -> None:
    frame = bytes(64)
    for stated, rule in (
        (len(frame) * packed.MAX_RATIO + 1, "zt.packed-ratio"),
        (None, "zt.uncompressed-length-missing"),
    ):
        about = component("u8", length=len(frame), encoding=packed.PACKED, uncompressed_length=stated)
        with pytest.raises(FormatError) as caught:
            read(zt_file(manifest({"t": tensor([stated or 1], components={"data": about})}), {64: frame}))
        assert caught.value.rule == rule


def test_a_bomb_is_refused_before_its_size_is_allocated(read: Read) -> None:
    frame = zstd_frame(b"\0", repeat=1 << 24)

    def bomb(stated: int) -> Any:
        about = component("u8", length=len(frame), encoding="zstd", uncompressed_length=stated)
        return zt_file(manifest({"t": tensor([stated], components={"data": about})}), {64: frame})

    with pytest.raises(FormatError) as caught:
        read(bomb(1 << 46))
    assert caught.value.rule == "zt.zstd-ratio"
    part = read(bomb(100)).tensors["t"].parts["data"]
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        part.view()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.rule == "part.zstd"
    assert peak < 4 << 20


def test_names_in_messages_are_escaped_and_cut(read: Read) -> None:
    name = "evil\n[ok]" + "x" * 10_000
    with pytest.raises(FormatError) as caught:
        read(zt_file(manifest({name: tensor([5])}), {64: F32}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_collector_runs_again_after_a_refusal(read: Read) -> None:
    with pytest.raises(FormatError):
        read(zt_file(manifest({"t": tensor([5])}), {64: F32}))
    assert gc.isenabled()


def test_notes_tell_what_is_odd_but_allowed(read: Read) -> None:
    objects = {"t": tensor(components={"data": component(type="posit32", encoding="lz4")})}
    found = read(zt_file(manifest(objects, version="1.7"), {64: F32}))
    assert [rule for rule, _ in found.remarks] == ["zt.version-minor", "zt.type-unknown"]
    assert [rule for rule, _ in found.notes] == ["zt.encoding-unknown"]
    assert (read(GOOD).notes, read(GOOD).remarks) == ((), ())


def test_strictly_a_file_without_digests_is_as_good_as_any(tmp_path: Path) -> None:
    """Section 1: ``digest`` is optional; section 2: logical types are an open set, minor versions add to them."""
    objects = {"t": tensor(), "u": tensor(components={"data": component(type="posit32", offset=128)})}
    data = zt_file(manifest(objects, version="1.3.0"), {64: F32, 128: F32})
    (tmp_path / "a.zt").write_bytes(data)
    told = {"part.no-digest", "zt.version-minor", "zt.type-unknown", "format.no-manifest-digest"}
    assert {(item.level, item.rule) for item in ingot.verify(tmp_path / "a.zt", strict=True)} == {
        ("note", rule) for rule in told
    }
    lz4 = {"t": tensor(components={"data": component(encoding="lz4")})}
    (tmp_path / "b.zt").write_bytes(zt_file(manifest(lz4), {64: F32}))
    assert "zt.encoding-unknown" in [
        item.rule for item in ingot.verify(tmp_path / "b.zt", strict=True) if item.level == "error"
    ]


def test_words_packed_along_another_dimension_are_told_or_refused(tmp_path: Path) -> None:
    """Section 3 leaves the dimension open; GPTQ's own 8_per_i32 of a square matrix has the same number of bytes."""
    parts = {
        "packed_weight": component("i32", 64, 128),
        "scales": component("f16", 192, 128),
        "zeros": component("f16", 320, 128),
    }
    plain = {"bits": 4, "group_size": 4, "packing": "8_per_i32"}

    def opened(**more: Any) -> ingot.Tensor:
        entry = tensor((16, 16), "quantized_group", parts, attributes={**plain, **more})
        (tmp_path / "a.zt").write_bytes(zt_file(manifest({"t": entry}), {64: bytes(128), 192: bytes(256)}))
        return ingot.open(tmp_path / "a.zt")["t"]

    def told() -> set[str]:
        return {item.rule for item in ingot.verify(tmp_path / "a.zt")}

    assert opened().numpy().shape == (16, 16)
    assert "affine.axis-unsaid" in told()
    report = ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt")
    assert any("dimension" in note for note in report.notes)
    assert opened(axis=1).numpy().shape == (16, 16)
    assert "affine.axis-unsaid" not in told()
    for other in ({"axis": 0}, {"quant_method": "gptq"}, {"desc_act": False}):
        with pytest.raises(CodecError) as caught:
            opened(**other).numpy()
        assert caught.value.rule == "affine.axis"
        assert "affine.axis" in told()
