"""Properties of the .squizd writer and reader: what is written is read, and changed bytes never end in a crash."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.numeric.blocks import Blocks
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import IngotError
from ingot.ext.squizd.format import SquizdFormat
from ingot.ext.squizd.reader import read_catalog
from ingot.formats.base import WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.base import file_id
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import Item, dense, feed
from tests.support.reading import checked, read_all
from tests.support.squizd_items import fnv

CORPUS = {
    path.relative_to(path.parent.parent).as_posix(): path.read_bytes()
    for path in sorted((Path(__file__).parent.parent / "golden" / "squizd").rglob("*.squizd"))
}
FORMAT = SquizdFormat(compact=True)
PREFIXES = st.sampled_from(["", "model.", "model.layers.0.", "model.layers.3.", "h.1.", "layers.70000."])
NAMES = st.builds(lambda prefix, name: prefix + name, PREFIXES, st.text(max_size=8) | st.sampled_from(["norm.weight"]))
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
FINITE = st.floats(allow_nan=False, width=16)


def bits(draw: st.DrawFn, size: int) -> bytes:
    return draw(st.binary(min_size=size, max_size=size))


def scales_of(draw: st.DrawFn, count: int, dtype: str) -> bytes:
    values = draw(st.lists(FINITE, min_size=count, max_size=count))
    if dtype == "bf16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{count}{'e' if dtype == 'f16' else 'f'}", *values)


@st.composite
def integers(draw: st.DrawFn, name: str, rows: int, cols: int, width: int) -> Item:
    """A quantized matrix of any codes and scales."""
    kind = draw(st.sampled_from(["group", "row", "tensor"]))
    group = draw(st.integers(1, 8))
    count = {"group": rows * -(-cols // group), "row": rows, "tensor": 1}[kind]
    dtype, zeros = draw(st.sampled_from(["f16", "bf16", "f32"])), draw(st.booleans())
    packing = "flat_lsb" if cols * width % 8 or draw(st.booleans()) else "rows_lsb"
    params = {"codec_version": 1, "bits": width, "granularity": kind, "axis": -1, "packing": packing, "signed": True}
    params |= {"group_size": group} if kind == "group" else {}
    params |= {"zeros": zeros, "dtype": "f32"}
    parts = {"packed_weight": bits(draw, -(-rows * cols * width // 8)), "scales": scales_of(draw, count, dtype)}
    parts |= {"zeros": scales_of(draw, count, dtype)} if zeros else {}
    specs = tuple(PartSpec(role, "u8" if role == "packed_weight" else dtype, len(data)) for role, data in parts.items())
    return Item(TensorSpec(name, (rows, cols), "f32", "affine", specs, params), parts)


@st.composite
def pictures(draw: st.DrawFn, name: str, rows: int, cols: int) -> Item:
    width, height = draw(st.sampled_from([(4, 4), (8, 5), (12, 12)]))
    params = {"codec_version": 1, "footprint": f"{width}x{height}", "profile": "ldr", "dtype": "f32"}
    parts = {"blocks": bits(draw, -(-rows // height) * -(-cols // width) * 16)}
    parts |= {"scales": scales_of(draw, 1, "f32"), "zeros": scales_of(draw, 1, "f32")}
    specs = tuple(PartSpec(role, "u8" if role == "blocks" else "f32", len(data)) for role, data in parts.items())
    return Item(TensorSpec(name, (rows, cols), "f32", "astc", specs, params), parts)


@st.composite
def triples(draw: st.DrawFn, name: str, rows: int, cols: int) -> Item:
    """Parts of the right sizes, the two that only bytes tell of any."""
    tiles = -(-rows // 64) * -(-cols // 64)
    parts = {"counts": bytes(4 * tiles)} | {f"bitmap{i}": bytes(512 * tiles) for i in (1, 2, 3)}
    parts |= {"high": draw(st.binary(max_size=100)), "fallback": 2 * draw(st.binary(max_size=50))}
    dtypes = {"counts": "u16", "high": "u8", "fallback": "u16"}
    known = draw(st.booleans())
    specs = tuple(
        PartSpec(
            role, dtypes.get(role, "u64"), len(data) if known or role not in ("high", "fallback") else None, limit=200
        )
        for role, data in parts.items()
    )
    params = {"codec_version": 1, "start": draw(st.integers(-1, 248)), "dtype": "bf16"}
    return Item(TensorSpec(name, (rows, cols), "bf16", "tca_tbe", specs, params), parts)


@st.composite
def tensor(draw: st.DrawFn, name: str, primary: str, block: int) -> Item:
    """A dense tensor or one of the primary encoding, pruned or not."""
    if primary == "dense" or draw(st.booleans()):
        made = dense(name, draw(SHAPES), draw(st.sampled_from(sorted(DTYPES))), draw(st.integers(0, 99)))
    else:
        rows, cols = draw(st.integers(0, 9)), draw(st.integers(0, 20))
        width = 4 if primary == "int4" or draw(st.booleans()) else 2
        kinds = {"astc": pictures(name, rows, cols), "tca": triples(name, rows, cols)}
        made = draw(kinds.get(primary, integers(name, rows, cols, width)))
    return draw(prune(made, block)) if len(made.spec.shape) == 2 and draw(st.booleans()) else made


@st.composite
def prune(draw: st.DrawFn, item: Item, block: int) -> Item:
    """The tensor as what was kept of a larger one."""
    spec, axis = item.spec, draw(st.integers(0, 1))
    size = spec.shape[axis]
    blocks = draw(st.lists(st.booleans(), max_size=4))
    whole = [True] * (size // block) + blocks
    if size % block or not whole:
        return item
    kept = [number for number, keep in enumerate(sorted(whole, key=lambda _: draw(st.integers(0, 9)))) if keep]
    kept = kept[: size // block]
    if len(kept) * block != size:
        return item
    mask = sum(1 << number for number in kept).to_bytes(-(-len(whole) // 8), "little")
    channels = len(whole) * block
    assert Blocks(channels, block, mask).kept_channels == size
    params = {"codec_version": 1, "axis": axis, "block": block, "channels": channels, "kept": size}
    params |= {"inner": file_id(spec.codec), "inner_params": dict(spec.params), "dtype": spec.dtype}
    shape = (channels, spec.shape[1]) if axis == 0 else (spec.shape[0], channels)
    parts = (PartSpec("mask", "u8", len(mask)), *spec.parts)
    return Item(TensorSpec(spec.name, shape, spec.dtype, "sparse_blocks", parts, params), {"mask": mask, **item.parts})


@st.composite
def models(draw: st.DrawFn) -> list[Item]:
    primary, block = draw(st.sampled_from(["dense", "int4", "int2", "astc", "tca"])), draw(st.integers(1, 3))
    return [draw(tensor(name, primary, block)) for name in draw(st.lists(NAMES, max_size=6, unique=True))]


def carried(item: Item) -> bool:
    try:
        item.spec.name.encode()
    except UnicodeEncodeError:
        return False
    return FORMAT.why_unsupported(item.spec) is None


@settings(deadline=None)
@given(models(), st.sampled_from(["crc32c", "sha256", None]), st.integers(1, 50))
def test_what_is_written_is_read(items: list[Item], digest: str | None, step: int) -> None:
    kept = [item for item in items if carried(item)]
    assert all(carried(item) for item in items if item.spec.name.isascii())
    specs = [item.spec for item in kept]
    kept = [kept[index] for index in FORMAT.order(specs)]
    specs, options, target = [item.spec for item in kept], WriteOptions(digest=digest), MemoryTarget()
    writer = FORMAT.writer(target, "f.squizd", Artifact(specs, {"k": "v"}), options)
    records = [feed(writer, item, step) for item in kept]
    assert writer.finish() == ["f.squizd"]
    data = bytes(target.files["f.squizd"])
    catalog = read_catalog(MemorySource(data, "f"))
    assert list(catalog.tensors) == [spec.name for spec in specs]
    assert (dict(catalog.metadata), catalog.notes) == ({"k": "v"}, ())
    for item, record in zip(kept, records, strict=True):
        found = catalog.tensors[item.spec.name]
        assert (found.shape, found.dtype, found.codec) == (item.spec.shape, item.spec.dtype, item.spec.codec)
        assert found.params == item.spec.params
        assert {role: bytes(part.stored()) for role, part in found.parts.items()} == item.parts
        assert all((part.digest is None) == (digest is None) for part in found.parts.values())
        assert all(0 <= offset <= offset + length <= len(data) for _, offset, length, _ in record["blobs"])
    size = FORMAT.size(Artifact(specs, {"k": "v"}), options)
    assert size == len(data) if all(spec.nbytes is not None for spec in specs) else size >= len(data)


@settings(deadline=None)
@given(models(), st.integers(0, 6))
def test_a_resumed_writer_gives_the_same_bytes(items: list[Item], done: int) -> None:
    items = [item for item in items if carried(item)]
    items = [items[index] for index in FORMAT.order([item.spec for item in items])]
    specs, whole, resumed = [item.spec for item in items], MemoryTarget(), MemoryTarget()
    writer = FORMAT.writer(whole, "f.squizd", Artifact(specs), WriteOptions())
    for item in items:
        feed(writer, item)
    writer.finish()
    first = FORMAT.writer(resumed, "f.squizd", Artifact(specs), WriteOptions())
    records = [feed(first, item) for item in items[:done]]
    if done < len(items):
        first.begin(items[done].spec)
    first.abort()
    second = FORMAT.writer(resumed, "f.squizd", Artifact(specs), WriteOptions())
    for record in records:
        second.restore(record)
    for item in items[done:]:
        feed(second, replace(item))
    second.finish()
    assert resumed.files == whole.files


NUMBERS = st.sampled_from([0, 1, 2, 63, 64, 255, 2**16, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
EDITS = st.one_of(
    st.tuples(st.just("put"), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("put"), st.builds(lambda number: number.to_bytes(8, "little"), NUMBERS)),
    st.tuples(st.just("put"), st.builds(lambda number: (number % 2**32).to_bytes(4, "little"), NUMBERS)),
    st.tuples(st.just("insert"), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("delete"), st.integers(1, 8)),
    st.tuples(st.just("cut"), st.none()),
)


def mutated(data: bytes, edits: list[tuple[int, tuple[str, Any]]], repair: bool) -> bytes:
    out = bytearray(data)
    for position, (kind, value) in edits:
        at = position % (len(out) + 1)
        if kind == "put":
            out[at : at + len(value)] = value
        elif kind == "insert":
            out[at:at] = value
        elif kind == "delete":
            del out[at : at + value]
        else:
            del out[at:]
    if repair and len(out) >= 192:
        struct.pack_into("<I", out, 14, zlib.crc32(out[128:160]))
        struct.pack_into("<Q", out, 18, fnv(bytes(out[160:192])))
    return bytes(out)


POSITIONS = st.integers(0, 20_000) | st.integers(0, 400)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(sorted(CORPUS)), st.lists(st.tuples(POSITIONS, EDITS), min_size=1, max_size=3), st.booleans())
def test_changed_files_open_or_end_in_one_clear_error(
    name: str, edits: list[tuple[int, tuple[str, Any]]], repair: bool
) -> None:
    data = mutated(CORPUS[name], edits, repair)
    try:
        rules = read_all(read_catalog(MemorySource(data, "f")))
    except IngotError as error:
        rules = [checked(error)]
    assert all("." in rule for rule in rules)
