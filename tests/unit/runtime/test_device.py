"""``device`` of evaluation, generation and calibration: which devices are accepted, and where values are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ingot.cli.main import run
from ingot.core.border import bordered
from ingot.core.runtime.device import available_devices, resolve_device
from ingot.errors import ResourceError, UsageError
from ingot.runtime.evaluation import evaluate as evaluate_module
from ingot.runtime.evaluation import generate as generate_module
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.evaluation.generate import generate
from ingot.runtime.loading.options import LoadOptions, Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from tests.support.fake_device import NAME, DeviceTensor, fake_device
from tests.support.paths import DEMO_DATA

ANY_DEVICE = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="transformers 5.7 asks torch for the autocast key of the device's type, which the test's device lacks",
)

SHORT = Protocol(window=32, sequences=2)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_is_a_device(device: Any) -> None:
    assert resolve_device(device) == torch.device("cpu")


@pytest.mark.parametrize(
    "device",
    ["toaster", "", "cpu:1", "meta", "xla", "mkldnn", "cuda:x", "cuda:-1", "cuda:99999999999", 10**30, -1, True, None],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: Any) -> None:
    with pytest.raises(UsageError, match="device here") as caught:
        resolve_device(device)
    assert caught.value.rule == "model.device"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_devices_are_listed_by_type_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert available_devices(torch) == ["cpu", "cuda:0", "cuda:1", "mps"]
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="'cuda:2'; devices here: cpu, cuda:0, cuda:1, mps"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", str(DEMO_DATA), "--text", str(DEMO_DATA / "heldout.txt"), "--sequences", "1", "--window", "16"],
        ["generate", str(DEMO_DATA), "a", "--max-tokens", "2"],
    ],
)
def test_commands_refuse_a_device_that_is_not_there(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--device", "xpu:7"]) == 2
    assert "[model.device]" in capsys.readouterr().err
    assert run([*arguments, "--device", "cpu", "--json"]) == 0
    assert '"device": "cpu"' in capsys.readouterr().out


def test_no_memory_on_a_device_is_one_line() -> None:
    @bordered
    def load() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    with pytest.raises(ResourceError, match=r"Tried to allocate 2.00 GiB\.;") as caught:
        load()
    assert caught.value.rule == "device.memory"


def on_device(options: LoadOptions) -> Any:
    """Load a model on the CPU, then move all its values to the second device."""
    return load_model(options)._apply(lambda values: DeviceTensor(values.clone()))


@ANY_DEVICE
def test_an_evaluation_mixes_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = DEMO_DATA / "heldout.txt"
    measures = Measures(kl=True, top_k=3, per_layer=True)
    expected = evaluate(DEMO_DATA, text, DEMO_DATA, SHORT, measures=measures)
    monkeypatch.setattr(evaluate_module, "load_model", on_device)
    with fake_device(monkeypatch) as mode:
        result = evaluate(DEMO_DATA, text, DEMO_DATA, SHORT, measures=measures)
    assert mode.operations > 100
    assert result.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert (result.kl, result.tokens, result.layers) == (0, expected.tokens, expected.layers)


@ANY_DEVICE
def test_a_generation_mixes_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(DEMO_DATA, "The file", 5)
    monkeypatch.setattr(generate_module, "load_model", on_device)
    with fake_device(monkeypatch) as mode:
        result = generate(DEMO_DATA, "The file", 5)
    assert mode.operations > 100
    assert result.tokens == expected.tokens


def test_the_second_device_of_these_tests_refuses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_device(monkeypatch):
        values = torch.ones(3, device=NAME)
        with pytest.raises(RuntimeError, match="found some on the CPU"):
            values + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            values.numpy()
        with pytest.raises(TypeError, match="f64"):
            values.double()
        assert (values + values).sum().item() == 6
        assert values.cpu().tolist() == [1, 1, 1]
