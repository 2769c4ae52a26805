"""Figures reach the README by way of the committed file, without what only the machine that measured them knows."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROW: dict[str, Any] = {"unit": "GB/s", "target": None, "met": None}
KERNELS = {
    "isa": "v3",
    "rows": [
        {**ROW, "name": "dequantize INT4 g128 to bf16", "rate": 17.0, "ratio": 0.95},
        {**ROW, "name": "quantize INT4 g128 absmax from bf16", "rate": 1.5, "ratio": None},
        {**ROW, "name": "quantize 4-bit g32 f32: gguf-py Q4_0", "rate": 0.25, "ratio": None},
        {**ROW, "name": "quantize 4-bit g32 f32: Ingot", "rate": 0.5, "ratio": 2.0},
    ],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(json.dumps(KERNELS))
    (folder / "machine.json").write_text('{"processor": "Abacus", "python": "3.11", "versions": {"peer": "1.2"}}')
    (folder / "demo.json").write_text('{"folder": "/somewhere/secret", "rows": []}')
    return folder


def test_new_results_replace_old_ones_and_others_stay(bench_table: ModuleType, results: Path, tmp_path: Path) -> None:
    (tmp_path / "bench" / "published.json").write_text('{"kernels": {"isa": "v1", "rows": []}, "load": {"bytes": 1}}')
    figures = bench_table.take_over(tmp_path)
    assert figures["kernels"] == KERNELS
    assert figures["load"] == {"bytes": 1}
    assert figures == bench_table.published(tmp_path)
    assert "secret" not in (tmp_path / "bench" / "published.json").read_text("utf-8")


def test_only_what_was_measured_is_shown(bench_table: ModuleType, results: Path, tmp_path: Path) -> None:
    text = bench_table.render(bench_table.take_over(tmp_path))
    assert text.startswith("Abacus, ")
    assert "peer 1.2." in text
    assert "| INT4 g128 | 0.95 (17.0) |  |  | 1.50 |  |" in text
    assert "| quantize 4-bit g32 f32, Q4_0 | 0.50 | 0.25 |" in text
    assert "Loading" not in text
    assert "Converting" not in text
