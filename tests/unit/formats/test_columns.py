"""Headers decoded into columns: what is taken at once is just what a closer look finds; the same files are refused."""

from __future__ import annotations

import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.bytes.checksums import xxh3
from ingot.core.parsing import columns
from ingot.core.runtime import native
from ingot.errors import IngotError
from ingot.ext.squizd import section_reader
from ingot.formats.gguf import cursor as gguf_cursor
from ingot.formats.gguf import header as gguf_header
from ingot.formats.safetensors import header as safetensors_header
from ingot.formats.table import FORMATS
from ingot.formats.zt import reader as zt_reader
from ingot.formats.zt2 import rules as zt2_rules
from ingot.stores.memory import MemoryStore

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("zt", "zt2", "squizd", "gguf", "safetensors")


@pytest.fixture
def closely(monkeypatch):
    """Return a function that says whether all headers go through the checks one by one."""
    decoders = (
        (native, "table_cbor"),
        (safetensors_header, "_decode"),
        (gguf_header, "read_infos"),
        (gguf_cursor.Cursor, "strings"),
    )
    own = [(owner, name, getattr(owner, name)) for owner, name in decoders]

    def choose(wanted: bool) -> None:
        for owner, name, decoder in own:
            monkeypatch.setattr(owner, name, (lambda *given: None) if wanted else decoder)

    return choose


def outcome(kind: str, data: bytes) -> object:
    """Return all that a reader tells of a file: the refusal, or what it found."""
    try:
        name = "f." + kind.removesuffix("2")
        catalog = FORMATS[kind].read(MemoryStore({name: data}), name)
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


def golden(kind: str) -> dict[str, bytes]:
    """Return the corpus of a format, files or what archives hold, less what is large."""
    files = {path.name: path.read_bytes() for path in sorted((GOLDEN / kind).rglob(f"*.{kind}"))}
    for path in sorted((GOLDEN / kind).glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            files |= {name: archive.read(name) for name in archive.namelist() if name.endswith(kind.removesuffix("2"))}
    return {name: data for name, data in files.items() if len(data) < 1 << 20}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_files_are_read_and_refused_alike(closely, kind):
    files = golden(kind)
    assert len(files) > 20
    for name, data in files.items():
        quick, strict = both(closely, kind, data)
        assert quick == strict, name


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
    base = folder / "a.safetensors"
    ingot.save(base, weights(0), metadata={"a": "b:c", "quoted": '{"x": "\\u00e9"}'})
    recipe = folder / "r.toml"
    recipe.write_text('name = "r"\n[[rules]]\nmatch = "*.w"\ncodec = "affine"\noptions = { bits = 4, group = 32 }\n')
    for kind in ("zt", "squizd"):
        ingot.convert(base, folder / f"dense.{kind}")
        ingot.convert(base, folder / f"affine.{kind}", recipe=str(recipe))
    for name, more in (("dense", {}), ("affine", {"recipe": str(recipe)}), ("sha", {"digest": "sha256"})):
        ingot.convert(base, folder / "two.zt", container="2", **more)
        (folder / "two.zt").rename(folder / f"{name}.zt2")
    ingot.convert(base, folder / "dense.gguf", keep_names=True)
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
    if kind == "zt2":
        return int.from_bytes(data[-40:-32], "little"), len(data) - 40
    if kind == "squizd":
        return data.rindex(b"TDIR"), len(data)
    return 0, min(len(data), 2000)


def sealed(kind: str, data: bytes) -> bytes:
    """Return a file whose manifest, behind which the footer's place moved, has the checksum that the footer states."""
    if kind != "zt2":
        return data
    start = int.from_bytes(data[-40:-32], "little")
    manifest = data[start:-40]
    return data[:-32] + struct.pack("<QQ", len(manifest), xxh3(manifest)) + data[-16:]


def test_damaged_files_are_refused_alike(closely, artifacts):
    chance, refused, read = random.Random(5), 0, 0
    for name, data in artifacts.items():
        start, end = header_of(name, data)
        for _ in range(60):
            kind = name.rpartition(".")[2]
            changed = sealed(kind, data[:start] + damaged(data[start:end], chance) + data[end:])
            quick, strict = both(closely, kind, changed)
            assert quick == strict, (name, changed)
            refused, read = refused + (len(strict) == 3), read + (len(strict) == 4)
    assert min(refused, read) > 50


CBOR = b"\x00\x18\x1b\x60\x61\x78\x80\xa1\xff"
ODD = {"safetensors": b'"\\\x1f \x80,}0', "zt": CBOR, "zt2": CBOR}
"""What ends, lengthens or begins something, in JSON and CBOR."""


@pytest.mark.parametrize("kind", sorted(ODD))
def test_an_odd_byte_at_any_place_is_told_alike(closely, tmp_path, kind):
    """Texts are looked at eight bytes at a time, keys and numbers in the forms that writers give them."""
    path = tmp_path / f"few.{kind.removesuffix('2')}"
    few = {"a.rather.long.name": np.ones(3, np.float16), "b": np.ones((1, 2), np.float32)}
    ingot.save(path, few, **({"digest": None} if kind == "zt" else {}))
    if kind == "zt2":
        path = path.with_name("two.zt")
        ingot.convert(tmp_path / "few.zt", path, container="2", digest=None)
    data = path.read_bytes()
    start, end = (8, 8 + int.from_bytes(data[:8], "little")) if kind == "safetensors" else header_of(f".{kind}", data)
    for at in range(start, end):
        for byte in ODD[kind]:
            changed = bytearray(data)
            changed[at] = byte
            quick, strict = both(closely, kind, sealed(kind, bytes(changed)))
            assert quick == strict, (at, byte)


def test_a_header_of_a_large_file_is_taken_at_once():
    """Offsets multiply to more than what 63 bits hold."""
    entry = b'"%c":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}'
    size = 5 << 30
    text = b"{%b,%b}" % (entry % (b"a", size, 0, size), entry % (b"b", size, size, 2 * size))
    found = safetensors_header._decode(text)
    assert found is not None
    assert safetensors_header._fills(found.entries, 2 * size)
    assert found.entries["b"].data_offsets == (size, 2 * size)


DETERMINISTIC = {
    "numbers that are longer than they have to be": (b"\x82\x03\x05", b"\x82\x18\x03\x05"),
    "texts whose lengths are": (b"\x61b", b"\x78\x01b"),
    "keys out of order": (b"\xa2\x61a\x01\x61b\x02", b"\xa2\x61b\x02\x61a\x01"),
    "a longer key first": (b"\xa2\x61b\x02\x62aa\x01", b"\xa2\x62aa\x01\x61b\x02"),
}


@pytest.mark.parametrize("what", sorted(DETERMINISTIC))
def test_only_the_deterministic_form_is_taken_where_it_is_asked_for(what):
    good, bad = DETERMINISTIC[what]
    schema = columns.record(columns.field("v", "any"), columns.field("w", "pair", optional=True))
    for value, known in ((good, True), (bad, False)):
        data = b"\xa1\x61o\xa1\x61n\xa1\x61v" + value
        for deterministic in (False, True):
            found = columns.cbor_table(data, schema, "o", max_depth=8, max_items=99, deterministic=deterministic)
            assert (found is not None) == (known or not deterministic)


@pytest.mark.parametrize("value", [b"\x82\x03\x05", b"\x81\x03", b"\x83\x03\x05\x07", b"\x82\x03\x20", b"\x03"])
def test_a_pair_is_two_natural_numbers(value):
    schema = columns.record(columns.field("w", "pair"))
    found = columns.cbor_table(b"\xa1\x61o\xa1\x61n\xa1\x61w" + value, schema, "o", max_depth=8, max_items=99)
    assert (found is not None) == (value == b"\x82\x03\x05")
    if found is not None:
        assert (found.columns[0].first[0], found.columns[0].second[0]) == (3, 5)


def test_what_we_write_is_not_looked_at_closely(artifacts, monkeypatch):
    def refuse(*given: object) -> None:
        raise AssertionError("looked at closely")

    for module, function in (
        (zt_reader, "check_objects"),
        (zt2_rules, "is_simple_object"),
        (section_reader, "_locate_in_detail"),
        (gguf_header, "_entry"),
        (safetensors_header, "_strict"),
    ):
        monkeypatch.setattr(module, function, refuse)
    for name, data in artifacts.items():
        if name == "affine.squizd":
            continue  # matrices with scales
        found = outcome(name.rpartition(".")[2], data)
        assert len(found[0]) == 10, name


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
REPEATED = {
    "a tensor": f'{{"a":{ENTRY},"a":{ENTRY}}}',
    "a tensor, once escaped": f'{{"a":{ENTRY},"\\u0061":{ENTRY}}}',
    "a tensor with a colon": f'{{"a:b":{ENTRY},"a:b":{ENTRY}}}',
    "a field": '{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "metadata": f'{{"__metadata__":{{"x":"1"}},"__metadata__":{{"x":"1"}},"a":{ENTRY}}}',
    "a key of metadata": f'{{"__metadata__":{{"x":"1:2","x":"1:2"}},"a":{ENTRY}}}',
}


@pytest.mark.parametrize("what", sorted(REPEATED))
def test_a_repeated_key_of_a_safetensors_header_is_refused(what):
    with pytest.raises(IngotError) as caught:
        safetensors_header.parse(REPEATED[what].encode(), 4, "f")
    assert caught.value.rule == "safetensors.duplicate-key"


def test_colons_in_names_and_metadata_are_no_keys():
    header = f'{{"__metadata__":{{"a:b":":","é":"{{:}}"}},"a:b::":{ENTRY}}}'
    found = safetensors_header._decode(header.encode())
    assert found is not None
    assert list(found.entries) == ["a:b::"]
    assert found.metadata == {"a:b": ":", "é": "{:}"}


def test_an_unknown_field_beside_a_missing_one_is_refused():
    header = '{"a":{"dtype":"F32","size":[1],"data_offsets":[0,4]}}'
    with pytest.raises(IngotError) as caught:
        safetensors_header.parse(header.encode(), 4, "f")
    assert caught.value.rule == "safetensors.fields"
