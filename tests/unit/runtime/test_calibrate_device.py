"""Calibration on a device: no operation mixes it with the CPU, and statistics equal those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ingot
from ingot.cli.main import run
from ingot.conversion import round_by_layers, rounding_view
from ingot.core.runtime.device import widest_float
from ingot.errors import IngotError, UsageError
from ingot.model.statistics import Statistics
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.tensor import Outcome
from ingot.runtime.calibration import calibrate as module
from ingot.runtime.calibration.calibrate_passes import Passes
from ingot.runtime.calibration.calibration import CalibrateOptions
from ingot.runtime.calibration.samples import draw
from ingot.views.rounded_view import Rounding
from tests.support.fake_device import NAME, fake_device
from tests.support.models import make, make_tokenizer
from tests.unit.runtime.test_device import ANY_DEVICE

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
TEXT = "The layers of a model run on a device, and the sums stay there until a layer is complete. " * 20


@pytest.fixture(autouse=True)
def known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the second device of tests as the device of a calibration."""
    resolve = module.resolve_device
    monkeypatch.setattr(
        module, "resolve_device", lambda device: torch.device(NAME, 0) if device == NAME else resolve(device)
    )


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    with Statistics.open(path) as statistics, ingot.open(path) as stored:
        return {name: tensor.numpy().copy() for name, tensor in stored.items()}, dict(statistics.metadata)


def calibrate(model: Path, out: Path, **options: Any) -> tuple[Arrays, dict[str, str]]:
    ingot.calibrate(model, out, samples=3, length=12, **options)
    return read(out)


def on_device(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, **options: Any) -> tuple[Arrays, dict[str, str]]:
    with fake_device(monkeypatch) as mode:
        ingot.calibrate(model, out, samples=3, length=12, device=NAME, **options)
    assert mode.operations > 100
    return read(out)


def assert_close(values: Arrays, expected: Arrays) -> None:
    assert set(values) == set(expected)
    for name, array in expected.items():
        limit = 1e-4 * float(np.abs(array).max(initial=0)) + 1e-12
        np.testing.assert_allclose(values[name], array, rtol=1e-3, atol=limit, err_msg=name)


@ANY_DEVICE
@pytest.mark.parametrize("kind", ["llama", "mixtral", "bert"])
def test_forward_passes_over_a_text_mix_no_devices(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind, tmp_path / "model", "float32", vocab_size=300)
    make_tokenizer(model)
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"text": tmp_path / "text.txt", "fisher": False}
    expected, _ = calibrate(model, tmp_path / "cpu.safetensors", **options)
    values, _ = on_device(monkeypatch, model, tmp_path / "device.safetensors", **options)
    assert_close(values, expected)


@ANY_DEVICE
@pytest.mark.parametrize("fits", [False, True])
def test_gradients_and_samples_mix_no_devices(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", tmp_path / "model", "float32")
    monkeypatch.setattr(module, "free_memory", lambda *_: 1 << 30 if fits else 0)
    values, metadata = on_device(monkeypatch, model, tmp_path / "device.safetensors")
    monkeypatch.setattr("ingot.runtime.calibration.samples.draw", by_sums)
    monkeypatch.setattr("ingot.runtime.calibration.calibrate_passes.draw", by_sums)
    expected, on_cpu = calibrate(model, tmp_path / "cpu.safetensors")
    assert metadata == on_cpu  # the same tokens
    assert_close(values, expected)


def by_sums(_: Any, probabilities: Any) -> Any:
    """Draw on the CPU as other devices do."""
    sums = probabilities.cumsum(-1)
    heights = torch.rand(len(sums), 1) * sums[:, -1:]
    return torch.searchsorted(sums, heights, right=True).clamp_(max=sums.shape[-1] - 1)


@ANY_DEVICE
def test_draws_on_a_device_follow_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = torch.tensor([0.0, 0.125, 0.0, 0.625, 0.25, 0.0]).expand(4000, -1).contiguous()
    with fake_device(monkeypatch):
        torch.manual_seed(1)
        drawn = draw(torch, probabilities.to(NAME)).cpu()
    counts = drawn.flatten().bincount(minlength=6) / 4000
    assert drawn.shape == (4000, 1)
    assert counts.tolist() == pytest.approx(probabilities[0].tolist(), abs=0.03)
    assert counts[[0, 2, 5]].sum() == 0


def test_memory_that_runs_out_halves_what_passes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", tmp_path / "model", "float32")
    expected, _ = calibrate(model, tmp_path / "a.safetensors", fisher=False)
    batches = limit_windows(monkeypatch, 1)
    values, _ = calibrate(model, tmp_path / "b.safetensors", fisher=False)
    assert 1 in batches
    assert_close(values, expected)


def test_memory_that_runs_out_for_good_leaves_a_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make("llama", tmp_path / "model", "float32")
    expected, _ = calibrate(model, tmp_path / "a.safetensors")
    out = tmp_path / "b.safetensors"
    command = ["calibrate", str(model), "-o", str(out), "--samples", "3", "--length", "12", "--quiet"]
    capsys.readouterr()
    with monkeypatch.context() as patched:
        limit_windows(patched, 0, after=3)
        assert run([*command, "--resume"]) != 0
    error = capsys.readouterr().err
    assert "[device.memory]" in error
    assert len(error.strip().splitlines()) == 1, error
    assert not out.exists()
    assert run([*command, "--resume"]) == 0
    values, _ = read(out)
    assert_close(values, expected)


def limit_windows(monkeypatch: pytest.MonkeyPatch, limit: int, after: int = 0) -> list[int]:
    """Raise torch's error for devices without memory if more than ``limit`` windows pass, after some batches."""
    sizes: list[int] = []
    batches = Passes._batches

    def limited(self: Any) -> Any:
        for first, tokens in batches(self):
            sizes.append(len(tokens))
            if len(tokens) > limit and len(sizes) > after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            yield first, tokens

    monkeypatch.setattr(Passes, "_batches", limited)
    return sizes


def test_a_device_that_is_not_there_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="device here") as caught:
        ingot.calibrate(tmp_path / "none", tmp_path / "out.safetensors", device="xpu:7")
    assert caught.value.rule == "model.device"


def test_a_run_on_a_device_does_not_continue_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", tmp_path / "model", "float32")
    out = tmp_path / "out.safetensors"
    with monkeypatch.context() as patched:
        limit_windows(patched, 0, after=2)
        with pytest.raises(IngotError):
            ingot.calibrate(model, out, samples=3, length=12, resume=True)
    with fake_device(monkeypatch), pytest.raises(UsageError) as caught:
        ingot.calibrate(model, out, samples=3, length=12, resume=True, device=NAME)
    assert caught.value.rule == "resume.changed"


def test_sums_are_in_f64_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest_float(torch, torch.device("cpu")) == torch.float64
    with fake_device(monkeypatch):
        assert widest_float(torch, torch.device(NAME)) == torch.float32


@ANY_DEVICE
@pytest.mark.slow
def test_a_conversion_calibrates_and_rounds_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", tmp_path / "model", "float32", hidden_size=64, intermediate_size=64)
    recipe = tmp_path / "gptq.toml"
    recipe.write_text(RECIPE)
    expected = ingot.convert(model, tmp_path / "cpu.zt", recipe=recipe, calibration=calibration(model, "cpu"))
    monkeypatch.setattr(rounding_view, "resolve_device", lambda device: torch.device(NAME, 0))
    # The second device exists in this thread alone.
    monkeypatch.setattr(round_by_layers, "ordered", lambda function, items, _: map(function, items))
    with fake_device(monkeypatch) as mode:
        report = ingot.convert(
            model, tmp_path / "out.zt", recipe=recipe, calibration=calibration(model, NAME), device=NAME
        )
    assert mode.operations > 1000
    errors, on_cpu = ([outcome.error for outcome in item.rounded] for item in (report, expected))
    assert len(errors) > 4
    assert errors == pytest.approx(on_cpu, rel=0.3)  # other tokens are drawn


RECIPE = """
[[rules]]
match = ["model.layers.*"]
min_ndim = 2
codec = "affine"
options = { bits = 4, group = 32 }
quantizer = "gptq"
"""


def calibration(model: Path, device: str) -> Any:
    return module.ModelCalibration(CalibrateOptions(model, "", samples=4, length=16, fisher=False, device=device))


def test_matrices_that_are_rounded_on_the_cpu_in_spite_of_a_device_are_named() -> None:
    choices = {
        name: parse_quantizer("gptq", "ggml_blocks", {"type": block}) for name, block in (("a", "q4_k"), ("b", "q4_0"))
    }
    outcome = Outcome("a", 0.1, 9, 0.01, 0)
    for device, expected in ((None, 0), (torch.device("cuda"), 1)):
        rounding = Rounding(choices, lambda: None, "statistics", device=device, outcomes={"a": outcome})  # type: ignore[arg-type,return-value]
        notes = [note for note in rounding_view.rounding_notes(rounding) if "rounded on the CPU" in note]
        assert len(notes) == expected
        assert all(note.endswith(": a") for note in notes)


def test_convert_refuses_a_device_that_nothing_would_use(tmp_path: Path) -> None:
    model = make("llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    for recipe in (None, "q8_0"):
        with pytest.raises(UsageError) as caught:
            ingot.convert(model, tmp_path / "out.zt", recipe=recipe, device="cuda")
        assert caught.value.rule == "convert.device"


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "MODEL", "-o", "OUT.gguf", "--bits", "4"],
        ["convert", "MODEL", "OUT.gguf", "--recipe", "q4_0-calibrated"],
        ["calibrate", "MODEL", "-o", "OUT.safetensors"],
        ["merge", "MODEL", "MODEL", "--method", "linear", "-o", "OUT.gguf", "--recipe", "q4_0-calibrated"],
    ],
)
def test_commands_refuse_a_device_that_is_not_there(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make("llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    names = [text.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out")) for text in arguments]
    capsys.readouterr()
    assert run([*names, "--device", "xpu:7"]) == 2
    error = capsys.readouterr().err
    assert "[model.device]" in error
    assert len(error.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
