"""``bench/gpu.py`` without a GPU: it runs on small shapes, and says that its figures are not those of a GPU."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "bench" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "bench_gpu", module)
    spec.loader.exec_module(module)
    return module


def run(program: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert program.main([*arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
def test_all_parts_run_on_the_cpu(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(program, capsys, "--device", "cpu", "--tiny")
    assert (result["gpu"], result["left_out"], result["peak_device_bytes"]) == (False, {}, None)
    assert "not those of a GPU" in result["note"]
    for by_quantizer in result["agreement"].values():
        for quantizer in ("importance", "gptq"):
            assert by_quantizer[quantizer]["equal_codes"] >= 0.999
            assert by_quantizer[quantizer]["error_ratio"] == pytest.approx(1, rel=1e-3)
        assert by_quantizer["two-sided"]["error_ratio"] < 1.1
    for name in ("gptq", "importance", "two-sided"):
        assert len(result[name]["seconds"]) == 7
        assert result[name]["seconds_a_layer"] > 0
    assert result["calibration"]["tokens_a_second"] > 0
    assert result["decoding"]["tokens_a_second"] > 0


def test_parts_without_time_are_named(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    program.agreement = lambda run: {}  # type: ignore[attr-defined]
    result = run(program, capsys, "--device", "cpu", "--tiny", "--limit", "0")
    assert {"calibration", "decoding", "gptq", "two-sided"} <= set(result["left_out"])
    assert "gptq" not in result


def test_no_memory_for_a_part_leaves_the_others(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for name in ("agreement", "calibration", "decoding"):
        setattr(program, name, fails)
    program.rounding = lambda run, *_, **__: {"seconds": {}}  # type: ignore[attr-defined]
    result = run(program, capsys, "--device", "cpu", "--tiny")
    assert set(result["left_out"]) == {"agreement", "calibration", "decoding"}
    assert result["gptq"] == {"seconds": {}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(program, capsys)
    assert (result["gpu"], result["device"]) == (False, None)
    assert "no GPU" in result["note"]
