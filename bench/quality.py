"""Bits against quality: one model by several grids and quantizers, KL to the model itself on a text.

    python bench/quality.py MODEL --text heldout.txt              a table; ten minutes for 8 M weights
    python bench/quality.py MODEL --text heldout.txt --folding    the same with rotations and scales folded in before

Only matrices of attention and feed-forward networks are rounded. "Bits" are those of all of these as stored; of
K-quants and IQ4_XS the type of matrices whose columns 256 does not divide is in brackets.
Statistics are of samples of the model, unless `--statistics` has some.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
from rows import ASIDE, Bench, Row, blocks, integers

import ingot

OFFSET, ORDER = ', zero_kind = "offset"', ", act_order = true"
MXFP4 = '{ table = "f4_e2m1fn", group = 32, scales = "f8_e8m0fnu" }'
NVFP4 = '{ table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "multiply" }'
WAYS = ("importance", "gptq", "two-sided")
ROWS = [
    Row("Q4_0 by search", "ggml_blocks", blocks("q4_0")),
    Row("INT4 symmetric, groups of 32, least squares", "affine", integers(4, 32, ', quantizer = "mse"')),
    *(Row("Q4_0", "ggml_blocks", blocks("q4_0"), way) for way in WAYS),
    *(Row("Q4_0, act_order", "ggml_blocks", blocks("q4_0", ORDER), way) for way in WAYS[1:]),
    Row("INT4 with points, groups of 64, least squares", "affine", integers(4, 64, ', quantizer = "mse"' + ASIDE)),
    *(Row("INT4 with points, groups of 64", "affine", integers(4, 64, ASIDE), way) for way in WAYS),
    *(Row("INT4 with offsets, groups of 64", "affine", integers(4, 64, OFFSET), way) for way in WAYS[2:]),
    *(Row("INT3 with points, groups of 64", "affine", integers(3, 64, ASIDE), way) for way in WAYS),
    *(
        Row(f"{kind.upper()}", "ggml_blocks", blocks(kind), way)
        for kind in ("iq4_nl", "q4_1", "q5_0", "q5_1")
        for way in ("", *WAYS)
    ),
    *(
        Row(f"{large.upper()} ({kind.upper()})", "ggml_blocks", blocks(kind), way, large)
        for large, kind in (("q2_k", "iq4_nl"), ("q3_k", "iq4_nl"), ("iq4_xs", "iq4_nl"), ("q4_k", "q5_0"))
        for way in ("", *WAYS)
    ),
    *(
        Row(f"palette of {bits} bits, a table for 16 channels", "palette", integers(bits, 16), way)
        for bits in (4, 3)
        for way in ("", *WAYS)
    ),
    *(Row("MXFP4", "scaled_codebook", MXFP4, way) for way in ("", *WAYS)),
    *(Row("NVFP4", "scaled_codebook", NVFP4, way) for way in ("", *WAYS)),
    Row("table, groups of 32", "scaled_codebook", integers(4, 32), "two-sided"),
    *(Row(f"table of {n} bits, groups of 96", "scaled_codebook", integers(n, 96), "two-sided") for n in (4, 3, 2)),
    *(Row(f"trellis of {n} bits, groups of 96", "trellis", integers(n, 96), "two-sided") for n in (4, 3, 2)),
]
TURNED = "[rotate]\nr1 = true\nr2 = true\n"
INTEGERS = [Row(f"INT{n}, groups of 96", "affine", integers(n, 96)) for n in (4, 3, 2)]
AS_Q4_0, A_ROW = Row("Q4_0", "ggml_blocks", blocks("q4_0")), Row("INT3, a row", "affine", integers(3, 768))
FOLDED = [
    row._replace(quantizer=f"{scales}{way}", label=f"{row.label}{', turned' if turned else ''}", turned=turned)
    for way, rows in (
        ("importance", [*INTEGERS, AS_Q4_0, A_ROW]),
        ("two-sided", [*INTEGERS, AS_Q4_0]),
        ("gptq", INTEGERS[1:2]),
    )
    for row in rows
    for scales, turned in (("", ""), ("awq+", ""), ("", TURNED))
]
OUTLIERS, LARGER = 8, 32
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def with_outliers(model: Path, folder: Path) -> Path:
    """Write a model of Llama's kind that computes the same, a few channels of what norms put out 32 times as large."""
    random, folder = np.random.default_rng(0), folder / "outliers"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    with ingot.open(model) as checkpoint:
        weights = {name: checkpoint[name].numpy("f32", copy=True) for name in checkpoint}
    for name in [name for name in weights if name.split(".")[-2] in READERS]:
        layer, norm, _ = name.rsplit(".", 2)
        chosen = random.choice(len(weights[name]), OUTLIERS, replace=False)
        weights[name][chosen] *= LARGER
        for reader in READERS[norm]:
            weights[f"{layer}.{reader}.weight"][:, chosen] /= LARGER
    ingot.save(folder / "model.safetensors", weights)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--only", help="a pattern: rows whose grid and quantizer it finds")
    parser.add_argument("--sequences", type=int, default=96, help="windows of the text")
    parser.add_argument("--folding", action="store_true", help="rows with and without what is folded in before")
    parser.add_argument("--outliers", action="store_true", help="of the same model with some channels made larger")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder, statistics = Path(name), given.statistics
        given.model = with_outliers(given.model, folder) if given.outliers else given.model
        if statistics is None:
            statistics = folder / "statistics.safetensors"
            ingot.calibrate(given.model, statistics)
        bench = Bench(given.model, {"text": given.text}, given.sequences)
        print(f"{'grid':48} {'quantizer':14} {'bits':>6} {'KL':>9} {'perplexity':>11}", flush=True)
        for row in FOLDED if given.folding else ROWS:
            if given.only and not re.search(given.only, f"{row.label} {row.quantizer}"):
                continue
            figures = bench.of_row(row, statistics, folder)
            bits, kl, perplexity = figures["bits"], figures["text"]["kl"], figures["text"]["perplexity"]
            print(f"{row.label:48} {row.quantizer:14} {bits:6.3f} {kl:9.5f} {perplexity:11.3f}", flush=True)
            found.append({"grid": row.label, "quantizer": row.quantizer, "bits": bits, "kl": kl})
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
