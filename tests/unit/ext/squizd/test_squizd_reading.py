"""Reading .squizd: only the bytes asked for, no damage unseen, and where everything lies."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.codecs.table import CODECS
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.ext.squizd import dense_blocks, placement, scan
from ingot.ext.squizd.blocks import Block, npcl
from ingot.ext.squizd.format import SquizdFormat
from ingot.ext.squizd.header import read_header, read_index
from ingot.ext.squizd.placement import layers_of
from ingot.ext.squizd.reader import read_catalog
from ingot.formats.base import Catalog
from ingot.inspect.findings import Finding
from ingot.model.bytesource import MemorySource, Range, RangedSource
from ingot.testing.formats import FormatSuite
from ingot.testing.formats import dense as item
from tests.support.reading import read_all
from tests.support.squizd import Made, squizd
from tests.support.squizd_items import Item, dense, pruned, quantized

FORMAT = SquizdFormat()


def codes(rows: int, cols: int, bits: int) -> np.ndarray[Any, Any]:
    return (np.arange(rows * cols) * 5 % (1 << bits) - (1 << bits - 1)).reshape(rows, cols)


def grouped(name: str, layer: int = 0, rows: int = 4, **about: Any) -> Item:
    entries = [((1 + i % 7) / 8, float(i % 3) if about.get("zeros") else 0.0) for i in range(rows * 2)]
    return quantized(name, codes(rows, 16, 4), 4, entries, 8, layer=layer, **{"scales": "f16", **about})


def whole(rows: int = 4) -> Made:
    """Every kind of section and entry in one file of a few kilobytes."""
    items = [
        dense("model.embed_tokens.weight", "bf16", [rows, 3], bytes(index % 256 for index in range(6 * rows))),
        grouped("model.layers.0.q.weight", rows=rows, zeros=True),
        pruned(grouped("model.layers.0.up.weight"), 0, 10, 2, (0, 3)),
        quantized("model.layers.1.k.weight", codes(4, 6, 4), 4, [(0.5, 0.0)], "tensor", layer=1),
        dense("model.norm.weight", "f32", [3], bytes(range(12)), 1),
    ]
    return squizd(items, draft=[grouped("fc.weight"), dense("d2t", "i64", [2], bytes(16))], coreml=b"PK" * 200)


class CountingSource(MemorySource, RangedSource):
    """Remembers which bytes were asked for; wants nothing read that is not needed."""

    gap = 0

    def __init__(self, data: bytes) -> None:
        super().__init__(data, "f")
        self.mapped = False
        self.read: set[int] = set()

    def view(self, offset: int, length: int) -> memoryview:
        self.read.update(range(offset, offset + length))
        return super().view(offset, length)

    def ranges(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        return [self.view(*range) for range in ranges]

    def readinto(self, offset: int, out: memoryview) -> None:
        self.read.update(range(offset, offset + out.nbytes))
        super().readinto(offset, out)


def payloads(made: Made, catalog: Catalog) -> Iterator[tuple[str, set[int]]]:
    """Each tensor's own bytes: parts in blocks and masks, and all of its entries."""
    for name, tensor in catalog.tensors.items():
        own: set[int] = set()
        for role, part in tensor.parts.items():
            if role not in ("scales", "zeros"):
                own.update(range(part.offset, part.offset + part.length))
        place = made.main.places[name]
        for run in (place.get("first"), place.get("second")):
            own.update(range(run[0], run[0] + 16 * run[1]) if run else ())
        yield name, own


def test_opening_reads_no_weights_and_a_tensor_only_its_own_bytes() -> None:
    """Opening reads 64 bytes where a block's header is expected, and the 64 before it and at a layer's end: padding."""
    made = whole(rows=400)
    source = CountingSource(made.data)
    catalog = read_catalog(source)
    heads = {at + byte for at in made.main.blocks.values() for byte in range(-64, 64)}
    heads |= {
        entry.offset + entry.length - byte
        for entry in read_index(source, read_header(source)[0])[0]
        for byte in range(65)
    }
    weights: set[int] = set().union(*(own for _, own in payloads(made, catalog))) & set(range(made.main.behind))
    assert source.read & weights <= heads
    assert len(weights) > 5 * len(heads)
    assert catalog.attachments.coreml is not None
    assert not source.read & set(range(made.coreml + 64, len(made.data)))
    for name, own in payloads(made, catalog):
        source.read.clear()
        for part in catalog.tensors[name].parts.values():
            part.array()
        assert source.read == own - neutral(made, name)


def neutral(made: Made, name: str) -> set[int]:
    """A first-round entry that says nothing beside sub-block scales is read when the file is opened."""
    place = made.main.places[name]
    return set(range(place["first"][0], place["first"][0] + 16)) if "second" in place else set()


@pytest.mark.parametrize("part", ["packed_weight", "scales", "zeros"])
def test_a_range_of_a_part_that_is_not_checked_reads_only_that_range(part: str) -> None:
    source = CountingSource(whole().data)
    found = read_catalog(source, verify=False).tensors["model.layers.0.q.weight"].parts[part]
    all_bytes = bytes(found.view())
    for start in range(found.nbytes):
        for size in range(1, min(6, found.nbytes - start + 1)):
            source.read.clear()
            out = bytearray(size)
            found.readinto(start, memoryview(out))
            assert out == all_bytes[start : start + size]
            assert len(source.read) <= (size if part == "packed_weight" else 16 * (size // 2 + 1))


def everything(data: bytes) -> tuple[list[str], list[str]]:
    """Rules of what verify --strict would tell, from memory."""
    try:
        catalog = read_catalog(MemorySource(data, "f"))
    except IngotError as error:
        return [error.rule or ""], []
    return read_all(catalog), [rule for rule, _ in (*catalog.notes, *catalog.remarks)]


def test_no_flipped_bit_outside_of_the_directories_goes_unseen() -> None:
    """What names, types and metadata say is covered by no digest; the draft head's directory is, and all else."""
    made = whole()
    assert everything(made.data) == ([], [])
    assert made.draft is not None
    silent = {12, 13}  # arch_id: any is read
    silent |= set(range(made.main.directory, made.main.tail))
    tables = [*made.main.tables, *made.draft.tables]
    unused = {start + 8 + 16 * index + 15 for start, count in tables for index in range(count)}  # 0 becomes -0
    unseen = []
    for at in sorted(set(range(len(made.data))) - silent)[::3]:  # in an entry of 16 bytes, any
        data = bytearray(made.data)
        data[at] ^= 1 << at % 8
        if everything(bytes(data)) == ([], []) and not (at in unused and data[at] == 0x80):
            unseen.append(at)
    assert unseen == []


def test_a_digest_whose_key_is_damaged_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "x.squizd"
    ingot.save(path, {"a.weight": np.ones((4, 8), np.float32)}, metadata={"who": "somebody"})
    data = path.read_bytes()
    assert data.count(b"ingot_digest") == 1
    for at in range(12):
        for bit in (0, 3):
            flipped = bytearray(data)
            flipped[data.index(b"ingot_digest") + at] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(IngotError):
                ingot.open(path)


def test_a_flipped_byte_of_every_part_is_found_by_verify(tmp_path: Path) -> None:
    made, path = whole(), tmp_path / "f.squizd"
    catalog = read_catalog(MemorySource(made.data, "f"))
    places = [part.offset for tensor in catalog.tensors.values() for part in tensor.parts.values() if part.offset]
    entry = made.main.places["model.layers.0.q.weight"]["second"][0] + 32
    assert made.draft is not None
    places += [entry + 8, entry + 9, entry + 12, entry + 15, made.draft.blocks["d2t"] + 17, made.coreml + 20]
    assert len(places) >= 12
    for at in places:
        path.write_bytes(made.patch(at, "B", made.data[at] ^ 0x40))
        for io in ("pread", "mmap"):
            assert any(finding.level == "error" for finding in ingot.verify(path, io=io))


def test_a_file_cut_anywhere_is_refused_or_told() -> None:
    """Cut exactly where a table or the directory begins a file is one without; with masks not even that."""
    made = squizd([grouped("model.layers.0.q.weight"), dense("n", "f32", [2], bytes(8))])
    for size in range(len(made.data)):
        rules, notes = everything(made.data[:size])
        assert rules or notes == ["squizd.no-directory"]
        assert bool(rules) == (size not in (made.main.tables[1][0], made.main.directory))
    masked = whole()
    assert all(everything(masked.data[:size])[0] for size in range(len(masked.data)))


def test_blocks_of_a_layer_follow_each_other_and_padding_before_layers_is_zero() -> None:
    names = [f"model.layers.{layer}.{kind}" for layer in range(3) for kind in ("a", "b.weight")]
    items = [item(name, (index + 1, 3), "u8", index) for index, name in enumerate(names)]
    target, _ = FormatSuiteOf().write(items)
    data = bytes(target.files["model.squizd"])
    catalog = read_catalog(MemorySource(data, "f"))
    end = 256 + 32 * 3
    for number, tensor in enumerate(catalog.tensors.values()):
        part = tensor.parts["data"]
        header = part.offset - (12 + 4 * 2)
        assert data[header : header + 4] == b"NPCL"
        assert header - end == (-(end + 20) % 64 if number % 2 == 0 else 0)
        assert not any(data[end:header])
        end = part.offset + part.length
    assert (catalog.notes, catalog.remarks) == ((), ())


class FormatSuiteOf(FormatSuite):
    """Its ``write`` alone."""

    format = FORMAT
    __test__ = False


def spans(data: bytes) -> list[tuple[int, int]]:
    count = struct.unpack_from("<H", data, 10)[0]
    return [struct.unpack_from("<QQ", data, 256 + 32 * layer + 4) for layer in range(count)]


def layered(names: Sequence[str]) -> tuple[list[str], list[int], bytes]:
    """Write tensors of these names; return names in file order and the layer that holds each."""
    target, _ = FormatSuiteOf().write([item(name, (2,), "u8") for name in names])
    data = bytes(target.files["model.squizd"])
    catalog = read_catalog(MemorySource(data, "f"))
    places = spans(data)
    found = []
    for tensor in catalog.tensors.values():
        at = tensor.parts["data"].offset
        found.append(next(i for i, (start, size) in enumerate(places) if start <= at < start + size))
    return list(catalog.tensors), found, data


def test_layers_are_those_of_the_names() -> None:
    names = ["lm_head.weight", "model.layers.3.b", "model.norm.weight", "model.layers.0.a", "model.embed_tokens.weight"]
    order, layers, data = layered(names)
    assert order == [names[4], names[3], names[1], *sorted((names[0], names[2]), key=names.index)]
    assert layers == [0, 0, 3, 3, 3]
    assert [size for _, size in spans(data)][1:3] == [0, 0]


def test_names_without_layers_make_one() -> None:
    assert layered(["b", "a", "c.weight"])[1] == [0, 0, 0]
    assert layered([])[2][10:12] == b"\1\0"


@pytest.mark.parametrize(("highest", "count"), [(65_534, 65_535), (65_535, 1), (10**30, 1)])
def test_the_number_of_layers_has_16_bits(highest: int, count: int) -> None:
    names = ["model.layers.0.a", f"model.layers.{highest}.a", "lm_head.weight"]
    assert layers_of(names)[1] == count
    order, layers, data = layered(names)
    assert struct.unpack_from("<H", data, 10)[0] == count
    assert sorted(order) == sorted(names)
    assert layers == ([0, highest, highest] if count > 1 else [0, 0, 0])


@pytest.mark.parametrize("scales", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("group", [3, 8, "row", "tensor"])
@pytest.mark.parametrize("zeros", [False, True])
def test_rounds_of_scales(scales: str, group: int | str, zeros: bool) -> None:
    rows, cols = 3, 8
    count = {"row": rows, "tensor": 1}.get(str(group)) or rows * -(-cols // int(group))
    entries = [((1 + i) / 16, float(i - 2) if zeros else 0.0) for i in range(count)]
    made = squizd([quantized("t", codes(rows, cols, 4), 4, entries, group, scales=scales, zeros=zeros)])
    assert len(made.main.tables) == (1 if group == "tensor" else 2)
    tensor = read_catalog(MemorySource(made.data, "f")).tensors["t"]
    per = cols if isinstance(group, str) else group
    expected = np.empty((rows, cols), np.float32)
    for row in range(rows):
        for col in range(cols):
            scale, zero = entries[0 if group == "tensor" else row * -(-cols // per) + col // per]
            expected[row, col] = np.float32(scale) * (np.float32(codes(rows, cols, 4)[row, col]) - np.float32(zero))
    assert np.array_equal(CODECS["affine"].decode(tensor, "f32"), expected)


def test_odd_columns_are_read_as_one_stream_without_a_directory() -> None:
    for bits, cols in ((4, 5), (2, 7), (2, 3)):
        made = squizd([quantized("t", codes(5, cols, bits), bits, [(0.25, 0.0)])], named=False)
        tensor = read_catalog(MemorySource(made.data, "f")).tensors["layers.0.0"]
        assert tensor.params["packing"] == "flat_lsb"
        assert np.array_equal(CODECS["affine"].decode(tensor, "f32"), codes(5, cols, bits) * np.float32(0.25))


def test_too_many_blocks_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    made = squizd([dense("t", "u8", [1], b"x"), dense("u", "u8", [1], b"x")], named=False)
    monkeypatch.setattr(scan, "MAX_BLOCKS", 1)
    with pytest.raises(FormatError) as caught:
        read_catalog(MemorySource(made.data, "f"))
    assert caught.value.rule == "squizd.too-many-blocks"
    empty = squizd([], named=False).data + 5000 * (b"SCZT" + bytes(4))
    with pytest.raises(FormatError) as caught:
        read_catalog(MemorySource(empty, "f"))
    assert caught.value.rule == "squizd.scale-table"


def test_hostile_parameters_cost_no_time() -> None:
    def edit(root: Any) -> Any:
        root["tensors"]["t"]["shape"] = [2**32 - 1] * 200_000
        return root

    with pytest.raises(FormatError) as caught:
        read_catalog(MemorySource(squizd([grouped("t")], edit=edit).data, "f"))
    assert caught.value.rule == "squizd.directory-conflict"
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize("group", ["8", '"row"', '"tensor"'])
def test_matrices_without_elements_come_back(tmp_path: Path, shape: tuple[int, int], group: str) -> None:
    (tmp_path / "r.toml").write_text(f'[[rules]]\ncodec = "affine"\noptions = {{ bits = 4, group = {group} }}\n')
    ingot.save(tmp_path / "a.safetensors", {"t": np.ones(shape, np.float32), "u": np.ones((2, 8), np.float32)})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "b.squizd", tmp_path / "r.toml")
    assert ingot.verify(tmp_path / "b.squizd", strict=True) == []
    with ingot.open(tmp_path / "b.squizd") as checkpoint:
        assert checkpoint["t"].codec == "affine"
        assert checkpoint["t"].numpy().shape == shape


def test_ids_that_collide_are_refused_by_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "tensor_id", lambda layer, name: 1)
    tensors = read_catalog(MemorySource(squizd([grouped("t"), grouped("u")]).data, "f")).tensors
    with pytest.raises(UnsupportedError) as caught:
        placement.place_tensors([tensor.spec() for tensor in tensors.values()], [0, 0], 1)
    assert caught.value.rule == "squizd.id-collision"


def test_names_are_hashed_once_a_layer_however_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, count, real = 0, 2000, scan.tensor_id

    def counted(layer: int, name: str) -> int:
        nonlocal calls
        calls += 1
        return real(layer, name)

    monkeypatch.setattr(scan, "tensor_id", counted)
    made = squizd([quantized(f"t{number}", codes(1, 2, 4), 4, [(1.0, 0.0)]) for number in range(count)], named=False)
    assert len(read_catalog(MemorySource(made.data, "f")).tensors) == count
    assert calls < count


def test_sub_block_scales_may_lie_in_any_of_many_tables() -> None:
    items = [quantized(f"t{number}", codes(1, 2, 4), 4, [(1.0, 0.0)], "row") for number in range(500)]
    made = squizd(items, tables=lambda both: [both[0], *[[]] * 4000, both[1]])
    assert everything(made.data) == ([], [])


def errors(findings: Sequence[Finding]) -> list[str]:
    return [found.rule for found in findings if found.level == "error"]


def test_verify_decodes_what_is_stored_and_not_what_was_dropped(tmp_path: Path) -> None:
    """A mask of a byte can claim any number of rows: some are refused, and none are gone through."""
    empty = quantized("t", codes(0, 16, 4), 4, [(0.5, 0.0)])
    path = tmp_path / "f.squizd"
    path.write_bytes(squizd([pruned(empty, 0, 2**31, 2**31, ())]).data)
    assert errors(ingot.verify(path)) == ["sparse_blocks.size"]
    path.write_bytes(squizd([pruned(empty, 0, 2**12, 2**12, ())]).data)
    assert not errors(ingot.verify(path, strict=True))
    nan = dense("t", "bf16", [2, 2], b"\xc0\x7f\x00\x00" * 2)  # kept as it is: no quantizer made it
    path.write_bytes(squizd([pruned(nan, 0, 6, 2, (1,))]).data)
    assert not errors(ingot.verify(path, strict=True))
    wrong = pruned(quantized("t", codes(2, 4, 4), 4, [(float("inf"), 0.0)]), 0, 6, 2, (1,))
    path.write_bytes(squizd([wrong]).data)
    assert errors(ingot.verify(path)) == ["codec.non-finite"]


def test_tensors_of_one_shape_share_what_their_block_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def counted(dtype: str, shape: tuple[int, ...]) -> Block:
        made.append(shape)
        return npcl(dtype, shape)

    monkeypatch.setattr(dense_blocks, "npcl", counted)
    for kind, wanted in (("f4", []), (ml_dtypes.float8_e4m3fn, [(3, 5), (3, 6)])):  # a storage type needs no block
        arrays = {f"t{index}": np.full((3, 5 + index % 2), index % 8).astype(kind) for index in range(40)}
        ingot.save(tmp_path / "a.squizd", arrays, overwrite=True)
        dense_blocks._dense.cache_clear()
        made.clear()
        with ingot.open(tmp_path / "a.squizd") as checkpoint:
            assert [int(checkpoint[f"t{index}"].numpy()[0, 0]) for index in range(40)] == [n % 8 for n in range(40)]
        assert sorted(made) == wanted
