"""Llama 3.1's scaling, which llama.cpp stores as ``rope_freqs.weight``, is computed back from its divisors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array
from ingot.translate.rotary import llama3_factors, llama3_scaling
from tests.support import model_folder

pytest.importorskip("gguf")
FREQUENCIES = "rope_freqs.weight"


def rope(factor: float, low: float, high: float, length: int, theta: float = 5e5) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": length,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        (rope(8.0, 1.0, 4.0, 8192), 128),
        (rope(32.0, 1.0, 4.0, 8192), 64),
        (rope(4.0, 1.0, 4.0, 8192, 1e4), 16),
        (rope(16.0, 1.0, 8.0, 4096, 1e6), 128),
        (rope(3.5, 1.0, 3.0, 2048), 256),
    ],
)
def test_parameters_are_computed_from_divisors(parameters: dict[str, Any], size: int) -> None:
    factors = llama3_factors(parameters, size)
    assert factors is not None
    scaling = llama3_scaling(factors, parameters["rope_theta"])
    assert scaling == {key: value for key, value in parameters.items() if key != "rope_theta"}


def test_equal_limits_give_equal_divisors() -> None:
    """A low factor of 2 with twice the length has the limits of a low factor of 1."""
    factors = llama3_factors(rope(8.0, 2.0, 6.0, 16384), 128)
    assert factors is not None
    scaling = llama3_scaling(factors, 5e5)
    assert scaling is not None
    again = llama3_factors({**scaling, "rope_theta": 5e5}, 128)
    assert again is not None
    assert np.allclose(again, factors, rtol=1e-5)


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0], [1.0] * 4, [np.nan] * 4, [0.5, 1.0, 2.0, 2.0]])
def test_other_divisors_are_no_scaling_of_llama_3(values: list[float]) -> None:
    assert llama3_scaling(np.array(values, np.float32), 5e5) is None


def bare_gguf(path: Path, parameters: Mapping[str, Any], factors: Array | None = None) -> Path:
    """Write a GGUF file without the folder's files, as llama.cpp's converter does."""
    config = {key: value for key, value in model_folder.CONFIG.items() if key != "rope_theta"}
    source = model_folder.write(path / "model", {**config, "rope_parameters": dict(parameters)})
    ingot.convert(source, path / "full.gguf")
    with ingot.open(path / "full.gguf") as checkpoint:
        tensors = {name: checkpoint[name].numpy() for name in checkpoint}
        metadata = {key: value for key, value in checkpoint.metadata.items() if "companion" not in key}
    ingot.save(path / "bare.gguf", tensors | ({} if factors is None else {FREQUENCIES: factors}), metadata)
    return path / "bare.gguf"


def test_a_file_without_config_gives_the_scaling_back(tmp_path: Path) -> None:
    parameters = rope(8.0, 1.0, 4.0, 8192)
    ingot.convert(bare_gguf(tmp_path, parameters), tmp_path / "back", format="safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"] == parameters


def test_divisors_without_a_formula_are_lost(tmp_path: Path) -> None:
    source = bare_gguf(tmp_path, rope(8.0, 1.0, 4.0, 8192), np.arange(1, 9, dtype=np.float32))
    with pytest.raises(UnsupportedError, match=FREQUENCIES):
        ingot.convert(source, tmp_path / "back", format="safetensors")


def test_divisors_of_one_have_no_effect(tmp_path: Path) -> None:
    source = bare_gguf(tmp_path, {"rope_type": "default", "rope_theta": 5e5}, np.ones(8, np.float32))
    ingot.convert(source, tmp_path / "back", format="safetensors")
    rope_type = json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]["rope_type"]
    assert rope_type == "default"


def test_changed_divisors_replace_those_of_the_stored_config(tmp_path: Path) -> None:
    bare_gguf(tmp_path, rope(8.0, 1.0, 4.0, 8192))
    changed = llama3_factors(rope(32.0, 1.0, 4.0, 8192), 16)
    assert changed is not None
    with ingot.open(tmp_path / "full.gguf") as checkpoint:
        tensors = {name: checkpoint[name].numpy() for name in checkpoint}
        ingot.save(tmp_path / "changed.gguf", {**tensors, FREQUENCIES: changed}, checkpoint.metadata)
    report = ingot.convert(tmp_path / "changed.gguf", tmp_path / "back", format="safetensors")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["rope_parameters"]["factor"] == 32.0
    assert any("config.json" in note and "rope" in note for note in report.notes)
