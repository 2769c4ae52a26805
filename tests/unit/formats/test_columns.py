"""Headers decoded into columns: what is taken at once is just what a closer look finds; the same files are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core import native
from ingot.errors import IngotError
from ingot.formats.gguf import header as gguf_header
from ingot.formats.safetensors import header as safetensors_header
from ingot.formats.squizd import section_reader
from ingot.formats.table import FORMATS
from ingot.formats.wdelta import header as wdelta_header
from ingot.formats.wdelta import walk
from ingot.formats.zt import reader as zt_reader
from ingot.stores.memory import MemoryStore

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("zt", "squizd", "wdelta", "gguf", "safetensors")
HEADS = native.Heads


class Slow:
    """Native decoders that are in doubt of everything."""

    def __init__(self, *given: Any) -> None:
        self.columns = HEADS(*given).columns

    def take(self, *given: object) -> None: ...

    def rows(self) -> int:
        return 0


@pytest.fixture
def closely(monkeypatch):
    """Return a function that says whether all headers are to be looked at closely."""
    decoders = {name: getattr(native, name) for name in ("table_json", "table_cbor", "Heads")}

    def choose(wanted: bool) -> None:
        for name, decoder in decoders.items():
            slow: Any = Slow if name == "Heads" else (lambda *given: None)
            monkeypatch.setattr(native, name, slow if wanted else decoder)

    return choose


def outcome(kind: str, data: bytes) -> object:
    """Return all that a reader tells of a file: the refusal, or what it found."""
    try:
        catalog = FORMATS[kind].read(MemoryStore({"f." + kind: data}), "f." + kind)
    except IngotError as error:
        return type(error), error.rule, str(error)
    tensors = []
    for name, tensor in catalog.tensors.items():
        fields = ("dtype", "type", "offset", "length", "encoding", "uncompressed_length", "digest", "chunks", "where")
        parts = [(role, *(getattr(part, field) for field in fields)) for role, part in tensor.parts.items()]
        shown = [type(size) for size in tensor.shape]
        tensors.append((name, tensor.shape, shown, tensor.dtype, tensor.codec, repr(tensor.params), parts))
    said = repr(catalog.metadata), list(catalog.headers.values()), list(catalog.notes), list(catalog.remarks)
    return tensors, said, catalog.manifest_digest, catalog.receipt


def both(closely, kind: str, data: bytes) -> tuple[object, object]:
    closely(True)
    strict = outcome(kind, data)
    closely(False)
    return outcome(kind, data), strict


@pytest.mark.parametrize("kind", KINDS)
def test_golden_files_are_read_and_refused_alike(closely, kind):
    files = [path for path in sorted((GOLDEN / kind).rglob(f"*.{kind}")) if path.stat().st_size < 1 << 20]
    assert len(files) > 20
    for path in files:
        quick, strict = both(closely, kind, path.read_bytes())
        assert quick == strict, path.name


def weights(seed: int) -> dict[str, np.ndarray]:
    """Return tensors of several shapes and types, one without elements, one without dimensions."""
    generator = np.random.default_rng(seed)
    named = {f"layers.{index}.w": generator.standard_normal((8, 32)).astype(np.float32) for index in range(4)}
    named |= {f"layers.{index}.norm": generator.standard_normal(32).astype(np.float32) for index in range(4)}
    return named | {"odd": np.ones((2, 3, 1), np.float32), "one": np.float32(2) * np.ones((), np.float32)}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, bytes]:
    """Return files as we write them, by name."""
    folder = tmp_path_factory.mktemp("columns")
    base, other = folder / "a.safetensors", folder / "b.safetensors"
    ingot.save(base, weights(0), metadata={"a": "b:c", "quoted": '{"x": "\\u00e9"}'})
    ingot.save(other, weights(1))
    recipe = folder / "r.toml"
    recipe.write_text('name = "r"\n[[rules]]\nmatch = "*.w"\ncodec = "affine"\noptions = { bits = 4, group = 32 }\n')
    for kind in ("zt", "squizd"):
        ingot.convert(base, folder / f"dense.{kind}")
        ingot.convert(base, folder / f"affine.{kind}", recipe=str(recipe))
    ingot.convert(base, folder / "dense.gguf")
    for strategy in ("int4", "sparse", "quantized"):
        ingot.diff(base, other, folder / f"{strategy}.wdelta", strategy=strategy)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix[1:] in KINDS}


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Change, take out or put in a byte or two; what headers say of numbers and types most of all."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(len(out))
        what = chance.random()
        if what < 0.6:
            out[at] = chance.choice((0, 1, 255, out[at] ^ 1 << chance.randrange(8), chance.randrange(256)))
        elif what < 0.8:
            del out[at]
        else:
            out.insert(at, chance.choice(b'0"\\ -e{}[],:\x00\xff'))
    return bytes(out)


def header_of(name: str, data: bytes) -> tuple[int, int]:
    """Return where most of what is said stands."""
    kind = name.rpartition(".")[2]
    if kind == "zt":
        return len(data) - 16 - int.from_bytes(data[-16:-8], "little"), len(data)
    if kind == "squizd":
        return data.rindex(b"TDIR"), len(data)
    return 0, len(data) if kind == "wdelta" else min(len(data), 2000)


def test_damaged_files_are_refused_alike(closely, artifacts):
    chance, refused, read = random.Random(5), 0, 0
    for name, data in artifacts.items():
        start, end = header_of(name, data)
        for _ in range(60):
            changed = data[:start] + damaged(data[start:end], chance) + data[end:]
            quick, strict = both(closely, name.rpartition(".")[2], changed)
            assert quick == strict, (name, changed)
            refused, read = refused + (len(strict) == 3), read + (len(strict) == 4)
    assert min(refused, read) > 50


ODD = {"safetensors": b'"\\\x1f \x80,}0', "zt": b"\x00\x18\x1b\x60\x61\x78\x80\xa1\xff"}
"""What ends, lengthens or begins something, in JSON and CBOR."""


@pytest.mark.parametrize("kind", sorted(ODD))
def test_an_odd_byte_at_any_place_is_told_alike(closely, tmp_path, kind):
    """Texts are looked at eight bytes at a time, keys and numbers in the forms that writers give them."""
    path = tmp_path / f"few.{kind}"
    few = {"a.rather.long.name": np.ones(3, np.float16), "b": np.ones((1, 2), np.float32)}
    ingot.save(path, few, **({"digest": None} if kind == "zt" else {}))
    data = path.read_bytes()
    start, end = header_of(path.name, data) if kind == "zt" else (8, 8 + int.from_bytes(data[:8], "little"))
    for at in range(start, end):
        for byte in ODD[kind]:
            changed = bytearray(data)
            changed[at] = byte
            quick, strict = both(closely, kind, bytes(changed))
            assert quick == strict, (at, byte)


def test_what_we_write_is_not_looked_at_closely(artifacts, monkeypatch):
    def refuse(*given: object) -> None:
        raise AssertionError("looked at closely")

    for module, function in (
        (zt_reader, "check_objects"),
        (section_reader, "_closely"),
        (walk, "_walk"),
        (gguf_header, "_entry"),
        (safetensors_header, "_check_types"),
    ):
        monkeypatch.setattr(module, function, refuse)
    monkeypatch.setattr(safetensors_header, "_strict", lambda *given: safetensors_header.Header({}, {}))
    for name, data in artifacts.items():
        if name == "affine.squizd":
            continue  # matrices with scales
        found = outcome(name.rpartition(".")[2], data)
        assert len(found[0]) == 10, name


def test_an_entry_of_columns_is_that_of_the_closer_look(artifacts):
    for strategy in ("int4", "sparse", "quantized"):
        raw = artifacts[f"{strategy}.wdelta"]
        data = raw[15 : 15 + int.from_bytes(raw[11:15], "little")]
        version = raw[7]
        header = wdelta_header.parse(data, version, "f")
        assert header.columns is not None
        assert dict(header.tensors) == wdelta_header._parsed(data, version, "f").tensors
