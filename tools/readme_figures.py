"""The README's first figures: its table of presets and its picture. ``make docs`` compares both with what is committed.

    python tools/readme_figures.py     computes the sizes anew; writes table, picture and bench/published.json

Sizes are those that ``ingot convert --dry-run`` states for a checkpoint of Llama-3-8B's shapes, which is all header:
its file has no data. Qualities and bits are those of ``spec/recipes.md`` and, in the picture, of
``bench/quality_base.json``; times those of ``spec/loading.md``.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tempfile
from math import prod
from pathlib import Path

import plots
from matplotlib.axes import Axes
from quality_page import COLOURS, Row, best

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path("docs", "quality-and-speed.svg")
HIDDEN, INNER, VOCABULARY, LAYERS = 4096, 14336, 128256, 32
# Preset, container, what it is for.
PRESETS = (
    ("bf16", "zt", "no change"),
    ("lossless", "zt", "bit for bit, smaller"),
    ("int8", "zt", "no loss that our figures show"),
    ("int4", "zt", "without calibration; KL 0.56 on a real model"),
    ("trellis4-calibrated", "zt", "the same size, a quarter of the divergence"),
    ("trellis3-calibrated", "zt", "small"),
    ("trellis2-calibrated", "zt", "smallest"),
    ("q4_k-calibrated", "gguf", "llama.cpp"),
    ("q4_0-calibrated", "gguf", "llama.cpp"),
    ("mlx-4bit", "mlx", "mlx_lm"),
)
_MEASURED = {"lossless": 10.6, "mlx-4bit": 4.5}  # bits of a weight where the plan depends on values
WAYS = (
    ("transformers, bf16", "transformers, safetensors"),
    ("Ingot, bf16", "ingot, safetensors"),
    ("Ingot, INT8 packed", "ingot, INT8 kept packed"),
    ("Ingot, INT4 packed", "ingot, INT4 kept packed, 8-bit embedding"),
)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of Llama-3-8B's tensors."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    rows = {"self_attn.q": HIDDEN, "self_attn.k": HIDDEN // 4, "self_attn.v": HIDDEN // 4, "self_attn.o": HIDDEN}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        found |= {f"{start}{name}_proj.weight": (size, HIDDEN) for name, size in rows.items()}
        found |= {f"{start}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found |= {f"{start}mlp.down_proj.weight": (HIDDEN, INNER)}
        found |= {f"{start}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return found


def empty_checkpoint(path: Path) -> int:
    """Make a bf16 checkpoint of these shapes without data; return its bytes of weights."""
    entries, end = {}, 0
    for name, shape in shapes().items():
        start, end = end, end + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return end


def sizes(presets: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of an 8 B model by these presets."""
    from ingot.conversion.run import prepare

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model.safetensors")
        weights = empty_checkpoint(source)
        for name, suffix, _ in PRESETS:
            if name in _MEASURED and name in presets:
                found[name] = round(weights / 16 * _MEASURED[name])
            elif name in presets:
                with prepare(str(source), str(Path(folder, f"x.{suffix}")), name, keep_names=True) as prepared:
                    found[name] = prepared.plan.size
    return found


def table(root: Path) -> str:
    """Render the table of presets."""
    stated = json.loads((root / "bench" / "published.json").read_text("utf-8"))["sizes"]
    page = _rows((root / "spec" / "recipes.md").read_text("utf-8"))
    lines = [
        "| recipe | bits of a quantized weight | 8 B model | perplexity | for |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, _, purpose in PRESETS:
        row = page[f"`{name}`"]
        about = "about " if name in _MEASURED else ""
        bits = row[2] or row[1]
        lines.append(f"| `{name}` | {bits} | {about}{stated[name] / 1e9:.1f} GB | {row[3]} | {purpose} |")
    return "\n".join(lines)


def _rows(text: str) -> dict[str, list[str]]:
    """Return the rows of a page's tables by their first cell."""
    cells = (re.split(r"\s*\|\s*", line.strip("| \n")) for line in text.splitlines() if line.startswith("|"))
    return {row[0]: row[1:] + [""] * 5 for row in cells}


def picture(root: Path) -> str:
    """Draw KL against bits beside other programs, and tokens a second by how the weights are kept."""
    rows = json.loads((root / "bench" / "quality_base.json").read_text("utf-8"))["rows"]
    times = _rows((root / "spec" / "loading.md").read_text("utf-8"))
    bars = [(label, 1 / float(times[way][2])) for label, way in WAYS]
    with plots.style():
        figure = plots.new_figure(860, 300)
        curves, speeds = figure.subplots(1, 2)
        _draw_curves(curves, rows)
        _draw_bars(speeds, bars)
        return plots.render(figure, "Loss against size beside other programs, and speed of packed weights")


def _draw_curves(axes: Axes, rows: list[Row]) -> None:
    """Draw, of each program, the rows that none of its smaller ones is as good as."""
    plots.set_scales(
        axes, plots.Scale(1.9, 9.3, (2, 3, 4, 5, 6, 8)), plots.Scale(1e-5, 2, [10.0**-n for n in range(6)])
    )
    plots.set_titles(
        axes,
        "KL divergence by bits of a weight",
        "a Llama of 7.7 M, prose; lower and further left is better",
    )
    axes.grid(visible=False, axis="x")
    marks = sorted(rows, key=lambda row: (row["bits"], row["prose"]["kl"]))
    for program, colour in COLOURS.items():
        own = best(marks, "prose", program)
        if not own:
            continue
        order = 3 if program == "Ingot" else 2
        bits, losses = [row["bits"] for row in own], [row["prose"]["kl"] for row in own]
        axes.plot(bits, losses, "o-", color=colour, linewidth=1.5, markersize=6, label=program, zorder=order)
    axes.legend(frameon=False, fontsize=10, loc="upper right", ncols=2, handlelength=1, columnspacing=1)


def _draw_bars(axes: Axes, bars: list[tuple[str, float]]) -> None:
    plots.set_titles(axes, "Tokens a second", "1.5 B model, 2 processors; more is better")
    colours = [plots.ORANGE if label.startswith("transformers") else plots.BLUE for label, _ in bars]
    drawn = axes.barh([label for label, _ in bars], [speed for _, speed in bars], height=0.5, color=colours)
    axes.bar_label(drawn, fmt="{:.1f}", padding=6)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.margins(x=0.15)


def main() -> int:
    sys.path.insert(0, str(ROOT / "tools"))
    from check_docs import replace_marked

    published = ROOT / "bench" / "published.json"
    figures = json.loads(published.read_text("utf-8"))
    figures["sizes"] = sizes(tuple(name for name, _, _ in PRESETS))
    published.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    readme = ROOT / "README.md"
    readme.write_text(replace_marked(readme.read_text("utf-8"), "sizes", table(ROOT)), "utf-8")
    (ROOT / PICTURE).write_text(picture(ROOT), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
