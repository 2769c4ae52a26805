"""Directories and archives that squish's own program writes, from a tiny model; run by a Python that has squish-ai.

    python -m venv /tmp/squish
    /tmp/squish/bin/pip install --no-deps squish-ai==9.34.15
    /tmp/squish/bin/pip install numpy safetensors rich psutil zstandard
    /tmp/squish/bin/python tests/golden/make_squish_ai.py tests/golden/squish_ai

Times and paths in what the program notes of its run are left out; all else is as it wrote it. Needs nothing of Ingot.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

FORMS = {
    "int8": (),
    "milo": ("--int3",),
    "milo-groups-of-32": ("--int3", "--int3-group-size", "32", "--int3-max-rank", "3"),
    "nf4": ("--nf4",),
}
SHAPES = {
    "model.embed_tokens.weight": (40, 24),
    "model.layers.0.self_attn.q_proj.weight": (24, 64),
    "model.layers.0.mlp.down_proj.weight": (24, 36),  # 864 elements: no multiple of 64
    "model.layers.0.conv.weight": (4, 3, 8),
    "model.norm.weight": (64,),
}


def source(folder: Path) -> None:
    """Save the model that is compressed."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(SHAPES)
    tensors = {name: rng.normal(0, 0.05, SHAPES[name]).astype(np.float32) for name in names}
    for index, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{index:05}-of-00002.safetensors")


def compress(model: Path, out: Path, *flags: str) -> None:
    """Run squish's program."""
    command = [sys.executable, "-m", "squish.convert", "--model-dir", str(model), "--output", str(out)]
    subprocess.run([*command, "--min-free-gb", "0", *flags], check=True, stdout=subprocess.DEVNULL)


def make(root: Path) -> None:
    """Write everything."""
    source(root / "model")
    for name, flags in FORMS.items():
        compress(root / "model", root / name, *flags)
        (root / name / "stats.json").unlink()
    compress(root / "model", root / "weights.npz", "--format", "npz")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
