"""Bits against quality: one model by several grids and quantizers, KL to the model itself on a text.

    python bench/quality.py MODEL --text heldout.txt    a table; ten minutes for 8 M weights

Only matrices of attention and feed-forward networks are rounded. "Bits" are those of these matrices as stored, codes
and scales. Statistics are of samples of the model, unless `--statistics` has some.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import ingot
from ingot.recipes.load import parse_recipe

RULE = """
[[rules]]
roles = ["attention", "mlp"]
min_ndim = 2
min_size = 4096
codec = "{codec}"
options = {options}
{quantizer}
"""
Q4_0 = '{ type = "q4_0" }'
ROWS = [
    ("Q4_0 by search", 4.5, "ggml_blocks", Q4_0, ""),
    ("INT4 symmetric, groups of 32, least squares", 4.5, "affine", '{ bits = 4, group = 32, quantizer = "mse" }', ""),
    *(("Q4_0", 4.5, "ggml_blocks", Q4_0, quantizer) for quantizer in ("importance", "gptq", "two-sided")),
    ("table, groups of 32", 4.5, "scaled_codebook", "{ bits = 4, group = 32 }", "two-sided"),
    *(
        (f"table of {n} bits, groups of 96", n + 1 / 6, "scaled_codebook", f"{{ bits = {n}, group = 96 }}", "two-sided")
        for n in (4, 3, 2)
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder, statistics = Path(name), given.statistics
        if statistics is None:
            statistics = folder / "statistics.safetensors"
            ingot.calibrate(given.model, statistics)
        print(f"{'grid':48} {'quantizer':12} {'bits':>6} {'KL':>9} {'perplexity':>11}", flush=True)
        for label, bits, codec, options, quantizer in ROWS:
            text = RULE.format(
                codec=codec, options=options, quantizer=f'quantizer = "{quantizer}"' if quantizer else ""
            )
            recipe, target = parse_recipe(text, where="bench/quality.py"), folder / "model"
            more = {"calibration": statistics} if quantizer else {}
            ingot.convert(given.model, target, recipe, overwrite=True, **more)
            scored = ingot.evaluate(target, given.text, reference=given.model)
            print(f"{label:48} {quantizer:12} {bits:6.3f} {scored.kl:9.5f} {scored.perplexity:11.3f}", flush=True)
            found.append({"grid": label, "quantizer": quantizer, "bits": bits, "kl": scored.kl})
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
