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
from ingot.errors import IngotError, MissingExtraError
from ingot.model.tensor import Tensor
from ingot.ops.convert.matrix import Matrix, matrix
from ingot.testing.codecs import encode_tensor

WAYS = {
    "blocks": ("ggml_blocks", {"type": "q4_0"}),
    "minima": ("ggml_blocks", {"type": "q4_1"}),
    "nested": ("ggml_blocks", {"type": "q6_k"}),
    "reciprocal": ("scaled_codebook", {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn", "second": "divide"}),
    "integers": ("affine", {"bits": 4, "group": 64}),
    "dense": ("dense", {}),
}
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
    return matrix(source, to=FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_it_tells_what_a_conversion_does(source: Path, found: Matrix, format: str, tmp_path: Path) -> None:
    name = "out.gguf" if format == "gguf" else "out"
    report = ingot.convert(source, tmp_path / name, format=format)
    told = {way.name: way for way in found.ways if way.format == format}
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
    why = {(way.format, way.name.removesuffix(".weight")): way.why or "" for way in found.ways}
    assert "offset" in why["gptq", "minima"]
    assert "second scale" in why["gguf", "reciprocal"]
    assert "groups of" in why["mlx", "nested"]
    rounded = {way.format for way in found.ways if way.rounded}
    assert rounded <= {"modelopt"}


def test_every_format_is_asked_and_says_why_it_refuses(source: Path) -> None:
    told = matrix(source)
    assert {target.format for target in told.targets} >= {"wdelta", "coreml", "squizd"}
    assert all(target.obstacle for target in told.targets if target.refused)
    with pytest.raises(IngotError) as caught:
        matrix(source, to=["nothing"])
    assert caught.value.rule == "format.unknown"


def test_the_command(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["matrix", str(source), "--to", "gguf", "--to", "awq", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [target["format"] for target in told["targets"]] == ["gguf", "awq"]
    assert len(told["tensors"]) == 2 * len(WAYS)
    assert run(["matrix", str(source), "--to", "gguf"]) == 0
    assert "reciprocal.weight" in capsys.readouterr().out


def test_a_missing_extra_is_an_obstacle_like_others(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> object:
        raise MissingExtraError("gguf", "gguf")

    monkeypatch.setattr("ingot.ops.convert.matrix.viewed", without)
    (target,) = matrix(source, to=["gguf"]).targets
    assert (target.refused, target.obstacle is not None) == (len(WAYS), True)
