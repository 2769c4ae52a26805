"""Presets go into packed folders in one step, with the numbers that a conversion by way of a .zt file has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.codecs.repacked_encoder import RepackedEncoder
from ingot.codecs.table import CODECS
from ingot.errors import CodecError, UsageError
from ingot.model.layouts.affine import Constant
from ingot.model.layouts.packed_ints import GPTQ, PackedIntLayout
from tests.support import model_folder

FORMATS = ("gptq", "awq", "modelopt", "mlx", "gguf", "compressed-tensors")
SYMMETRIC = """
[[rules]]
roles = ["mlp", "attention"]
codec = "affine"
options = { bits = 4, group = 32, symmetric = true, scales = "auto", quantizer = "mse" }
"""
ASYMMETRIC = """
[[rules]]
roles = ["mlp", "attention"]
codec = "affine"
options = { bits = 4, group = 32, symmetric = false, quantizer = "minmax", scales = "f16" }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model_folder.write(tmp_path / "source")


def weight_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")}


@pytest.mark.parametrize("format", FORMATS)
def test_one_step_gives_the_bytes_of_two(source: Path, tmp_path: Path, format: str) -> None:
    recipe = tmp_path / "symmetric.toml"
    recipe.write_text(SYMMETRIC)
    report = ingot.convert(source, tmp_path / "direct", recipe, format=format)
    ingot.convert(source, tmp_path / "between", recipe, format="zt")
    ingot.convert(tmp_path / "between", tmp_path / "by-way", format=format)
    assert weight_bytes(tmp_path / "direct") == weight_bytes(tmp_path / "by-way")
    encoded = [tensor for tensor in report.tensors if tensor.action == "encoded"]
    assert len(encoded) >= 7
    assert all(tensor.error is not None and tensor.error["snr_db"] < 30 for tensor in encoded)


def test_quantized_weights_are_moved_or_refused_in_one_step_too(source: Path, tmp_path: Path) -> None:
    ingot.convert(source, tmp_path / "int4", "int4", format="zt")
    report = ingot.convert(tmp_path / "int4", tmp_path / "again", "int4", format="gptq")
    assert {tensor.action for tensor in report.tensors} == {"moved", "repacked"}
    ingot.convert(source, tmp_path / "int8", "int8", format="zt")
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "int8", tmp_path / "twice", "int4", format="gptq")
    assert caught.value.rule == "convert.requantize"


def test_zero_points_go_where_they_are_exact(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "points.toml"
    recipe.write_text(ASYMMETRIC)
    ingot.convert(source, tmp_path / "between", recipe, format="zt")
    for format in ("gptq", "awq"):
        ingot.convert(source, tmp_path / format, recipe, format=format)
        ingot.convert(tmp_path / "between", tmp_path / f"{format}-by-way", format=format)
        assert weight_bytes(tmp_path / format) == weight_bytes(tmp_path / f"{format}-by-way")


@pytest.mark.parametrize("format", ["gptq", "mlx"])
def test_a_plan_gives_the_same_bytes(source: Path, tmp_path: Path, format: str) -> None:
    target, plan = tmp_path / "out", tmp_path / "plan.json"
    command = ["convert", str(source), str(target), "--recipe", "int4", "--format", format, "-q"]
    assert run([*command, "--plan-out", str(plan)]) == 0
    assert run(["run-plan", str(plan), "-q"]) == 0
    ingot.convert(source, tmp_path / "direct", "int4", format=format)
    assert weight_bytes(target) == weight_bytes(tmp_path / "direct")


def test_a_layout_that_would_change_values_is_refused() -> None:
    options = {"bits": 4, "group": 32, "symmetric": False, "quantizer": "minmax", "scales": "f16"}
    inner = CODECS["affine"].encoder((64, 64), "f32", options)
    words = PackedIntLayout(GPTQ, 4, 32, Constant(8), "f32", "f16")
    encoder = RepackedEncoder(inner, "m", (64, 64), words)
    with pytest.raises(CodecError) as caught:
        encoder.encode(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32))
    assert caught.value.rule == "repack.values"
