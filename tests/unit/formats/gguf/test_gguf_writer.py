"""Writing GGUF: what every format promises, types of metadata, splits, and what llama.cpp's reader would refuse."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import STORAGE_DTYPES
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.gguf.carry import describe_types
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.gguf.metadata import ABOUT, to_gguf_metadata
from ingot.formats.gguf.types import DENSE
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.part import memory_part
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor
from ingot.testing.formats import FormatSuite, Item, dense
from tests.support.gguf import ARRAY, STRING, Value, build
from tests.support.gguf import Item as Raw

FORMAT = GgufFormat()


def blocks(name: str, shape: tuple[int, ...], kind: str, seed: int = 0) -> Item:
    layout = GgmlBlocksLayout(kind)
    (part,) = layout.part_specs(shape)
    data = np.random.default_rng(seed).integers(0, 256, part.length, np.uint8).tobytes()
    return Item(TensorSpec(name, shape, "f32", "ggml_blocks", (part,), layout.attributes()), {"blocks": data})


class TestGguf(FormatSuite):
    format = FORMAT

    def described(self, items: Sequence[Item], metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        named = {key: value for key, value in (metadata or {}).items() if key}
        return describe_types(to_gguf_metadata(named), [item.spec for item in items])

    def sample(self) -> list[Item]:
        """The last has no padding behind it: a file without that would be whole to the reader."""
        shapes = {"a.weight": ((3, 4), "f32"), "b": ((5,), "bf16"), "empty": ((0, 3), "f16")}
        items = [dense(name, shape, dtype, seed) for seed, (name, (shape, dtype)) in enumerate(shapes.items())]
        return [*items, blocks("blk.0.w", (2, 512), "q4_k")]

    def test_every_storage_dtype_is_carried(self) -> None:
        supported = {name for name in STORAGE_DTYPES if FORMAT.why_unsupported(dense("x", (2, 4), name).spec) is None}
        assert supported == set(DENSE.values())

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1, 1), (1000,)])
    def test_round_trip_of_a_shape(self, shape: tuple[int, ...]) -> None:
        super().test_round_trip_of_a_shape(shape)


def test_every_type_of_block_moves() -> None:
    TestGguf().check([blocks(kind, (2, 3, 512), kind) for kind in TYPES])


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (dense("x" * 64, (2,), "f32").spec, "63 bytes"),
        (dense("é" * 32, (2,), "f32").spec, "63 bytes"),
        (dense("a\0", (2,), "f32").spec, "NUL"),
        (dense("x", (1, 1, 1, 1, 1), "f32").spec, "4 dimensions"),
        (dense("x", (4,), "u8").spec, "element type u8"),
        (blocks("x", (2, 256), "q4_k").spec, None),
        (TensorSpec("x", (2, 128), "f32", "ggml_blocks", (PartSpec("blocks", "u8", 144),), {}), "codec_version"),
        (
            TensorSpec(
                "x",
                (2, 128),
                "f32",
                "ggml_blocks",
                (PartSpec("blocks", "u8", 144),),
                GgmlBlocksLayout("q4_k").attributes(),
            ),
            "whole blocks",
        ),
        (
            TensorSpec("x", (2,), "f32", "dense", (PartSpec("data", "f32", None, None, "zstd", 8),)),
            "uncompressed",
        ),
        (TensorSpec("x", (2,), "f32", "affine", ()), "affine"),
    ],
)
def test_what_llama_cpp_would_not_read_is_refused(spec: TensorSpec, word: str | None) -> None:
    reason = FORMAT.why_unsupported(spec)
    assert reason is None if word is None else word in (reason or "")


METADATA = {
    "general.architecture": Value(STRING, "llama"),
    "general.alignment": Value(4, 64),
    "general.file_type": Value(4, 0),
    "u8": Value(0, 255),
    "i64": Value(11, -(2**63)),
    "f32": Value(6, 0.1),
    "f64": Value(12, 0.1),
    "yes": Value(7, True),
    "tokens": Value(ARRAY, ["é", ""], STRING),
    "scores": Value(ARRAY, [0.1, -1.0], 6),
    "none": Value(ARRAY, [], 2),
    "truths": Value(ARRAY, [True, False], 7),
}


@pytest.mark.parametrize("between", [(), ("x.zt",), ("x.safetensors",)])
def test_a_file_comes_back_byte_for_byte(tmp_path: Path, between: Sequence[str]) -> None:
    """Whatever held it in between, text alone too: types and alignment are kept under a key of Ingot's own."""
    values = np.arange(24, dtype=np.float32)
    items = [Raw("a", (3, 2), 0, values[:6].tobytes()), Raw("b", (2, 3, 4), 0, values.tobytes())]
    data = build(METADATA, items, alignment=64)
    (tmp_path / "x.gguf").write_bytes(data)
    paths = [tmp_path / name for name in ("x.gguf", *between, "y.gguf")]
    for source, target in itertools.pairwise(paths):
        ingot.convert(source, target)
    assert (tmp_path / "y.gguf").read_bytes() == data


def test_values_without_types_get_those_of_their_kinds() -> None:
    values = {
        "small": 7, "negative": -1, "large": 2**40, "huge": 2**63, "half": 0.5, "tenth": 0.1, "yes": True, "text": "t",
        "mixed": [1, "a"], "numbers": [1, 2.5], "texts": ["a"], "nested": {"a": [None]}, "signed": [1, -2],
        "past": 2**64,
    }  # fmt: skip
    made = to_gguf_metadata(values)
    assert made[ABOUT]["types"] == {
        "small": "u32", "negative": "i32", "large": "u64", "huge": "u64", "half": "f32", "tenth": "f64", "yes": "bool",
        "text": "string", "mixed": "string", "numbers": "array:f32", "texts": "array:string", "nested": "string",
        "signed": "array:i32", "past": "string",
    }  # fmt: skip
    assert made["nested"] == '{"a":[null]}'
    assert to_gguf_metadata(made) == made


@pytest.mark.parametrize(
    "values",
    [{"": 1}, {"a\0": 1}, {"a": "\ud800"}, {"general.alignment": 3}, {"general.alignment": 1 << 21}, {"a": ["\ud800"]}],
)
def test_metadata_that_no_file_can_have(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        FORMAT.metadata(values)
    assert caught.value.rule == "gguf.metadata"


def test_the_file_type_is_that_of_most_bytes_or_the_mixture_that_was_stated() -> None:
    specs = [dense("a", (4,), "f32").spec, blocks("b", (8, 256), "q4_k").spec]
    assert describe_types(to_gguf_metadata({}), specs)["general.file_type"] == 15
    assert describe_types(to_gguf_metadata({}), specs)["general.quantization_version"] == 2
    assert describe_types(to_gguf_metadata({"general.file_type": 14}), specs)["general.file_type"] == 14
    assert describe_types(to_gguf_metadata({"general.file_type": 2}), specs)["general.file_type"] == 15
    assert "general.quantization_version" not in describe_types(to_gguf_metadata({}), specs[:1])


def test_a_folder_is_split_where_that_is_asked_for(tmp_path: Path) -> None:
    tensors = {f"t{number}": np.full((4, 32), number, np.float32) for number in range(5)}
    ingot.save(tmp_path / "x.zt", tensors)
    with ingot.open(tmp_path / "x.zt") as source:
        view = ingot.views.describe(source, {"general.alignment": 128, "general.architecture": "llama"})
        ingot.save(tmp_path / "y.zt", view, view.metadata)
    ingot.convert(tmp_path / "y.zt", tmp_path / "whole", format="gguf")
    ingot.convert(tmp_path / "y.zt", tmp_path / "split", format="gguf", max_shard=1024)
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["model.gguf"]
    names = sorted(path.name for path in (tmp_path / "split").iterdir())
    assert names == [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    with ingot.open(tmp_path / "whole") as whole, ingot.open(tmp_path / "split") as split:
        assert dict(whole.metadata) == dict(split.metadata)
        assert [(name, split[name].numpy().tobytes()) for name in split] == [
            (name, value.tobytes()) for name, value in tensors.items()
        ]
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "y.zt", tmp_path / "none", format="gguf", max_shard=0)
    assert caught.value.rule == "gguf.split"


def test_values_that_it_has_no_type_for_are_decoded_or_refused(tmp_path: Path) -> None:
    import ml_dtypes

    ingot.save(tmp_path / "x.zt", {"a": np.arange(4).astype(ml_dtypes.float8_e4m3fn)})
    report = ingot.convert(tmp_path / "x.zt", tmp_path / "x.gguf", keep_names=True)
    assert [item.action for item in report.tensors] == ["decoded"]
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint["a"].numpy().tolist() == [0, 1, 2, 3]
    part = memory_part(np.zeros(2, np.uint8), "u8")
    with pytest.raises(IngotError) as caught:
        ingot.save(tmp_path / "y.gguf", {"a": Tensor("a", (2,), "u8", "dense", {"data": part})})
    assert caught.value.rule == "save.unsupported"
