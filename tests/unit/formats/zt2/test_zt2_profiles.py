"""Profiles of the registry: what they are here, and that a reader of the document finds them as it wants them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.formats.zt2.manifest import Object
from ingot.formats.zt2.profiles import meaning
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.rules import check_object
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.affine import Group
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor


def blocks(kind: str) -> Tensor:
    layout = GgmlBlocksLayout(kind)
    size = layout.part_specs((3, 512))[0].length or 0
    data = np.random.default_rng(1).integers(0, 60, size, np.uint8)
    return Tensor.from_parts(layout, {"blocks": data}, (3, 512))


def small(values: str, bits: int, factor: float | None = None) -> Tensor:
    layout = ScaledCodebookLayout(bits, Group(32), "f32", scales="f8_e8m0fnu", values=values, factor=factor)
    specs = layout.part_specs((4, 64))
    rng = np.random.default_rng(2)
    parts = {
        part.role: memory_part(rng.integers(100, 120, part.length or 0).astype(np.uint8), part.dtype, part.type)
        for part in specs
    }
    return Tensor.from_parts(layout, parts, (4, 64))


@pytest.mark.parametrize(
    ("tensor", "layout", "attributes"),
    [
        (blocks("q4_0"), "gguf.q4_0/1", {"elems_per_block": 32, "block_bytes": 18}),
        (blocks("q6_k"), "gguf.q6_k/1", {"elems_per_block": 256, "block_bytes": 210}),
        (small("f4_e2m1fn", 4), "zt.mx/1", {"axis": 1, "block_size": 32, "scale_form": "e8m0_exponent"}),
        (small("f8_e4m3fn", 8), "zt.mx/1", {"axis": 1, "block_size": 32, "scale_form": "e8m0_exponent"}),
        (small("i8", 8, 2.0**-6), "zt.mx/1", {"axis": 1, "block_size": 32, "scale_form": "e8m0_exponent"}),
        (small("i8", 8), "ingot.scaled_codebook/1", None),
    ],
    ids=["q4_0", "q6_k", "mxfp4", "mxfp8", "mxint8", "i8-without-its-factor"],
)
def test_profiles_there_and_back(
    tmp_path: Path, tensor: Tensor, layout: str, attributes: dict[str, object] | None
) -> None:
    ingot.save(tmp_path / "a.zt", {"x": tensor})
    ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", container=2)
    ingot.convert(tmp_path / "b.zt", tmp_path / "c.zt")
    obj = read_manifest(MemorySource((tmp_path / "b.zt").read_bytes()))[1].objects["x"]
    assert obj.layout == layout
    assert attributes is None or obj.attributes == attributes
    with ingot.open(tmp_path / "b.zt") as two, ingot.open(tmp_path / "c.zt") as one:
        for found in (two["x"], one["x"]):
            assert found.layout == tensor.layout
            assert found.numpy().tobytes() == tensor.numpy().tobytes()


PART = {"dtype": "u8", "blob": [4096, 36]}


@pytest.mark.parametrize(
    ("shape", "layout", "attributes", "parts", "rule"),
    [
        ([64], "gguf.q4_0/1", {"elems_per_block": 32}, {"data": PART}, "zt2.layout"),
        ([64], "gguf.q4_0/1", {"elems_per_block": 0, "block_bytes": 18}, {"data": PART}, "zt2.layout"),
        ([65], "gguf.q4_0/1", {"elems_per_block": 32, "block_bytes": 18}, {"data": PART}, "zt2.layout"),
        ([96], "gguf.q4_0/1", {"elems_per_block": 32, "block_bytes": 18}, {"data": PART}, "zt2.size"),
        ([72], "zt.mx/1", {"block_size": 32, "scale_form": "e8m0_exponent"}, {"data": PART}, "zt2.layout"),
    ],
)
def test_metadata_rules(
    shape: list[int], layout: str, attributes: dict[str, object], parts: dict[str, object], rule: str
) -> None:
    entry = {"shape": shape, "layout": layout, "attributes": attributes, "parts": parts}
    with pytest.raises(IngotError) as caught:
        check_object("x.zt", "t", msgspec.convert(entry, Object))
    assert caught.value.rule == rule


def test_blocks_of_another_size_are_not_decoded() -> None:
    about = {"shape": [64], "layout": "gguf.q4_0/1", "attributes": {"elems_per_block": 64, "block_bytes": 36}}
    obj = msgspec.convert({**about, "parts": {"data": PART}}, Object)
    check_object("x.zt", "t", obj)
    assert meaning(obj).codec == "gguf.q4_0/1"
