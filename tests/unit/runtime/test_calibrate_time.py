"""Estimates of the time of a calibration: scaled measurements of the calibration's own steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.runtime.calibration import calibrate_passes, calibrate_time
from ingot.runtime.calibration.calibrate import ModelCalibration
from ingot.runtime.calibration.calibrate_time import Cost
from ingot.runtime.calibration.calibration import CalibrateOptions, CalibratePlan
from tests.support.models import make, make_tokenizer

SHORT: dict[str, Any] = {"samples": 24, "length": 12}


class StepClock:
    """A clock that advances only when a step processes windows: a second per layer, and one per window."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(calibrate_time, "clock", lambda: self.seconds)
        for name in ("_forward", "_backward", "_leave"):
            self._count(monkeypatch, name, getattr(calibrate_passes.Passes, name))
        draw = calibrate_time.draw_token

        def counted(*arguments: Any) -> Any:
            self.seconds += 0.25
            return draw(*arguments)

        monkeypatch.setattr(calibrate_time, "draw_token", counted)

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str, step: Callable[..., None]) -> None:
        def counted(passes: Any, *arguments: Any) -> None:
            step(passes, *arguments)
            self.seconds += 1 + len(passes.tokens)

        monkeypatch.setattr(calibrate_passes.Passes, name, counted)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "model", "float32", num_hidden_layers=4)


@pytest.mark.parametrize("fisher", [True, False])
def test_steps_are_scaled_to_all_layers_windows_and_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, fisher: bool
) -> None:
    StepClock(monkeypatch)
    plan = ModelCalibration(CalibrateOptions(model, "", fisher=fisher, **SHORT)).plan()
    sampling = 11 * 0.25  # the first of 12 tokens is no step of the model
    layers = 4 * (1 + 24)
    leave = 1 + 24
    assert plan.seconds == pytest.approx(sampling + layers * (2 if fisher else 1) + leave, rel=0.01)


def test_measurements_do_not_change_the_statistics(model: Path, tmp_path: Path) -> None:
    plans: list[CalibratePlan] = []
    ingot.calibrate(model, tmp_path / "a.safetensors", plan=plans.append, **SHORT)
    ingot.calibrate(model, tmp_path / "b.safetensors", **SHORT)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert plans[0].seconds > 0


@pytest.mark.parametrize("architecture", ["mixtral", "tied qwen2", "gpt2"])
@pytest.mark.parametrize("streamed", [False, True])
def test_other_architectures_are_measured(
    tmp_path: Path, architecture: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(architecture, tmp_path / "model", "float32")
    if streamed:  # no room for the model, so that layers are loaded for each step
        monkeypatch.setattr("ingot.runtime.calibration.calibrate_plan._BATCH", 1 << 40)
    plan = ModelCalibration(CalibrateOptions(folder, "", samples=3, length=12)).plan()
    assert plan.seconds > 0
    assert (plan.reads == 1) == (not streamed)


def test_a_text_of_a_single_batch_is_measured(model: Path) -> None:
    plan = ModelCalibration(CalibrateOptions(model, "", samples=1, length=12)).plan()
    assert plan.seconds > 0


def test_cost_grows_with_batches() -> None:
    assert Cost(2.0, 0.5).seconds(10) == 7.0


def test_a_model_that_does_not_fit_in_memory_reads_the_text_of_the_package(tmp_path: Path) -> None:
    size = make_tokenizer(tmp_path / "m")
    make("llama", tmp_path / "m", "float32", vocab_size=size)
    options = CalibrateOptions(tmp_path / "m", "", samples=2, length=12, text_if_large=True)
    assert ModelCalibration(options).plan().source == "samples of the model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingot.runtime.calibration.calibrate.fits_in_memory", lambda *_: False)
        assert ModelCalibration(options).plan().source == "text that Ingot ships"
