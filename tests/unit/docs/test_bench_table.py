"""Figures reach the documents by way of the committed file, without what only the machine that measured them knows."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

COST = {"processor": 12e-6, "memory": 960.4}
OPENING = {"tensors": 10_000, "opened_s": {"peer": 0.01, "ingot": 0.005}, "started_s": {"inspect": 0.25}}
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
LOSSLESS = {
    "isa": "v3",
    "rows": [
        {"source": "Gaussian bf16", "name": "tca_tbe", "bits": 11.21, "encode": 2.0, "decode": 4.127},
        {"source": "Gaussian bf16", "name": "zstd -3", "bits": 12.5, "encode": 0.25, "decode": 1.0},
        {"source": "an encoder, f32", "name": "zstd -3", "bits": 29.75, "encode": 0.5, "decode": 1.5},
    ],
}
LOAD = {
    "bytes": 2_000_000_000,
    "threads": 2,
    "warm_s": {"ingot        .zt": 0.5},
    "cold_s": {"ingot        .zt": 1.0},
    "packed_s": {
        "ingot        .zt int4": 0.5,
        "ingot        .squizd int4": 0.8,
        "ingot        .zt int4, 1 thread": 1.0,
        "ingot        .squizd int4, 1 thread": 1.6,
    },
    "list_s": {},
    "import_ms": {},
}
DEMO_ROW = {
    "recipe": "int4",
    "file": "model-int4.squizd",
    "size": 3 << 20,
    "bits_per_weight": 8.0,
    "worst_error": 0.1,
    "mean_error": 0.05,
    "perplexity": 19.25,
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_text(json.dumps(KERNELS))
    (folder / "machine.json").write_text('{"processor": "Abacus", "python": "3.11", "versions": {"peer": "1.2"}}')
    demo = {"folder": "/somewhere/secret", "rows": [{**DEMO_ROW, "convert_seconds": 0.125, "load_seconds": 0.0625}]}
    (folder / "demo.json").write_text(json.dumps(demo))
    return folder


def test_new_results_replace_old_ones_and_others_stay(bench_table: ModuleType, results: Path, tmp_path: Path) -> None:
    (tmp_path / "bench" / "published.json").write_text('{"kernels": {"isa": "v1", "rows": []}, "load": {"bytes": 1}}')
    figures = bench_table.take_over(tmp_path)
    assert figures["kernels"] == KERNELS
    assert figures["load"] == {"bytes": 1}
    assert figures == bench_table.published(tmp_path)
    assert "secret" not in (tmp_path / "bench" / "published.json").read_text("utf-8")
    assert figures["demo"]["rows"] == [DEMO_ROW]  # no times


def test_only_what_was_measured_is_shown(bench_table: ModuleType, results: Path, tmp_path: Path) -> None:
    text = bench_table.render(bench_table.take_over(tmp_path))
    assert text.startswith("Abacus, ")
    assert "peer 1.2." in text
    assert "| INT4 g128 | 0.95 (17.0) |  |  | 1.50 |  |" in text
    assert "| quantize 4-bit g32 f32, Q4_0 | 0.50 | 0.25 |" in text
    assert "Loading" not in text
    assert "Converting" not in text


def test_every_source_is_a_column_of_the_lossless_table(bench_table: ModuleType) -> None:
    text = bench_table.render({"lossless": LOSSLESS})
    assert "|  | Gaussian bf16 | an encoder, f32 |" in text
    assert "| tca_tbe | 11.21 (2.00, 4.13) |  |" in text
    assert "| zstd -3 | 12.50 (0.25, 1.00) | 29.75 (0.50, 1.50) |" in text


def test_packed_weights_are_shown_where_they_were_measured(bench_table: ModuleType) -> None:
    text = bench_table.render({"load": LOAD})
    assert "`.squizd`, warm: 4.00 and 2.50 GB/s of f16; on one thread 2.00 and 1.25." in text
    assert "int4" not in bench_table.render({"load": {**LOAD, "packed_s": {}}})


def test_the_demo_table_names_the_container(bench_table: ModuleType) -> None:
    table = bench_table.render_demo({"rows": [DEMO_ROW]}).splitlines()
    assert table[2].split() == ["int4", ".squizd", "3.00", "MiB", "8.00", "10.00", "%", "5.00", "%", "19.250"]


def test_deltas_are_shown_beside_the_peer(bench_table: ModuleType) -> None:
    delta = {"isa": "v3", "rows": [{"source": "a pair", "name": "memcpy", "share": 1.0, "encode": 9.5, "apply": 0.0}]}
    row = {"strategy": "int4", "name": "deltatensors diff", "seconds": 9.25, "ratio": None}
    ours = {"strategy": "int4", "name": "ingot diff", "seconds": 1.0, "ratio": 9.25}
    exact = {"strategy": "exact", "name": "ingot diff", "seconds": 2.5, "ratio": None}
    failed = {"strategy": "exact", "name": "ingot patch to files", "failed": "why"}
    patch = {"gigabytes": 0.5, "rows": [row, ours, exact, failed]}
    text = bench_table.render({"delta": delta, "patch": patch})
    assert "| a pair | memcpy | 100.0 | 9.50 |  |" in text
    assert "Deltas of 0.5 GB" in text
    assert "| deltatensors diff | 9.25 |  |" in text
    assert "| ingot diff | 1.00 (9.2 x) | 2.50 |" in text
    assert "| ingot patch to files |  |  |" in text


def test_opening_is_shown_beside_the_peer(bench_table: ModuleType) -> None:
    text = bench_table.render({"opening": OPENING})
    assert "| ingot | 5.0 | 0.50 |" in text
    assert "inspect 250" in text
