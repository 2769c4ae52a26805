"""What each preset keeps of a model: bits of the matrices that it quantizes, perplexity and KL on prose and code.

    python bench/presets.py MODEL TEXTS [--statistics FILE] [--presets int4 q4_0 ...] [--json out.json]
    python bench/presets.py MODEL TEXTS --statistics FILE --presets w4a16 w4a16-calibrated --kinds prose --sequences 24

TEXTS has ``heldout_prose.txt`` and ``heldout_code.txt``: 96 windows of 256 tokens of each, or as many as
``--sequences`` sets. Every preset is written to a
``.zt``, whatever container it is for, and decoded from there: its integers are the same. The table of
``spec/recipes.md`` has these figures, of ``../shared/models/base``. Those that calibrate take statistics of samples of
the model, 96 if none are given.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rows import WINDOWS, Bench, Matrices

import ingot

KINDS = ("prose", "code")
# Those of quantized grids. The others keep values, or want a container of their own.
PRESETS = (
    "int8", "w4a16-calibrated", "w4a16", "int4-calibrated", "coded4-calibrated", "trellis4-calibrated",
    "table4-calibrated", "int4", "coded3-calibrated", "trellis3-calibrated", "table3-calibrated", "int3",
    "trellis2-calibrated", "table2-calibrated", "int2",
    "palette8", "palette4-grouped", "palette4", "mlx-4bit-calibrated", "mlx-4bit", "mlx-3bit", "q8_0",
    "q6_k-calibrated", "q6_k", "q5_k", "q4_k-calibrated", "q4_k", "q4_0-calibrated", "q4_0", "iq4_xs-calibrated",
    "iq4_xs", "q3_k-calibrated", "q2_k-calibrated",
)  # fmt: skip


def made(bench: Bench, preset: str, statistics: Path, folder: Path) -> tuple[int, int, Matrices]:
    """Convert and decode; return the bytes of what is packed, how many weights these hold, and all values."""
    more = {"calibration": statistics} if preset.endswith("-calibrated") else {}
    ingot.convert(bench.path, folder / "preset.zt", preset, overwrite=True, **more)
    with ingot.open(folder / "preset.zt") as found:
        packed = [found[name] for name in bench.all if found[name].codec != "dense"]
        nbytes = sum(part.length for tensor in packed for part in tensor.parts.values())
        values = {name: found[name].numpy("f32") for name in bench.all}
        return nbytes, sum(tensor.size for tensor in packed), values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="the texts")
    parser.add_argument("--sequences", type=int, default=WINDOWS, help="windows of each text (default %(default)s)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = {kind: given.texts / f"heldout_{kind}.txt" for kind in given.kinds}
    bench = Bench(given.model, texts, given.sequences)
    found: dict[str, Any] = {}
    titles = " ".join(f"{'perplexity of ' + kind:>19} {'KL of ' + kind:>12}" for kind in given.kinds)
    print(f"{'preset':26} {'bits':>7} {titles}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        statistics = given.statistics or Path(name, "samples.safetensors")
        if given.statistics is None:
            ingot.calibrate(given.model, statistics)
        for preset in given.presets:
            nbytes, weights, values = made(bench, preset, statistics, Path(name))
            row = {**bench.of_matrices(nbytes, values), "bits": 8 * nbytes / weights}
            figures = " ".join(f"{row[kind]['perplexity']:19.3f} {row[kind]['kl']:12.5f}" for kind in given.kinds)
            print(f"{preset:26} {row['bits']:7.3f} {figures}", flush=True)
            found[preset] = row
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
