"""What .squizd carries and what it refuses to, before a byte is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError, UsageError
from ingot.ext.squizd.format import SquizdFormat
from ingot.ext.squizd.reader import read_catalog
from ingot.formats.base import WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.base import OtherLayout
from ingot.model.layouts.sparse import MaskLayout
from ingot.model.layouts.texture import AstcLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import dense, feed

FORMAT = SquizdFormat()
PARAMS: dict[str, Any] = {"codec_version": 1, "bits": 4, "granularity": "row", "axis": -1, "packing": "rows_lsb"}
PARAMS |= {"signed": True, "zeros": False, "dtype": "f32"}
PARTS = (PartSpec("packed_weight", "u8", 8), PartSpec("scales", "f16", 4))
GOOD = TensorSpec("t", (2, 8), "f32", "affine", PARTS, PARAMS)
SPARSE = {"codec_version": 1, "axis": 0, "block": 2, "channels": 6, "kept": 2, "inner": "quantized_group"}


def with_params(**changes: Any) -> TensorSpec:
    return replace(GOOD, params={**PARAMS, **changes})


def pruned(mask: int = 1, **changes: Any) -> TensorSpec:
    parts = (PartSpec("mask", "u8", mask), *PARTS)
    params = {**SPARSE, "inner_params": PARAMS, "dtype": "f32", **changes}
    return TensorSpec("t", (6, 8), "f32", "sparse_blocks", parts, params)


def bitmap(dtype: str = "bf16", aligned: bool = True, inner: Any = ("dense", {})) -> TensorSpec:
    parts = (PartSpec("mask", "u8", 16), PartSpec("nonzeros", dtype, 6))
    params = MaskLayout(dtype, 3, OtherLayout(*inner), aligned).attributes()
    return TensorSpec("t", (2, 64), dtype, "sparse_mask", parts, params)


CARRIED = {
    "quantized": GOOD,
    "flat": with_params(packing="flat_lsb"),
    "three dimensions": replace(GOOD, shape=(1, 2, 8)),
    "one dimension": replace(GOOD, shape=(16,), parts=(PARTS[0], PartSpec("scales", "f16", 2))),
    "pruned": pruned(),
    "bitmap": bitmap(),
    "bitmap of odd columns": replace(bitmap(), shape=(2, 3)),
}
REFUSED = {
    "codec": replace(GOOD, codec="palette"),
    "three bits": with_params(bits=3),
    "bits as text": with_params(bits="4"),
    "unsigned": with_params(signed=False),
    "high bits first": with_params(packing="rows_msb"),
    "zTensor's own attributes": replace(GOOD, params={"bits": 4, "group_size": 8, "packing": "8_per_i32"}),
    "group of nothing": with_params(granularity="group", group_size=0),
    "rows that end within a byte": replace(GOOD, shape=(2, 7)),
    "two scales for a matrix": with_params(granularity="tensor"),
    "scales of f64": replace(GOOD, parts=(PARTS[0], PartSpec("scales", "f64", 16))),
    "no scales": replace(GOOD, parts=PARTS[:1]),
    "codes too few": replace(GOOD, parts=(PartSpec("packed_weight", "u8", 7), PARTS[1])),
    "zero points unlike scales": replace(GOOD, parts=(*PARTS, PartSpec("zeros", "f32", 8))),
    "another part": replace(GOOD, parts=(*PARTS, PartSpec("order", "u8", 8))),
    "zstd": replace(GOOD, parts=(PartSpec("packed_weight", "u8", 6, None, "zstd", 8), PARTS[1])),
    "element type": replace(GOOD, dtype="posit16"),
    "65 dimensions": TensorSpec("t", (1,) * 65, "f32", "dense", (PartSpec("data", "f32", 4),)),
    "a size past 32 bits": TensorSpec("t", (2**32, 0), "f32", "dense", (PartSpec("data", "f32", 0),)),
    "a name that is no text": replace(GOOD, name="\ud800"),
    "pruned without a mask": pruned(mask=0),
    "pruned without channels kept": pruned(kept=None),
    "pruned twice": pruned(inner="sparse_blocks"),
    "bitmap of pruned blocks": pruned(inner="sparse_mask", inner_params=bitmap("f32").params),
    "bitmap of f16": bitmap("f16"),
    "bitmap of rows that share words": bitmap(aligned=False),
    "bitmap of codes": bitmap(inner=("affine", {**PARAMS, "dtype": "bf16"})),
    "bitmap too short": replace(bitmap(), shape=(3, 64)),
    "footprint": TensorSpec("t", (4, 4), "f32", "astc", (PartSpec("blocks", "u8", 16),), {"footprint": "3x3"}),
}


@pytest.mark.parametrize("name", CARRIED)
def test_carried(name: str) -> None:
    assert FORMAT.compacted().why_unsupported(CARRIED[name]) is None
    assert bool(FORMAT.why_unsupported(CARRIED[name])) == (name == "pruned")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason_and_before_anything_is_written(name: str) -> None:
    assert FORMAT.why_unsupported(REFUSED[name])
    target = MemoryTarget()
    with pytest.raises(UnsupportedError) as caught:
        FORMAT.writer(target, "f.squizd", Artifact([REFUSED[name]]), WriteOptions())
    assert caught.value.rule == "squizd.carry"
    assert target.files == {}


def test_one_primary_encoding_and_one_size_of_blocks() -> None:
    two = replace(with_params(bits=2), name="u", parts=(PartSpec("packed_weight", "u8", 4), PARTS[1]))
    picture = (PartSpec("blocks", "u8", 32), PartSpec("scales", "f32", 4), PartSpec("zeros", "f32", 4))
    astc = TensorSpec("v", (4, 8), "f32", "astc", picture, AstcLayout("4x4", "f32").attributes())
    assert FORMAT.order([GOOD, two]) == [0, 1]
    for together, rule in (
        ([GOOD, astc], "squizd.mixed-encodings"),
        ([two, astc], "squizd.mixed-encodings"),
        ([pruned(), replace(pruned(block=3), name="u")], "squizd.mixed-blocks"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            FORMAT.order(together)
        assert caught.value.rule == rule


def test_the_writer_wants_the_right_calls_in_order() -> None:
    items = [dense("a", (2,), "u8"), dense("b", (2,), "u8", 1)]
    specs = [item.spec for item in items]
    with pytest.raises(UsageError) as caught:
        FORMAT.writer(MemoryTarget(), "f", Artifact([specs[0], specs[0]]), WriteOptions())
    assert caught.value.rule == "writer.duplicate"
    writer = FORMAT.writer(MemoryTarget(), "f", Artifact(specs), WriteOptions())
    for wrong, rule in (
        (lambda: writer.begin(specs[1]), "order"),
        (lambda: writer.write("data", b""), "role"),
        (writer.end, "role"),
        (writer.finish, "incomplete"),
    ):
        with pytest.raises(UsageError) as caught:
            wrong()
        assert caught.value.rule == f"writer.{rule}"
    writer.begin(specs[0])
    for role, data, rule in (("scales", b"x", "role"), ("data", b"xyz", "length")):
        with pytest.raises(UsageError) as caught:
            writer.write(role, data)
        assert caught.value.rule == f"writer.{rule}"
    writer.abort()


@pytest.mark.parametrize(
    "metadata", [{}, {"a": b"\0\xff", "b": [1, None, True, {"c": -(2**63)}], "": {}}, {"tensors": 1, "version": 9}]
)
def test_metadata_of_any_kind_comes_back(metadata: dict[str, Any]) -> None:
    item, target = dense("x", (2,), "u8"), MemoryTarget()
    writer = FORMAT.writer(target, "f", Artifact([item.spec], metadata), WriteOptions())
    feed(writer, item)
    writer.finish()
    data = bytes(target.files["f"])
    assert dict(read_catalog(MemorySource(data, "f")).metadata) == metadata
    assert FORMAT.size(Artifact([item.spec], metadata), WriteOptions()) == len(data)


@pytest.mark.parametrize(
    "names",
    [
        ["layers.0.x", "encoder.layers.0.x", "decoder.layers.1.x"],
        ["h.0.w", "h.1.w", "h.0.mlp.experts.7.w"],
        ["model.layers.00.a", "model.layers.0.a", "model.layers.-1.a", "model.layers..1"],
        ["a.layers.3.b.layers.4.c", "layers.2.z", "blocks.1.w", "wte", "ln_f"],
    ],
)
@pytest.mark.parametrize("recipe", [None, '[[rules]]\ncodec = "affine"\noptions = { bits = 4, group = "row" }\n'])
def test_names_of_any_kind_come_back(tmp_path: Path, names: list[str], recipe: str | None) -> None:
    weights = {name: np.full((4, 8), number, np.float32) for number, name in enumerate(names)}
    ingot.save(tmp_path / "a.safetensors", weights)
    (tmp_path / "r.toml").write_text(recipe or "")
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "b.squizd", tmp_path / "r.toml" if recipe else None)
    assert ingot.verify(tmp_path / "b.squizd", strict=True) == []
    with ingot.open(tmp_path / "b.squizd") as checkpoint:
        assert sorted(checkpoint) == sorted(names)
        for name, tensor in checkpoint.items():
            assert np.allclose(tensor.numpy(), weights[name], rtol=1e-2)


def test_save_puts_tensors_in_order(tmp_path: Path) -> None:
    names = ["lm_head.weight", "model.layers.1.a", "model.layers.0.a", "model.embed_tokens.weight"]
    ingot.save(tmp_path / "a.squizd", {name: np.arange(4, dtype=np.float32) for name in names}, {"k": "v"})
    with ingot.open(tmp_path / "a.squizd") as checkpoint:
        assert list(checkpoint) == names[::-1]
        assert dict(checkpoint.metadata) == {"k": "v"}
