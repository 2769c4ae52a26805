"""Biases beside rounded matrices: the mean output stays what it was, where means of inputs are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import FormatError, UsageError
from ingot.model.statistics import Statistics
from ingot.quantization.choice import parse_quantizer
from ingot.recipes.load import parse_recipe
from ingot.recipes.recipe import Recipe

NAME = "model.layers.0.mlp.up_proj"
OTHER = "model.layers.0.mlp.down_proj"
PLAIN = "model.layers.1.mlp.down_proj"
RULE = """
[[rules]]
match = "*_proj.weight"
codec = "{codec}"
options = {options}
quantizer = "gptq"
"""


def recipe(codec: str = "affine", options: str = "{ bits = 2, group = 32, correct_bias = true }") -> Recipe:
    return parse_recipe(RULE.format(codec=codec, options=options), location="test")


def inputs(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(300, 64)) + np.linspace(-2, 3, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, random = tmp_path_factory.mktemp("model") / "model.safetensors", np.random.default_rng(1)
    weights = {f"{name}.weight": random.normal(size=(48, 64)).astype(np.float32) for name in (NAME, OTHER, PLAIN)}
    biases = {f"{name}.bias": random.normal(size=48).astype(kind) for name, kind in ((NAME, "f4"), (OTHER, "f2"))}
    ingot.save(path, {**weights, **biases, "model.norm.bias": np.ones(64, np.float32)})
    return path


def known(*, means: bool = True) -> Statistics:
    arrays = {}
    for number, name in enumerate((NAME, OTHER, PLAIN)):
        x = inputs(number)
        arrays |= {
            f"{name}.weight:inputs": x.T @ x / 300,
            f"{name}.weight:in_sum2": np.square(x).mean(0),
            f"{name}.weight:count": np.array([300]),
        }
        if means:
            arrays[f"{name}.weight:means"] = x.mean(0)
    return Statistics.in_memory(arrays)


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("affine", "{ bits = 2, group = 32, correct_bias = true }"),
        ("scaled_codebook", "{ bits = 2, group = 32, correct_bias = true }"),
        ("trellis", "{ bits = 2, group = 32, correct_bias = true }"),
        ("palette", "{ bits = 2, correct_bias = true }"),
    ],
)
def test_mean_outputs_stay(model: Path, tmp_path: Path, codec: str, options: str) -> None:
    report = ingot.convert(model, tmp_path / "out.zt", recipe(codec, options), calibration=known())
    assert any(note.startswith("2 biases were corrected, by ") for note in report.notes)
    with ingot.open(model) as before, ingot.open(tmp_path / "out.zt") as after:
        for number, name in enumerate((NAME, OTHER)):
            old, new = ([one[f"{name}.{part}"].numpy("f32") for part in ("weight", "bias")] for one in (before, after))
            assert not np.array_equal(old[0], new[0])
            mean = inputs(number).mean(0)
            moved = np.abs((new[0] - old[0]) @ mean).max()
            kept = np.abs(new[0] @ mean + new[1] - old[0] @ mean - old[1]).max()
            assert kept < (1e-3 if number == 0 else 0.02)  # the other is in f16
            assert moved > 0.1
            assert after[f"{name}.bias"].dtype == before[f"{name}.bias"].dtype
        assert np.array_equal(after["model.norm.bias"].numpy(), before["model.norm.bias"].numpy())


def test_a_bias_by_hand(tmp_path: Path) -> None:
    # Signs: both weights get one magnitude, and what that loses, times the means 4 and -1, goes to the bias.
    weights = np.array([[1.0, 3.0]], np.float32)
    arrays = {"w.weight": weights, "w.bias": np.array([5.0], np.float32)}
    statistics = Statistics.in_memory(
        {"w.weight:in_sum2": np.array([16, 1], np.float32), "w.weight:count": np.array([1]),
         "w.weight:means": np.array([4, -1], np.float32)}
    )  # fmt: skip
    rules = parse_recipe(
        '[[rules]]\nmatch = "w.weight"\ncodec = "affine"\nquantizer = "importance"\n'
        "options = { bits = 1, group = 2, correct_bias = true }\n",
        location="test",
    )
    found = _converted(tmp_path, arrays, rules, statistics)
    lost = weights - found["w.weight"]
    assert np.array_equal(np.abs(found["w.weight"][0]), np.abs(found["w.weight"][0][::-1]))
    assert found["w.bias"] == pytest.approx(5 + 4 * lost[0, 0] - lost[0, 1], abs=1e-6)


def _converted(
    folder: Path, arrays: dict[str, np.ndarray], rules: Recipe, statistics: Statistics
) -> dict[str, np.ndarray]:
    ingot.save(folder / "model.safetensors", arrays)
    ingot.convert(folder / "model.safetensors", folder / "out.zt", rules, calibration=statistics)
    with ingot.open(folder / "out.zt") as found:
        return {name: tensor.numpy("f32", copy=True) for name, tensor in found.items()}


def test_without_means_or_without_being_asked_biases_stay(model: Path, tmp_path: Path) -> None:
    plain = recipe(options="{ bits = 2, group = 32 }")
    for number, (asked_for, statistics) in enumerate(((recipe(), known(means=False)), (plain, known()))):
        report = ingot.convert(model, tmp_path / f"{number}.zt", asked_for, calibration=statistics)
        told = [note for note in report.notes if "without means of inputs" in note]
        assert bool(told) is (number == 0)
        assert not any("were corrected" in note for note in report.notes)
        with ingot.open(model) as before, ingot.open(tmp_path / f"{number}.zt") as after:
            assert np.array_equal(after[f"{NAME}.bias"].numpy(), before[f"{NAME}.bias"].numpy())


def test_it_is_said_by_true_and_false() -> None:
    assert parse_quantizer("gptq", "affine", {"correct_bias": True}).correct_bias
    assert not parse_quantizer("gptq", "affine", {}).correct_bias
    with pytest.raises(UsageError) as refused:
        parse_quantizer("gptq", "affine", {"correct_bias": 1})
    assert refused.value.rule == "quantizer.option"


def test_means_are_read_checked_and_may_be_missing() -> None:
    of, old = known().for_matrix(f"{NAME}.weight"), known(means=False).for_matrix(f"{NAME}.weight")
    assert of is not None
    assert old is not None
    assert old.means is None
    np.testing.assert_allclose(of.means, inputs(0).mean(0))
    arrays = {"w:in_sum2": np.ones(3, np.float32), "w:count": np.array([1])}
    with pytest.raises(FormatError) as shape:
        Statistics.in_memory(arrays | {"w:means": np.ones(4, np.float32)})
    assert shape.value.rule == "statistics.shape"
    bad = Statistics.in_memory(arrays | {"w:means": np.array([1, np.nan, 0], np.float32)}).for_matrix("w")
    assert bad is not None
    with pytest.raises(FormatError) as value:
        _ = bad.means
    assert value.value.rule == "statistics.value"
