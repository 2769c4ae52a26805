"""Render ``spec/quality.md`` and its plots from the figures that ``bench/standing.py`` took.

    python tools/quality_page.py

Figures are in ``bench/quality_base.json`` and, of the wider model, ``bench/quality_wide.json``, which are committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plots

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "spec" / "quality.md"
TEXTS = ("prose", "code")
# What a size may differ by and still count as "no more bits".
ABOUT = 0.02
SIZES = (4.25, 3.25, 2.25)

BITS = plots.Scale(1.6, 9.2, (2, 3, 4, 5, 6, 8))
LOSSES = plots.Scale(0.00005, 3, (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3))
COLOURS = {
    "Ingot": "#2f7ed8",
    "llama.cpp": "#d9822b",
    "hqq": "#7a9a2e",
    "gptqmodel": "#b0508f",
    "mlx": "#8d6cd1",
    "bitsandbytes": "#2a9d8f",
}

Row = Mapping[str, Any]

MODELS = (
    ("base", "The base model", "36 of its 42 matrices have columns that 256 does not divide."),
    (
        "wide",
        "The wider model",
        """Its columns are multiples of 256, so K- and I-quants need no fallback types here. It was trained for an hour
(`make wide`) on documentation and source, so that prose is unfamiliar to it, and its layers contribute little: all KLs
are therefore small. Compare rows, not models. Not all rows of the first table were measured for this model.""",
    ),
)

INTRODUCTION = """\
# Bits against quality

Rendered by `tools/quality_page.py` from figures of `bench/standing.py`:

```sh
make interop-llama peers
python bench/standing.py ../shared/models/base ../shared/models --llama .venv.llama/bin/python \\
    --peers .venv.peers/bin/python --json bench/quality_base.json
make wide
python bench/standing.py wide ../shared/models --llama .venv.llama/bin/python --peers .venv.peers/bin/python \\
    --json bench/quality_wide.json
```

The matrices of attention and feed-forward networks of a model are rounded; everything else is unchanged. KL is in nats
per token, KL(the model || the rounded model), mean over 96 windows of 256 tokens of each text, in f32; perplexity is
measured on the same windows. **Bits** are those of the rounded matrices as stored: eight times the bytes of codes,
scales, zero points and tables, divided by the number of weights. **File** counts these bytes and everything else in 16
bits, divided by the number of all weights.

- **Ingot**: layouts as described on their pages. The default is the least squared error; `two-sided` uses statistics of
  96 samples of the model itself ([quantizers.md](quantizers.md)) and no text.
- **llama.cpp**: its own quantizer (`ggml_quantize_chunk`, llama-cpp-python 0.3.36), decoded by gguf-py; `imatrix` was
  computed from 96 windows of prose that follow the scored ones. If 256 does not divide a matrix's columns, the matrix
  has llama-quantize's fallback type, and the bits are those of the mixture; the same holds for our K-quants here.
- **gptqmodel** 7.7.0 on the CPU, symmetric, columns in their order, the same prose; its bits do not include `g_idx`.
- **hqq** 0.2.8.post1, its own search; scales and zeros in f16, codes as it packs them.
- **mlx** 0.32.4, affine, scales and offsets in f16.
- **bitsandbytes** 0.50.2, NF4, scales in f32, "double" in 8 bits. Its blocks cross row boundaries; its decoder for CPUs
  with AVX-512 starts them again in each row, which gives other weights if a row is not a whole number of blocks (288
  columns in blocks of 64). For the rows here, each block is given to it as a row.

"As many bits or fewer" allows 0.02 bits. A mark's tooltip names its row. Not included: folding, budgets, MXFP4 and
NVFP4.
"""


def svg(title: str, rows: Sequence[Row], text: str) -> str:
    """Return a plot of KL against bits, both axes logarithmic; a mark's name is its tooltip."""
    marks = sorted(rows, key=lambda row: (row["bits"], row[text]["kl"]))
    line = best(marks, text, "Ingot")
    programs = {row["by"] for row in rows}
    tooltips = {}
    with plots.style():
        figure = plots.new_figure(860, 460)
        axes = figure.subplots()
        plots.set_scales(axes, BITS, LOSSES)
        plots.set_titles(axes, title, "Lower and further left is better. The line joins the best of Ingot.")
        axes.set_xlabel("bits per weight of the matrices as stored")
        axes.plot(
            [row["bits"] for row in line],
            [row[text]["kl"] for row in line],
            color=plots.BLUE,
            alpha=0.45,
            clip_on=False,
        )
        for number, row in enumerate(marks):
            shape, gid = "o" if row["by"] == "Ingot" else "s", f"mark-{number}"
            height = min(max(row[text]["kl"], LOSSES.low), LOSSES.high)
            axes.plot(row["bits"], height, shape, markersize=8, color=COLOURS[row["by"]], gid=gid, clip_on=False)
            tooltips[gid] = f"{row['by']} {row['name']}: {row['bits']:.2f} bits, {row[text]['kl']:.5f}"
        for program in (name for name in COLOURS if name in programs):
            shape = "o" if program == "Ingot" else "s"
            axes.plot([], [], shape, markersize=8, color=COLOURS[program], label=program)
        axes.legend(frameon=False, loc="upper right")
        return plots.render(figure, title, tooltips)


def best(marks: Sequence[Row], text: str, by: str) -> list[Row]:
    """Return, of rows sorted by bits, those of a program that none of its smaller ones is as good as."""
    found: list[Row] = []
    for row in marks:
        if row["by"] == by and (not found or row[text]["kl"] < found[-1][text]["kl"]):
            found.append(row)
    return found


def standing(rows: Sequence[Row]) -> Iterator[str]:
    """Yield, for each size, our best row and the best of all others of as many bits or fewer."""
    yield "| bits | text | Ingot's best | KL | the best other | KL |"
    yield "| ---: | --- | --- | ---: | --- | ---: |"
    for size in SIZES:
        for text in TEXTS:
            cells = []
            for mine in (True, False):
                fit = [row for row in rows if row["bits"] <= size + ABOUT and (row["by"] == "Ingot") is mine]
                chosen = min(fit, key=lambda row: row[text]["kl"], default=None)
                cells += ["none", ""] if chosen is None else [_called(chosen), f"{chosen[text]['kl']:.5f}"]
            yield f"| {size:g} | {text} | {' | '.join(cells)} |"


def _called(row: Row) -> str:
    name = row["name"] if row["by"] == "Ingot" or row["name"].startswith(row["by"]) else f"{row['by']} {row['name']}"
    return f"{name} ({row['bits']:.2f})"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows by size."""
    yield "| by | grid | bits | file | KL prose | KL code | perplexity prose | code | same next token |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in sorted(rows, key=lambda row: (-row["bits"], row["prose"]["kl"])):
        prose, code = row["prose"], row["code"]
        sizes = f"{row['bits']:.3f} | {row['file bits']:.3f}"
        figures = f"{prose['kl']:.5f} | {code['kl']:.5f} | {prose['perplexity']:.3f} | {code['perplexity']:.2f}"
        yield f"| {row['by']} | {row['name']} | {sizes} | {figures} | {100 * prose['agreement']:.1f} % |"


def section(key: str, title: str, about: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a model's part of the page, and write its plot."""
    rows = figures["rows"]
    plot = PAGE.with_name(f"quality-{key}.svg")
    plot.write_text(svg(f"KL on prose against bits: {title}", rows, "prose"), "utf-8")
    prose, code = (rows[0][text]["reference_perplexity"] for text in TEXTS)
    yield f"## {title}"
    yield ""
    yield f"{figures['weights']:,} weights, {figures['rounded']:,} of them in the rounded matrices. Unrounded,"
    yield f"its perplexity is {prose:.3f} on prose and {code:.2f} on code."
    yield about
    yield ""
    yield f"![KL on prose against bits per weight]({plot.name})"
    yield ""
    yield from standing(rows)
    yield ""
    yield from table(rows)
    yield ""


def render() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for key, title, about in MODELS:
        path = ROOT / "bench" / f"quality_{key}.json"
        if path.exists():
            lines += section(key, title, about, json.loads(path.read_text("utf-8")))
    return "\n".join(lines)


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
