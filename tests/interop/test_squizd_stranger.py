"""A reader of .squizd written from ``spec/squizd.md`` alone: ``struct``, a CBOR decoder of its own, nothing of Ingot's.

It reads NPCL, INT4 and INT2 blocks, with and without a directory, masks and draft heads, to the weights that Ingot
gives, bit for bit. NumPy holds results and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from tests.support.matrix import explore

GOLDEN = Path(__file__).parent.parent / "golden" / "squizd" / "valid"
HALVES = {"f16": "e", "f32": "f", "f64": "d", "i64": "q", "i32": "i", "i16": "h", "i8": "b"}
HALVES |= {"u64": "Q", "u32": "I", "u16": "H", "u8": "B", "bool": "?"}
CODES = {0: "f32", 1: "f16", 2: "bf16"}
CODES |= {256 + i: n for i, n in enumerate(["f64", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool"])}
MAGICS = (b"NPCL", b"INT4", b"INT2", b"ASTW", b"TCAW")


def cbor(data: bytes) -> Any:
    """RFC 8949, definite lengths."""
    value, end = item(data, 0)
    assert end == len(data)
    return value


def item(data: bytes, at: int) -> tuple[Any, int]:
    major, info, at = data[at] >> 5, data[at] & 31, at + 1
    if info >= 24:
        size = 1 << info - 24
        raw, at = data[at : at + size], at + size
        number = int.from_bytes(raw, "big")
    else:
        raw, number = b"", info
    if major in (0, 1):
        return -1 - number if major else number, at
    if major in (2, 3):
        found = data[at : at + number]
        return (found if major == 2 else found.decode()), at + number
    if major == 4:
        items: list[Any] = []
        for _ in range(number):
            value, at = item(data, at)
            items.append(value)
        return items, at
    if major == 5:
        mapping: dict[str, Any] = {}
        for _ in range(number):
            key, at = item(data, at)
            mapping[key], at = item(data, at)
        return mapping, at
    assert major == 7
    if info in (25, 26, 27):
        return struct.unpack(">" + "efd"[info - 25], raw)[0], at
    return {20: False, 21: True, 22: None}[info], at


def f32(value: float) -> float:
    """Round to f32: exact for one operation on f32 values, which a double holds with bits to spare."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def values_of(dtype: str, data: bytes) -> list[Any]:
    if dtype == "bf16":
        return list(
            struct.unpack(f"<{len(data) // 2}f", b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)))
        )
    return list(struct.unpack(f"<{len(data) // struct.calcsize(HALVES[dtype])}{HALVES[dtype]}", data))


def product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class Block:
    """One weight block: its header's numbers, where its payload is, where it ends."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at, self.magic = data, at, data[at : at + 4]
        assert self.magic in MAGICS
        if self.magic == b"NPCL":
            code, rank = struct.unpack_from("<II", data, at + 4)
            self.shape, self.dtype = list(struct.unpack_from(f"<{rank}I", data, at + 12)), CODES[code]
            self.start = at + 12 + 4 * rank
            size = 2 if self.dtype == "bf16" else struct.calcsize(HALVES[self.dtype])
            self.end = self.start + size * product(self.shape)
        elif self.magic in (b"INT4", b"INT2"):
            self.shape, self.dtype = list(struct.unpack_from("<II", data, at + 4)), "f32"
            self.bits = 4 if self.magic == b"INT4" else 2
            self.sub = 0 if self.bits == 4 else struct.unpack_from("<I", data, at + 12)[0]
            self.start = at + (12 if self.bits == 4 else 16)
            self.end = self.start + -(-product(self.shape) * self.bits // 8)
        else:
            raise NotImplementedError(self.magic)

    def values(self, entries: list[tuple[float, float]], group: int) -> list[Any]:
        """Row-major values; ``group`` columns share an entry, 0: all weights do."""
        if self.magic == b"NPCL":
            return values_of(self.dtype, self.data[self.start : self.end])
        rows, cols = self.shape
        per_row = -(-cols // group) if group else 0
        out = []
        for row in range(rows):
            for col in range(cols):
                bit = (row * cols + col) * self.bits
                code = self.data[self.start + bit // 8] >> bit % 8 & (1 << self.bits) - 1
                code -= 1 << self.bits if code >> self.bits - 1 else 0
                scale, zero = entries[row * per_row + col // group if group else 0]
                out.append(f32(scale * f32(code - zero)))
        return out


class Stranger:
    """A file as ``spec/squizd.md`` describes it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.entries: list[tuple[int, float, float]] = []
        magic, version, self.flags, layers = struct.unpack_from("<4sHIH", data)
        assert (magic, version) == (b"SQZD", 1)
        self.block_size = struct.unpack_from("<I", data, 132)[0]
        index = [struct.unpack_from("<IQQQI", data, 256 + 32 * layer) for layer in range(layers)]
        spans = [(offset, offset + length) for _, offset, length, _, _ in index]
        behind = max([256 + 32 * layers, *(end for _, end in spans)])
        self.tensors = self.section(spans, behind, len(data), "layers")
        self.draft: dict[str, np.ndarray] = {}
        if self.flags & 16:
            start, length = struct.unpack_from("<QQ", data, 160)
            assert data[start : start + 4] == b"EGDH"
            blocks = self.walk(start + 8, start + length)
            end = max([start + 8, *(block.end for block in blocks)])
            self.draft = self.section([(start + 8, end)], end, start + length, "draft")

    def walk(self, at: int, end: int) -> list[Block]:
        """The blocks between two offsets, up to a table or directory."""
        found = []
        while at < end:
            if not self.data[at]:
                at += 1
            elif self.data[at : at + 4] in (b"SCZT", b"TDIR"):
                break
            else:
                found.append(Block(self.data, at))
                at = found[-1].end
        return found

    def section(self, spans: list[tuple[int, int]], at: int, end: int, stem: str) -> dict[str, np.ndarray]:
        while at < end and not self.data[at]:
            at += 1
        tables: list[list[tuple[int, float, float]]] = []
        while self.data[at : at + 4] == b"SCZT":
            count = struct.unpack_from("<I", self.data, at + 4)[0]
            tables.append([struct.unpack_from("<Qff", self.data, at + 8 + 16 * i) for i in range(count)])
            at += 8 + 16 * count
        if stem == "layers" and self.data[at : at + 4] != b"TDIR":
            if self.flags & 16:
                at = sum(struct.unpack_from("<QQ", self.data, 160))
            if self.flags & 64 and self.data[at : at + 4] == b"ANLX":
                at += 12 + struct.unpack_from("<Q", self.data, at + 4)[0]
        if self.data[at : at + 4] == b"TDIR" and at < end:
            length = struct.unpack_from("<Q", self.data, at + 4)[0]
            directory = cbor(self.data[at + 12 : at + 12 + length])
            assert directory["version"] == 1
            self.entries = [entry for table in tables for entry in table]
            return {name: self.named(name, about) for name, about in directory["tensors"].items()}
        return self.nameless(spans, tables, stem)

    def named(self, name: str, about: dict[str, Any]) -> np.ndarray:
        block, params = Block(self.data, about["offset"]), about.get("params", {})
        shape = about["shape"]
        rows, cols = (product(shape[:-1]), shape[-1]) if shape else (1, 1)
        if about["codec"] != "sparse_blocks":
            return self.array(block.values(*self.scales(name, about, params, cols)), shape, about["dtype"])
        axis, kept = params["axis"], []
        offset, size = about["mask"]
        for channel in range((rows, cols)[axis]):
            number = channel // self.block_size
            assert number // 8 < size
            if self.data[offset + number // 8] >> number % 8 & 1:
                kept.append(channel)
        inner = params["inner_params"]
        if params.get("stored") == "whole":
            full = self.array(block.values(*self.scales(name, about, inner, cols)), [rows, cols], about["dtype"])
            dropped = [channel for channel in range((rows, cols)[axis]) if channel not in kept]
            full[(slice(None), dropped) if axis else dropped] = 0
            return full.reshape(shape)
        columns = len(kept) if axis else cols
        stored = block.values(*self.scales(name, about, inner, columns))
        out = [0.0] * (rows * cols)
        for number, value in enumerate(stored):
            row, col = divmod(number, columns)
            row, col = (row, kept[col]) if axis else (kept[row], col)
            out[row * cols + col] = value
        return self.array(out, shape, about["dtype"])

    def scales(
        self, name: str, about: dict[str, Any], params: dict[str, Any], cols: int
    ) -> tuple[list[tuple[float, float]], int]:
        """Entries under the tensor's id and how many columns share one."""
        if "first" not in about:
            return [], 0
        id = 0xCBF29CE484222325
        for byte in struct.pack("<I", about["layer"]) + name.encode():
            id = (id ^ byte) * 0x100000001B3 % 2**64
        id = id % 2**63 | ("second" in about) << 63
        entries = [(scale, zero) for own, scale, zero in self.entries if own == id]
        shared = {"tensor": 0, "row": cols}.get(params["granularity"], params.get("group_size"))
        return entries, shared

    def nameless(
        self, spans: list[tuple[int, int]], tables: list[list[tuple[int, float, float]]], stem: str
    ) -> dict[str, np.ndarray]:
        entries = [entry for table in tables for entry in table]
        count = sum(block.magic != b"NPCL" for start, end in spans for block in self.walk(start, end))
        firsts = [entry for entry in entries if not entry[0] >> 63]
        firsts = firsts if len(firsts) == count else entries[:count]
        found, quantized = {}, 0
        for layer, (start, end) in enumerate(spans):
            for number, block in enumerate(self.walk(start, end)):
                pairs: list[tuple[float, float]] = []
                group = 0
                if block.magic != b"NPCL":
                    id, *pair = firsts[quantized]
                    quantized += 1
                    others = [entry for entry in entries if entry not in firsts]
                    pairs = [(scale, zero) for other, scale, zero in others if other == id | 1 << 63]
                    rows, cols = block.shape
                    group = (block.sub or cols * rows // len(pairs)) if pairs else 0
                    pairs = pairs or [(pair[0], pair[1])]
                found[f"{stem}.{layer}.{number}"] = self.array(block.values(pairs, group), block.shape, block.dtype)
        return found

    def array(self, values: list[Any], shape: list[int], dtype: str) -> np.ndarray:
        floats = dtype.startswith(("f", "bf"))
        return np.array(values, np.float32 if floats else None).reshape(shape)


def readable(path: Path) -> bool:
    data = path.read_bytes()
    unread = {"npcl-own-codes", "entries-swapped-nameless"}  # the latter takes a list of usual names
    unread |= {"sparse-full-nameless", "sparse-compacted-nameless", "note-squizd.mask-order+nameless"}
    return not any(magic in data for magic in (b"ASTW", b"TCAW")) and path.stem not in unread


def same(found: np.ndarray, tensor: Any) -> None:
    floats = tensor.dtype in ("f16", "bf16", "f32")
    expected = tensor.numpy("f32") if floats else tensor.numpy()
    assert found.shape == expected.shape
    if floats:
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    else:
        assert np.array_equal(found, expected)


def compare(path: Path) -> None:
    stranger = Stranger(path.read_bytes())
    with ingot.open(path) as checkpoint:
        assert len(stranger.tensors) == len(checkpoint)
        named = b"TDIR" in path.read_bytes()
        assert not named or list(stranger.tensors) == list(checkpoint)
        for found, tensor in zip(stranger.tensors.values(), checkpoint.values(), strict=True):
            same(found, tensor)
        draft = checkpoint.attachments.draft or {}
        assert list(stranger.draft) == list(draft)
        for found, tensor in zip(stranger.draft.values(), draft.values(), strict=True):
            same(found, tensor)


@pytest.mark.parametrize("stem", sorted(path.stem for path in GOLDEN.glob("*.squizd") if readable(path)))
def test_a_stranger_reads_the_golden_files(stem: str) -> None:
    compare(GOLDEN / f"{stem}.squizd")


def test_that_is_most_of_them_and_every_kind() -> None:
    read = {path.stem for path in GOLDEN.glob("*.squizd") if readable(path)}
    assert {"toy", "npcl", "npcl-nameless", "int4-nameless", "int2-nameless", "int2-hybrid", "sparse", "eagle"} <= read
    assert {"int4-odd-columns", "int4-sparse-eagle-coreml", "eagle-nameless", "sparse-dense"} <= read
    assert len(read) > 40


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(np.float16)

    made = {"model.embed_tokens.weight": matrix(24, 16)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        made[prefix + "input_layernorm.weight"] = matrix(16)
        made |= {f"{prefix}self_attn.{one}_proj.weight": matrix(16, 16) for one in "qkvo"}
        made |= {f"{prefix}mlp.{one}_proj.weight": matrix(40, 16) for one in ("gate", "up")}
        made[prefix + "mlp.down_proj.weight"] = matrix(16, 40)
        made[prefix + "experts.weight"] = matrix(2, 3, 16)
        made[prefix + "odd_proj.weight"] = matrix(9, 7)
    return made | {"model.norm.weight": matrix(16), "lm_head.weight": matrix(24, 16)}


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    """Convert the model by a recipe of one rule; return the .squizd file."""

    def run(options: str | None, **more: Any) -> Path:
        ingot.save(tmp_path / "model.safetensors", weights())
        recipe = None
        if options is not None:
            recipe = tmp_path / "recipe.toml"
            rule = f'[[rules]]\nmatch = ["*proj*", "*experts*"]\ncodec = "affine"\noptions = {{ {options} }}\n'
            recipe.write_text(rule)
        ingot.convert(tmp_path / "model.safetensors", tmp_path / "out.squizd", recipe, **more)
        return tmp_path / "out.squizd"

    return run


@pytest.mark.parametrize(
    "options",
    [
        None,
        "bits = 4, group = 8",
        "bits = 4, group = 5",
        'bits = 4, group = "row"',
        'bits = 4, group = "tensor"',
        'bits = 4, group = 16, symmetric = false, signed = true, quantizer = "mse"',
        "bits = 2, group = 8, scales = 'bf16'",
        'bits = 2, group = "row", symmetric = false, signed = true',
        'bits = 2, group = "tensor", scales = "f32"',
    ],
)
def test_a_stranger_reads_what_convert_writes(convert: Callable[..., Path], options: str | None) -> None:
    path = convert(options)
    magic = {None: b"NPCL", "4": b"INT4", "2": b"INT2"}[options and options[7]]
    assert magic in path.read_bytes()
    compare(path)


@pytest.mark.parametrize("options", [None, "bits = 4, group = 8", "bits = 2, group = 8"])
def test_a_stranger_reads_masks(convert: Callable[..., Path], options: str | None) -> None:
    for compact in (False, True):
        path = convert(options, prune=0.4, prune_block=8, prune_compact=compact, overwrite=True)
        assert path.read_bytes()[6] & 8
        compare(path)


def test_a_stranger_reads_a_draft_head(convert: Callable[..., Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    shapes = {"fc.weight": (8, 48), "norm.weight": (8,), "lm_head.weight": (6, 8)}
    shapes |= {f"midlayer.self_attn.{one}_proj.weight": (8, 16) for one in "qkv"}
    shapes |= {"midlayer.self_attn.o_proj.weight": (8, 8), "midlayer.mlp.down_proj.weight": (8, 12)}
    shapes |= {f"midlayer.mlp.{one}_proj.weight": (12, 8) for one in ("gate", "up")}
    head = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mask = np.arange(24) % 4 == 1
    head |= {"d2t": np.flatnonzero(mask) - np.arange(6), "t2d": mask}
    ingot.save(tmp_path / "head.safetensors", head)
    path = convert("bits = 4, group = 8", draft=tmp_path / "head.safetensors")
    compare(path)
    found = Stranger(path.read_bytes()).draft
    assert sorted(found) == sorted(head)
    assert all(np.array_equal(found[name], value) for name, value in head.items())


def test_layers_of_every_family_that_fit(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="names of llama.cpp are those of the package gguf")
    found = [item for item in explore(("squizd",)) if item.made is not None]
    layers = {f"{item.family}.{index}": item for index, item in enumerate(found)}
    assert len(layers) > 50
    ingot.save(tmp_path / "m.squizd", {name: item.made for name, item in layers.items()})
    for name, values in Stranger((tmp_path / "m.squizd").read_bytes()).tensors.items():
        assert np.array_equal(values, layers[name].source.numpy("f32")), (name, layers[name].what)
