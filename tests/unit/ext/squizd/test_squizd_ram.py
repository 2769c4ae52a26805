"""``--max-ram`` holds while .squizd files are written and read: measured from outside, tensors past the ceiling."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ingot.core.runtime.memory import parse_size

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc"),
]
CEILING = "128MiB"
ROWS, COLS = 4096, 16384
RULE = '[[rules]]\ncodec = "affine"\noptions = {{ {} }}\n'
RECIPES = {
    "int4": RULE.format("bits = 4, group = 32"),
    "int2-zeros": RULE.format("bits = 2, group = 32, symmetric = false, signed = true"),
    "tca": '[[rules]]\ncodec = "tca_tbe"\n',
    "dense": None,
}


def peak_anonymous(arguments: list[str]) -> int:
    """Run ``ingot`` to its end; return the largest RssAnon seen (bytes)."""
    peak, command = 0, [sys.executable, "-m", "ingot.cli.main", *arguments, "-q"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                break
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) << 10)
            time.sleep(0.002)
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read()
    return peak


def big_checkpoint(path: Path) -> None:
    """Two bf16 matrices of 128 MiB, a small block of numbers repeated."""
    size = ROWS * COLS * 2
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(2)]
    header = {
        name: {"dtype": "BF16", "shape": [ROWS, COLS], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = (np.random.default_rng(0).standard_normal(COLS * 64, np.float32).view(np.uint32) >> 16).astype("<u2")
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(2 * ROWS // 64):
            file.write(block.tobytes())


@pytest.mark.parametrize("name", RECIPES)
def test_converting_there_and_back_stays_under_the_ceiling(tmp_path: Path, name: str) -> None:
    big_checkpoint(tmp_path / "big.safetensors")
    steps = [["big.safetensors", "a.squizd"], ["a.squizd", "b.zt"], ["b.zt", "c.squizd"], ["c.squizd", "d.safetensors"]]
    if RECIPES[name] is not None:
        (tmp_path / "recipe.toml").write_text(RECIPES[name] or "")
        steps[0] += ["--recipe", str(tmp_path / "recipe.toml")]
    for source, target, *more in steps:
        command = ["convert", str(tmp_path / source), str(tmp_path / target), *more, "--max-ram", CEILING]
        assert peak_anonymous(command) < parse_size(CEILING)
    assert (tmp_path / "a.squizd").read_bytes() == (tmp_path / "c.squizd").read_bytes()
