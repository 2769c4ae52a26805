"""Files that the package gguf wrote: its own values bit for bit, for every type of tensor, and all its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.blocks.codec import BlocksCodec
from ingot.model.layouts.ggml import TYPES
from ingot.testing.encoding import encode_tensor

gguf = pytest.importorskip("gguf")

Type = gguf.GGMLQuantizationType
NUMPY = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
INTERNAL = ("Q8_1", "Q8_K")  # what activations are turned into: no file has them
SHAPE = (2, 3, 512)
ENDIAN = gguf.GGUFEndian


def written(path: Path, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Write a tensor of every type; return what each holds, as the package takes it."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_custom_alignment(64)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "▁a"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.25])
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    held = {}
    for kind in Type:
        if kind.name in INTERNAL:
            continue
        if kind.name in NUMPY:
            held[kind.name] = rng.integers(-100, 100, SHAPE).astype(NUMPY[kind.name])
            writer.add_tensor(kind.name, held[kind.name])
            continue
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (*SHAPE[:-1], SHAPE[-1] // elements * nbytes), dtype=np.uint8)
        if kind.name == "MXFP4":
            raw[..., ::nbytes] %= 250
        held[kind.name] = raw
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    return path, written(path)


def test_every_type_has_the_package_s_bits(file: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    path, held = file
    compared = set()
    with ingot.open(path) as checkpoint:
        assert list(checkpoint) == list(held)
        for name, raw in held.items():
            tensor = checkpoint[name]
            assert tensor.shape == SHAPE
            if name in NUMPY:
                assert tensor.numpy().tobytes() == raw.tobytes()
                continue
            try:
                with np.errstate(all="ignore"):
                    expected = gguf.quants.dequantize(raw, Type[name]).astype(np.float32)
            except NotImplementedError:
                continue
            values = tensor.numpy("f32")
            both = np.isnan(values) & np.isnan(expected)
            assert (both | (values.view(np.uint32) == expected.view(np.uint32))).all(), name
            compared.add(name.lower())
    # Q1_0 and Q2_0 the package does not decode.
    assert compared == {*TYPES, "bf16"} - {"q1_0", "q2_0"}


def test_metadata(file: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    with ingot.open(file[0]) as checkpoint:
        metadata = checkpoint.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["general.alignment"] == 64
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "▁a"]
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.25]
    assert metadata["llama.rope.freq_base"] == 1e4
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def test_what_the_package_encodes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "BF16")
    stored = {kind: gguf.quants.quantize(values, Type[kind]) for kind in kinds}
    for kind, raw in stored.items():
        writer.add_tensor(kind, raw, raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        for kind, raw in stored.items():
            assert np.array_equal(checkpoint[kind].numpy("f32"), gguf.quants.dequantize(raw, Type[kind]))


def test_splits(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full((2, 32), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(list(tmp_path.iterdir())) == 3
    with ingot.open(tmp_path) as checkpoint:
        assert [float(checkpoint[f"t{number}"].numpy()[0, 0]) for number in range(5)] == [0, 1, 2, 3, 4]


def test_big_endian(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", endianess=ENDIAN.BIG)
    writer.add_array("scores", [1.5, 2.5])
    writer.add_tensor("f32", values.copy())
    writer.add_tensor("f16", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert np.array_equal(checkpoint["f32"].numpy(), values)
        assert np.array_equal(checkpoint["f16"].numpy("f32"), values)
        assert checkpoint.metadata["scores"] == [1.5, 2.5]


ENCODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


def blocks_of(values: np.ndarray[Any, Any], kind: str, **options: Any) -> np.ndarray[Any, Any]:
    tensor = encode_tensor(BlocksCodec(), values, {"type": kind.lower(), **options}, dtype="f32")
    return np.frombuffer(tensor.parts["blocks"].view(), np.uint8).reshape(len(values), -1)


@pytest.mark.parametrize("kind", ENCODED)
def test_the_reference_mode_writes_what_the_package_writes(kind: str) -> None:
    rng = np.random.default_rng(9)
    values = (rng.standard_normal((600, 64)) * 2.0 ** rng.integers(-20, 4, (600, 1))).astype(np.float32)
    values[:40] = rng.integers(-127, 128, (40, 64)) / 2  # ties
    values[40, :32], values[41], values[42], values[43, 3:] = 0, 1.5, -0.0, 0
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, Type[kind])
    assert np.array_equal(blocks_of(values, kind, search="reference"), expected)


@pytest.mark.parametrize("kind", ENCODED)
def test_a_search_leaves_no_more_error_than_the_package(kind: str) -> None:
    values = np.random.default_rng(2).standard_normal((32, 512)).astype(np.float32)
    ours, theirs = blocks_of(values, kind), gguf.quants.quantize(values, Type[kind])
    errors = [np.square(gguf.quants.dequantize(raw, Type[kind]) - values, dtype=np.float64) for raw in (ours, theirs)]
    assert errors[0].sum() < errors[1].sum()
    assert (errors[0].reshape(-1, 32).sum(1) <= errors[1].reshape(-1, 32).sum(1) * (1 + 1e-5)).mean() > 0.99
