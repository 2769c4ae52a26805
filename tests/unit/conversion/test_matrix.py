"""``matrix`` tells what ``convert`` does."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.codecs.table import CODECS
from ingot.conversion.matrix import Matrix, matrix
from ingot.errors import IngotError, MissingExtraError
from ingot.model.layouts.scaled_codebook import SECOND
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor

WAYS = {
    "blocks": ("ggml_blocks", {"type": "q4_0"}),
    "minima": ("ggml_blocks", {"type": "q4_1"}),
    "nested": ("ggml_blocks", {"type": "q6_k"}),
    "products": ("ggml_blocks", {"type": "q4_k"}),
    "reciprocal": ("scaled_codebook", {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn", "second": "divide"}),
    "integers": ("affine", {"bits": 4, "group": 64}),
    "dense": ("dense", {}),
}
LLAMA = {
    "model_type": "llama", "architectures": ["OneMatrix"],
    "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 32, "vocab_size": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
FORMATS = ("zt", "gguf", "gptq", "compressed-tensors", "modelopt", "mlx", "safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = (np.random.default_rng(8).standard_normal((32, 256)) * 0.05).astype(np.float16)
    tensors: dict[str, Tensor] = {}
    for name, (codec, options) in WAYS.items():
        made = encode_tensor(CODECS[codec], values, options, dtype="f16")
        tensors[f"{name}.weight"] = replace(made, name=f"{name}.weight")
    path = tmp_path_factory.mktemp("matrix") / "model.zt"
    ingot.save(path, tensors)
    return path


@pytest.fixture(scope="module")
def found(source: Path) -> Matrix:
    return matrix(source, to=FORMATS, keep_names=True)


@pytest.mark.parametrize("format", FORMATS)
def test_it_tells_what_a_conversion_does(source: Path, found: Matrix, format: str, tmp_path: Path) -> None:
    name = "out.gguf" if format == "gguf" else "out"
    report = ingot.convert(source, tmp_path / name, format=format, keep_names=True)
    told = {way.name: way for way in found.tensors if way.format == format}
    assert {tensor.name: tensor.action for tensor in report.tensors} == {name: way.action for name, way in told.items()}
    assert all(told[tensor.name].nbytes <= tensor.nbytes for tensor in report.tensors)  # zero points that are made
    (target,) = (item for item in found.targets if item.format == format)
    actions = Counter(way.action for way in told.values())
    assert (target.moved, target.repacked, target.decoded) == tuple(
        actions[action] for action in ("moved", "repacked", "decoded")
    )
    assert target.moved_nbytes + target.repacked_nbytes + target.decoded_nbytes == sum(
        way.source_nbytes for way in told.values()
    )
    assert target.refused == 0
    assert (target.obstacle is None) == (target.decoded == 0)
    assert all((way.why is not None) == (way.action == "decoded") for way in told.values())


def test_obstacles_are_the_nearest_layout_s(found: Matrix) -> None:
    why = {(way.format, way.name.removesuffix(".weight")): way.why or "" for way in found.tensors}
    assert "offset" in why["gptq", "minima"]
    assert "second scale" in why["gguf", "reciprocal"]
    assert "groups of" in why["mlx", "nested"]


def test_grades_are_told_of_what_is_repacked(source: Path, found: Matrix, tmp_path: Path) -> None:
    every = ["integers", "scales", "f32", "type"]
    told = {(way.format, way.name.removesuffix(".weight")): way.equal for way in found.tensors}
    assert all((way.equal is None) == (way.action != "repacked") for way in found.tensors)
    assert told["mlx", "minima"] == every[:3]  # MLX rounds the product and the sum to f16 each
    assert told["mlx", "products"] == told["gptq", "blocks"] == told["gguf", "integers"] == every
    assert told["modelopt", "reciprocal"] in (every, ["integers", "scales", "type"])
    for format in ("mlx", "modelopt"):
        (target,) = (item for item in found.targets if item.format == format)
        report = ingot.convert(source, tmp_path / format, format=format, keep_names=True)
        assert {tensor.name.removesuffix(".weight"): tensor.equal for tensor in report.tensors} == {
            name: grades for (of, name), grades in told.items() if of == format
        }
        assert target.grades == report.grades
        assert report.grades["integers"] == target.repacked > 0


def test_reciprocals_that_a_view_makes_are_not_told_equal_in_f32(tmp_path: Path) -> None:
    """In GGUF the second scale of NVFP4 is a tensor of its own, which a view makes of compressed-tensors' divisor."""
    values = (np.random.default_rng(8).standard_normal((32, 256)) * 0.05).astype(np.float16)
    codec, options = WAYS["reciprocal"]
    made = encode_tensor(CODECS[codec], values, options, dtype="bf16")
    second = np.array([1.1], np.float32)  # x / 1.1 and x * (1 / 1.1) differ for half of all x
    parts = {**made.parts, SECOND: memory_part(second, "f32")}
    name = "model.layers.0.mlp.up_proj.weight"
    (tmp_path / "m").mkdir()
    ingot.save(tmp_path / "m" / "model.zt", {name: replace(made, name=name, parts=parts)})
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    ways = matrix(tmp_path / "m", to=["gguf"], no_tokenizer=True).tensors
    (way,) = (way for way in ways if way.name == "blk.0.ffn_up.weight")
    assert way.why is None, way
    assert (way.action, way.equal) == ("repacked", ["integers", "scales", "type"])
    report = ingot.convert(tmp_path / "m", tmp_path / "m.gguf", no_tokenizer=True)
    assert report.grades == {"integers": 1, "scales": 1, "f32": 0, "type": 1}
    assert "reciprocal" in " ".join(report.notes)


def test_every_format_is_asked_and_says_why_it_refuses(source: Path) -> None:
    told = matrix(source)
    assert {target.format for target in told.targets} >= {"wdelta", "coreml", "squizd"}
    assert all(target.obstacle for target in told.targets if target.refused)
    with pytest.raises(IngotError) as caught:
        matrix(source, to=["nothing"])
    assert caught.value.rule == "format.unknown"


def test_the_command(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["matrix", str(source), "--to", "gguf", "--to", "awq", "--keep-names", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [target["format"] for target in told["targets"]] == ["gguf", "awq"]
    assert len(told["tensors"]) == 2 * len(WAYS)
    assert [target["grades"]["integers"] for target in told["targets"]] == [1, 2]
    assert {grade for way in told["tensors"] for grade in way["equal"] or ()} == {"integers", "scales", "f32", "type"}
    assert run(["matrix", str(source), "--to", "gguf", "--keep-names"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "reciprocal.weight" in shown
    assert "of 1 repacked: integers of 1, scales of 1, values in f32 of 1, values in the target's type of 1" in shown
    assert run(["convert", str(source), "out", "--format", "mlx", "--keep-names", "--dry-run"]) == 0
    assert "values in the target's type of" in " ".join(capsys.readouterr().out.split())


def test_a_missing_extra_is_an_obstacle_like_others(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> object:
        raise MissingExtraError("gguf", "gguf")

    monkeypatch.setattr("ingot.conversion.matrix.prepare_source", without)
    (target,) = matrix(source, to=["gguf"]).targets
    assert (target.refused, target.obstacle is not None) == (len(WAYS), True)
