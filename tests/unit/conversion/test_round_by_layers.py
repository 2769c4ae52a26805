"""Calibration and rounding layer by layer: the bytes of the two steps, and a run that continues after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.estimate import Estimate
from ingot.errors import IngotError
from ingot.model.calibration import LayerResults
from ingot.model.statistics import INPUTS, OUTPUTS, Statistics
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.runtime.calibration.calibrate import ModelCalibration
from ingot.runtime.calibration.calibration import CalibrateOptions
from ingot.runtime.quantize.run import with_quantizer
from tests.support.models import make

RECIPE = "int4-calibrated"
SHORT: dict[str, Any] = {"samples": 4, "length": 12}


class StoppedError(Exception):
    """Raised in place of a kill."""


class CountedCalibration(ModelCalibration):
    """A calibration that counts the layers, checks what each of them gets, and may stop after some."""

    def __init__(self, options: CalibrateOptions, stop_after: int | None = None) -> None:
        super().__init__(options)
        object.__setattr__(self, "layers", [])
        object.__setattr__(self, "stop_after", stop_after)

    def run_by_layers(self, process: Callable[..., Any], folder: str, **settings: Any) -> LayerResults:
        layers: list[list[str]] = self.layers  # type: ignore[attr-defined]

        def counted(statistics: Statistics, store: Callable[..., None]) -> Any:
            if len(layers) == self.stop_after:  # type: ignore[attr-defined]
                raise StoppedError
            layers.append(list(statistics.names))
            return process(statistics, store)

        results = super().run_by_layers(counted, folder, **settings)
        for name in results.statistics.names:
            statistics = results.statistics.for_matrix(name)
            assert statistics is not None
            assert not statistics.has_inputs
            assert statistics.rows is None
        return results


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "model", "float32", hidden_size=64, intermediate_size=128)


GRADES: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, "two-sided"),
    "forward alone": ({"fisher": False}, "two-sided"),
    "gptq": ({"fisher": False}, "gptq"),
    "importance": ({"fisher": False, "largest": 1}, "importance"),
}
"""Options of the calibration and the quantizer, by grade."""


def in_two_steps(model: Path, out: Path, recipe: str | Recipe = RECIPE, **options: Any) -> ingot.ConvertReport:
    statistics = out.with_suffix(".statistics.safetensors")
    ingot.calibrate(model, statistics, **{**SHORT, **options})
    with ingot.open(statistics) as arrays:
        kinds = {name.rpartition(":")[2] for name in arrays}
        assert (INPUTS in kinds) == ("largest" not in options)
        assert (OUTPUTS in kinds) == options.get("fisher", True)
    return ingot.convert(model, out, recipe=recipe, calibration=statistics, no_tokenizer=out.suffix == ".gguf")


def calibration_of(model: Path, stop_after: int | None = None, **options: Any) -> CountedCalibration:
    return CountedCalibration(CalibrateOptions(model, "", **{**SHORT, **options}), stop_after)


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("preset", [RECIPE, "q4_0-calibrated"])
def test_the_result_equals_that_of_a_statistics_file(model: Path, tmp_path: Path, preset: str, grade: str) -> None:
    suffix = ".gguf" if preset.startswith("q4_0") else ".zt"
    options, quantizer = GRADES[grade]
    recipe = with_quantizer(load_recipe(preset), quantizer)
    file = in_two_steps(model, tmp_path / f"two{suffix}", recipe, **options)
    calibration = calibration_of(model, **options)
    layers = ingot.convert(
        model, tmp_path / f"one{suffix}", recipe=recipe, calibration=calibration, no_tokenizer=suffix == ".gguf"
    )
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    assert list(layers.rounded) == list(file.rounded)
    assert max(map(len, calibration.layers)) < len(file.rounded)  # type: ignore[attr-defined]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_is_rounded_by_its_own_and_a_tied_heads_statistics(tmp_path: Path, tied: bool) -> None:
    model = make(
        "llama", tmp_path / "model", "float32", hidden_size=64, intermediate_size=128, tie_word_embeddings=tied
    )
    ingot.calibrate(model, tmp_path / "statistics.safetensors", **SHORT)
    results = []
    for folder, calibration in (("two", tmp_path / "statistics.safetensors"), ("one", calibration_of(model))):
        report = ingot.convert(
            model,
            tmp_path / folder,
            recipe="mlx-4bit-calibrated",
            format="mlx",
            calibration=calibration,
            no_tokenizer=True,
        )
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert name in [outcome.matrix for outcome in report.rounded]
        results.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert results[0] == results[1]


def test_experts_are_rounded_with_their_layer(tmp_path: Path) -> None:
    model = make("mixtral", tmp_path / "model", "float32", hidden_size=64, intermediate_size=128)
    in_two_steps(model, tmp_path / "two.zt")
    ingot.convert(model, tmp_path / "one.zt", recipe=RECIPE, calibration=calibration_of(model))
    assert (tmp_path / "one.zt").read_bytes() == (tmp_path / "two.zt").read_bytes()


def test_a_stopped_run_continues_after_the_last_rounded_layer(model: Path, tmp_path: Path) -> None:
    whole = calibration_of(model)
    unstopped = ingot.convert(model, tmp_path / "whole.zt", recipe=RECIPE, calibration=whole)
    with pytest.raises(StoppedError):
        ingot.convert(
            model, tmp_path / "out.zt", recipe=RECIPE, calibration=calibration_of(model, stop_after=1), resume=True
        )
    assert not (tmp_path / "out.zt").exists()
    remaining = calibration_of(model)
    report = ingot.convert(model, tmp_path / "out.zt", recipe=RECIPE, calibration=remaining, resume=True)
    assert remaining.layers == whole.layers[1:]  # type: ignore[attr-defined]
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "whole.zt").read_bytes()
    assert list(report.rounded) == list(unstopped.rounded)
    assert not list(tmp_path.glob(".*"))


def test_a_stopped_run_does_not_continue_with_another_recipe(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zt"
    with pytest.raises(StoppedError):
        ingot.convert(model, out, recipe=RECIPE, calibration=calibration_of(model, stop_after=1), resume=True)
    with pytest.raises(IngotError) as refused:
        ingot.convert(model, out, recipe="q4_0-calibrated", calibration=calibration_of(model), resume=True)
    assert refused.value.rule == "resume.changed"


def test_a_stopped_run_without_resume_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        ingot.convert(model, tmp_path / "out.zt", recipe=RECIPE, calibration=calibration_of(model, stop_after=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_matrix_that_cannot_be_rounded_is_named(model: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with ingot.open(model) as checkpoint:
        tensors = {key: np.array(checkpoint[key].numpy()) for key in checkpoint}
    tensors[name][0] = 1e30  # its scales are too large for f16, its outputs finite
    ingot.save(model / "model.safetensors", tensors, overwrite=True)
    calibration = calibration_of(model, fisher=False)
    options: dict[str, Any] = {"calibration": calibration, "no_tokenizer": True, "resume": True}
    with pytest.raises(IngotError) as refused:
        ingot.convert(model, tmp_path / "out.gguf", recipe="q4_0-calibrated", **options)
    assert refused.value.rule == "quantizer.scale-overflow"
    assert str(refused.value).startswith(f"{name}: ")


def test_the_estimate_comes_before_the_first_layer(model: Path, tmp_path: Path) -> None:
    calibration = calibration_of(model)
    estimates: list[Estimate] = []

    def announce(estimate: Estimate) -> None:
        assert not calibration.layers  # type: ignore[attr-defined]
        estimates.append(estimate)

    ingot.convert(model, tmp_path / "out.zt", recipe=RECIPE, calibration=calibration, announce=announce)
    (estimate,) = estimates
    assert estimate.calibration > 0
    assert estimate.rounding > 0
    assert estimate.disk > 0
    assert "of disk until it is done" in estimate.describe()
