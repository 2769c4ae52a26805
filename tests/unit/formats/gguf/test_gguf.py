"""GGUF files made by hand: what they hold, splits, byte order, and one file for each rule that refuses one."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.formats.gguf import cursor
from ingot.formats.gguf.cursor import MAX_HEADER
from ingot.formats.gguf.swapped import SwappedSource, order_of
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.ggml import TYPES
from tests.support.gguf import ARRAY, STRING, Item, Value, build

F32, F16, Q4_0, Q8_0, I8, I32, BF16 = 0, 1, 2, 8, 24, 26, 30
ONES = np.ones((2, 3), "<f4")
DENSE = Item("a", (3, 2), F32, ONES.tobytes())
ALIGN = "general.alignment"


def blocks(rows: int, seed: int = 1) -> tuple[bytes, np.ndarray]:
    """Return rows of two Q8_0 blocks each, and what they stand for."""
    rng = np.random.default_rng(seed)
    scales = rng.standard_normal((rows, 2, 1)).astype("<f2")
    codes = rng.integers(-128, 128, (rows, 2, 32), dtype=np.int8)
    data = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=2).tobytes()
    return data, (scales.astype(np.float32) * codes).reshape(rows, 64)


def save(folder: Path, data: bytes, name: str = "x.gguf") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def rule_of(path: Path) -> str | None:
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    return caught.value.rule


METADATA = {
    "general.architecture": Value(STRING, "llama"),
    "u8": Value(0, 255),
    "i8": Value(1, -1),
    "u16": Value(2, 65535),
    "i16": Value(3, -2),
    "u32": Value(4, 2**32 - 1),
    "i32": Value(5, -3),
    "f32": Value(6, 0.5),
    "yes": Value(7, True),
    "u64": Value(10, 2**64 - 1),
    "i64": Value(11, -(2**63)),
    "f64": Value(12, 0.1),
    "tokens": Value(ARRAY, ["é", "", "a\0b"], STRING),
    "scores": Value(ARRAY, [0.25, -1.0], 6),
    "flags": Value(ARRAY, [True, False], 7),
    "none": Value(ARRAY, [], 5),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_metadata(tmp_path: Path, order: str, version: int) -> None:
    with ingot.open(
        save(tmp_path, build(METADATA, [DENSE] if order == "<" else (), order=order, version=version))
    ) as x:
        about = x.metadata["ingot.gguf"]
        assert {key: x.metadata[key] for key in METADATA} == {key: value.value for key, value in METADATA.items()}
    assert (about["version"], about["big_endian"]) == (version, order == ">")
    assert about["types"]["u64"] == "u64"
    assert about["types"]["tokens"] == "array:string"


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_tensors_lie_by_any_alignment(tmp_path: Path, alignment: int) -> None:
    data, values = blocks(2)
    items = [DENSE, Item("q", (64, 2), Q8_0, data), Item("s", (), I32, pack("<i", 7)), Item("e", (0, 2), F16, b"")]
    file = save(tmp_path, build({ALIGN: Value(4, alignment)}, items, alignment=alignment))
    with ingot.open(file) as checkpoint:
        assert np.array_equal(checkpoint["a"].numpy(), ONES)
        assert np.array_equal(checkpoint["q"].numpy(), values)
        assert np.array_equal(checkpoint["q"][1:, 3:7], values[1:, 3:7])
        assert checkpoint["s"].numpy() == 7
        assert checkpoint["e"].shape == (2, 0)
        assert checkpoint["q"].layout.type == "q8_0"


def test_an_alignment_that_the_writer_ignored(tmp_path: Path) -> None:
    items = [DENSE, Item("b", (3, 2), F32, (2 * ONES).tobytes())]
    metadata = {ALIGN: Value(4, 4096)}
    with ingot.open(save(tmp_path, build(metadata, items, alignment=32))) as checkpoint:
        assert np.array_equal(checkpoint["b"].numpy(), 2 * ONES)
    report = ingot.verify(tmp_path / "x.gguf")
    assert "gguf.alignment-ignored" in str(report)


def test_big_endian_numbers_turn_round(tmp_path: Path) -> None:
    data, values = blocks(3)
    swapped = np.frombuffer(data, np.uint8).reshape(-1, 34).copy()
    swapped[:, :2] = swapped[:, 1::-1]
    items = [Item("a", (3, 2), F32, ONES.astype(">f4").tobytes()), Item("q", (64, 3), Q8_0, swapped.tobytes())]
    with ingot.open(save(tmp_path, build({}, items, order=">"))) as checkpoint:
        assert np.array_equal(checkpoint["a"].numpy(), ONES)
        assert np.array_equal(checkpoint["q"].numpy(), values)
        assert bytes(checkpoint["q"].parts["blocks"].view()) == data


@pytest.mark.parametrize("type", [*TYPES, "f64", "i8"])
def test_any_range_of_a_swapped_part(type: str) -> None:
    order = order_of(type)
    assert sorted(order) == list(range(len(order)))
    assert list(order[order]) == list(range(len(order)))  # numbers turn round, nothing moves
    stored = np.random.default_rng(0).integers(0, 256, 7 * len(order), dtype=np.uint8)
    whole = stored.reshape(7, -1)[:, order].tobytes()
    source = SwappedSource(MemorySource(b"pad" + stored.tobytes()), 3, stored.size, type)
    for start, length in ((0, len(whole)), (1, len(whole) - 1), (len(order) - 1, 3), (len(whole), 0)):
        assert bytes(source.view(start, min(length, len(whole) - start))) == whole[start : start + length]
    with pytest.raises(IngotError):
        source.view(1, len(whole))


def split(
    folder: Path, numbers: tuple[int, ...] = (0, 1, 2), count: int = 3, total: int = 3, tensor: str = "t"
) -> Path:
    for number in numbers:
        metadata = {
            "split.no": Value(2, number),
            "split.count": Value(2, count),
            "split.tensors.count": Value(5, total),
        }
        first = {"general.architecture": Value(STRING, "llama")} if number == 0 else {}
        item = Item(f"{tensor}{number}", (3, 2), F32, (number * ONES).astype("<f4").tobytes())
        save(folder, build({**first, **metadata}, [item]), f"m-{number + 1:05d}-of-{count:05d}.gguf")
    return folder


def test_a_split_opens_whole_by_its_folder_and_by_any_file(tmp_path: Path) -> None:
    split(tmp_path)
    for path in (tmp_path, *sorted(tmp_path.iterdir())):
        with ingot.open(path) as checkpoint:
            assert list(checkpoint) == ["t0", "t1", "t2"]
            assert np.array_equal(checkpoint["t2"].numpy(), 2 * ONES)
            assert checkpoint.metadata["general.architecture"] == "llama"
            assert "split.count" not in checkpoint.metadata


def test_splits_that_are_not_whole(tmp_path: Path) -> None:
    for name, rule, options in (
        ("missing", "gguf.split-missing", {"numbers": (0, 2)}),
        ("total", "gguf.split-mixed", {"total": 4}),
    ):
        (tmp_path / name).mkdir()
        assert rule_of(split(tmp_path / name, **options)) == rule
    (tmp_path / "mixed").mkdir()
    folder = split(tmp_path / "mixed")
    files = sorted(folder.iterdir())
    files[1].write_bytes(files[2].read_bytes())
    assert rule_of(folder) == "gguf.split-mixed"
    renamed = files[0].rename(folder / "other.gguf")
    assert rule_of(renamed) == "gguf.split"


def test_one_name_in_two_files_of_a_split(tmp_path: Path) -> None:
    split(tmp_path)
    files = sorted(tmp_path.iterdir())
    files[1].write_bytes(files[1].read_bytes().replace(b"t1", b"t0"))
    assert rule_of(tmp_path) == "gguf.name"


def test_two_files_leave_a_choice(tmp_path: Path) -> None:
    save(tmp_path, build({}, [DENSE]), "a.gguf")
    save(tmp_path, build({}, [DENSE]), "b.gguf")
    assert rule_of(tmp_path) == "detect.several"
    (tmp_path / "b.gguf").rename(tmp_path / "model.gguf")
    with ingot.open(tmp_path) as checkpoint:
        assert checkpoint.location.endswith("model.gguf") or "a" in checkpoint


DATA8, _ = blocks(1)


def test_a_header_without_end(tmp_path: Path) -> None:
    file = save(tmp_path, build({"a": Value(0, 1)}))
    with file.open("r+b") as stream:  # a sparse file: a string as long as the rest of it
        stream.truncate(2 * MAX_HEADER)
        stream.seek(24)
        stream.write(pack("<Q", 2 * MAX_HEADER - 32))
    assert rule_of(file) == "gguf.header-length"


def test_arrays_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_ELEMENTS", 5)
    three = Value(ARRAY, [1, 2, 3], 0)
    with ingot.open(save(tmp_path, build({"a": three}))) as checkpoint:
        assert checkpoint.metadata["a"] == [1, 2, 3]
    assert rule_of(save(tmp_path, build({"a": three, "b": three}))) == "gguf.array"


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    data = build(METADATA, [DENSE, Item("q", (64, 1), Q8_0, DATA8)])
    file = tmp_path / "x.gguf"
    for length in range(1, len(data) - 28):  # the last tensor's padding may be missing
        file.write_bytes(data[:length])
        with pytest.raises(IngotError) as caught:
            ingot.open(file)
        assert str(caught.value.rule).startswith("gguf.")


def test_bytes_behind_the_last_tensor_are_told(tmp_path: Path) -> None:
    report = ingot.verify(save(tmp_path, build({}, [DENSE]) + bytes(64)))
    assert "gguf.trailing" in str(report)


def test_blocks_move_and_are_decoded_where_a_format_has_none(tmp_path: Path) -> None:
    data, values = blocks(4)
    file = save(tmp_path, build(METADATA, [Item("blk.0.attn_q.weight", (64, 4), Q8_0, data)]))
    ingot.convert(file, tmp_path / "x.zt")
    ingot.convert(tmp_path / "x.zt", tmp_path / "x.safetensors")
    for name in ("x.zt", "x.safetensors"):
        with ingot.open(tmp_path / name) as checkpoint:
            assert np.array_equal(checkpoint["blk.0.attn_q.weight"].numpy(), values)
    with ingot.open(tmp_path / "x.zt") as checkpoint:
        assert bytes(checkpoint["blk.0.attn_q.weight"].parts["blocks"].view()) == data
        assert checkpoint.metadata["u64"] == 2**64 - 1
    assert not [finding for finding in ingot.verify(file) if finding.level == "error"]
    ingot.convert(tmp_path / "x.zt", tmp_path / "y.gguf")
    with ingot.open(tmp_path / "y.gguf") as checkpoint:
        assert bytes(checkpoint["blk.0.attn_q.weight"].parts["blocks"].view()) == data
