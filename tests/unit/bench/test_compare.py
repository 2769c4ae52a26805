"""``bench/compare.py``: rows are found again, ratios are turned the right way, and what fell is named."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[3] / "bench" / "compare.py"
OLD: dict[str, Any] = {
    "machine": {"processor": "A", "processors": 2, "versions": {"numpy": "2.0"}},
    "kernels": {
        "isa": "v4",
        "shape": [4096, 4096],
        "rows": [
            {"name": "memcpy", "rate": 10.0, "unit": "GB/s", "ratio": None, "target": None, "met": None},
            {"name": "INT4 g128", "rate": 5.0, "unit": "GB/s", "ratio": 1.2, "target": 1.1, "met": True},
        ],
    },
    "load": {"bytes": 7, "warm_s": {"ingot        .zt": 0.5, "safetensors  .safetensors": 0.4}, "import_ms": {"a": 3}},
    "packed": {
        "products": [
            {"shape": [8, 8], "form": "int4", "batch": 1, "threads": 1, "us": 10.0, "torch_us": 20.0, "ratio": 2.0},
            {"shape": [8, 8], "form": "int4", "batch": 8, "threads": 1, "us": 40.0, "torch_us": 40.0, "ratio": 1.0},
        ]
    },
    "many": {"operations": {"list .zt": {"1000": {"processor": 1e-5, "wall": 1e-5, "memory": 900.0}}}},
    "delta": {"rows": [{"section": "exact", "source": "s", "name": "xor", "share": 0.3, "encode": 1.0, "apply": 2.0}]},
}


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = util.spec_from_file_location("bench_compare", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def changed(path: str, value: float) -> dict[str, Any]:
    """Return the old run with one figure changed; ``path`` as of ``Change.name``, rows by their number."""
    new = copy.deepcopy(OLD)
    place: Any = new
    *steps, last = path.split("/")
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value
    return new


def test_nothing_fell_between_equal_runs(module: ModuleType) -> None:
    found = module.compare(OLD, OLD)
    assert {change.ratio for change in found.changes} == {1.0}
    assert not found.gone
    assert not found.added
    assert not found.fallen(0.0)
    assert not module.differing(OLD, OLD)
    # every figure that tells a direction, in every benchmark
    assert {change.name.partition("/")[0] for change in found.changes} == set(OLD) - {"machine"}


@pytest.mark.parametrize(
    ("path", "value", "ratio"),
    [
        ("kernels/rows/1/rate", 4.0, 0.8),
        ("load/warm_s/ingot        .zt", 1.0, 0.5),
        ("load/import_ms/a", 6.0, 0.5),
        ("packed/products/1/us", 50.0, 0.8),
        ("packed/products/0/ratio", 1.0, 0.5),
        ("many/operations/list .zt/1000/memory", 1800.0, 0.5),
        ("delta/rows/0/share", 0.6, 0.5),
        ("delta/rows/0/apply", 1.0, 0.5),
    ],
)
def test_what_is_worse_fell_and_what_is_better_did_not(
    module: ModuleType, path: str, value: float, ratio: float
) -> None:
    new = changed(path, value)
    (fallen,) = module.compare(OLD, new).fallen(0.05)
    assert fallen.ratio == pytest.approx(ratio)
    assert fallen.name.split("/")[-1] == path.rsplit("/", maxsplit=1)[-1]
    assert not module.compare(new, OLD).fallen(0.05)
    assert not module.compare(OLD, new).fallen(0.6)


@pytest.mark.parametrize(
    "path", ["kernels/rows/0/rate", "load/warm_s/safetensors  .safetensors", "packed/products/0/torch_us", "load/bytes"]
)
def test_peers_and_sizes_do_not_fall(module: ModuleType, path: str) -> None:
    for value in (0.01, 1000.0):
        assert not module.compare(OLD, changed(path, value)).fallen(0.05)


def test_rows_are_found_by_what_they_are_and_not_by_their_place(module: ModuleType) -> None:
    new = copy.deepcopy(OLD)
    new["packed"]["products"].reverse()
    new["kernels"]["rows"].insert(0, {"name": "INT2", "rate": 1.0, "unit": "GB/s"})
    del new["many"]
    found = module.compare(OLD, new)
    assert {change.ratio for change in found.changes} == {1.0}
    assert found.added == ["kernels/rows/INT2/rate"]
    assert all(name.startswith("many/") for name in found.gone)
    assert len(found.gone) == 3


@given(st.floats(0.01, 100), st.floats(0, 0.9))
def test_the_limit_is_the_share(module: ModuleType, factor: float, share: float) -> None:
    fallen = module.compare(OLD, changed("kernels/rows/1/rate", 5.0 * factor)).fallen(share)
    assert bool(fallen) == (5.0 * factor / 5.0 < 1 - share)


def test_the_command_names_what_fell_and_where_the_runs_differ(tmp_path: Path) -> None:
    new = changed("kernels/rows/1/rate", 4.0)
    new["machine"]["versions"]["numpy"] = "2.1"
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, result in zip(paths, (OLD, new), strict=True):
        path.write_text(json.dumps(result), "utf-8")

    def run(*names: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, names)], capture_output=True, text=True, check=False
        )

    done = run(*paths)
    assert done.returncode == 1
    assert "not the same: versions numpy: 2.0 and 2.1" in done.stdout
    assert "fell: kernels/rows/INT4 g128/rate to 0.800" in done.stdout
    assert run(paths[0], paths[0]).returncode == 0
