"""The walks of docs/architecture.md are what a trace shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
from tests.support.paths import DEMO_DATA

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
WALKS = {
    "Open": ["-c", 'import ingot\nwith ingot.open("model") as c: c["model.norm.weight"].numpy()'],
    "Convert": ["convert", "model", "out{run}.gguf", "--recipe", "q4_k"],
    "Diff": ["diff", "base.safetensors", "tuned.safetensors", "-o", "delta{run}.zt"],
    "Verify": ["verify", "model.zt"],
    "Load a model": ["-c", 'import ingot; ingot.load_model("model")'],
}


def functions_of(walk: str) -> list[str]:
    section = PAGE.partition(f"\n### {walk}\n")[2].partition("\n### ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py: [\w.]+)`", section, re.MULTILINE)


def test_each_section_is_a_walk() -> None:
    assert set(re.findall(r"^### (.+)$", PAGE, re.MULTILINE)) == set(WALKS)


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_lists_functions_in_the_order_of_their_first_call(walk: str, tmp_path: Path) -> None:
    if walk == "Load a model":
        pytest.importorskip("transformers")
    data = DEMO_DATA
    shutil.copytree(data, tmp_path / "model", ignore=shutil.ignore_patterns("__*"))
    if walk == "Diff":
        shutil.copy(data / "model.safetensors", tmp_path / "base.safetensors")
        ingot.convert(data / "model.safetensors", tmp_path / "bf.zt", recipe="int8")
        ingot.convert(tmp_path / "bf.zt", tmp_path / "tuned.safetensors", recipe="decompress")
    if walk == "Verify":
        ingot.convert(data / "model.safetensors", tmp_path / "model.zt", recipe="int4")
    command = [sys.executable, str(ROOT / "tools" / "trace_files.py"), "--functions", *WALKS[walk]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    traced = {line: index for index, line in enumerate(done.stdout.splitlines())}
    functions = functions_of(walk)
    assert len(functions) >= 8
    assert [name for name in functions if name not in traced] == []
    assert functions == sorted(functions, key=traced.__getitem__)
