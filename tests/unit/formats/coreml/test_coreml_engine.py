"""Packages are rewritten by the one engine: plans are data, the memory ceiling holds; resuming is beside writing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.core.runtime.memory import parse_size
from ingot.errors import ResourceError
from ingot.formats.coreml.layer import Layer, layer_template
from tests.support.memory import peak_anonymous

WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
_CHUNK = 1 << 20


def package(path: Path, shape: tuple[int, int]) -> Path:
    """Write a package of a layer, its numbers one random mebibyte again and again."""
    numbers = np.random.default_rng(0).standard_normal(_CHUNK // 2).astype(np.float16).tobytes()
    for name, part in layer_template(Layer(shape, False, "iOS16")).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with (path / name).open("wb") as file:
            head = min(part.length, 128)
            file.write(bytes(part.source.view(part.offset, head)))
            if name != WEIGHTS:
                file.write(bytes(part.source.view(part.offset + head, part.length - head)))
                continue
            for start in range(head, part.length, _CHUNK):
                file.write(numbers[: min(_CHUNK, part.length - start)])
    return path


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_the_plan_of_a_package_is_carried_out_from_its_json(tmp_path: Path) -> None:
    source, plan = package(tmp_path / "a.mlpackage", (64, 128)), str(tmp_path / "plan.json")
    out = str(tmp_path / "b.mlpackage")
    assert run(["convert", str(source), out, "--recipe", "ane-int8", "--plan-out", plan, "-q"]) == 0
    assert {step["kind"] for step in json.loads(Path(plan).read_text())["steps"]} == {"encode"}
    ingot.execute(plan)
    ingot.convert(source, tmp_path / "c.mlpackage", "ane-int8")
    assert files(tmp_path / "b.mlpackage") == files(tmp_path / "c.mlpackage")


def test_a_ceiling_that_is_too_low_is_told_before_anything_is_written(tmp_path: Path) -> None:
    source = package(tmp_path / "a.mlpackage", (64, 128))
    with pytest.raises(ResourceError) as caught:
        ingot.convert(source, tmp_path / "b.mlpackage", "ane-int8", max_ram="1MiB")
    assert caught.value.rule == "ram.ceiling"
    assert [item.name for item in tmp_path.iterdir()] == ["a.mlpackage"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")
@pytest.mark.parametrize("recipe", ["ane-int8", "decompress"])
def test_memory_stays_under_the_ceiling(tmp_path: Path, recipe: str) -> None:
    """The constant (256 MiB) alone is larger than the ceiling."""
    source = package(tmp_path / "a.mlpackage", (8192, 16384))
    command = [sys.executable, "-m", "ingot.cli.main", "convert", str(source), str(tmp_path / "b.mlpackage")]
    peak = peak_anonymous([*command, "--recipe", recipe, "--max-ram", "192MiB", "-q"])
    assert peak < parse_size("192MiB")
