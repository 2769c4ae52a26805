"""The README's first figures: its table of presets and its picture. ``make docs`` compares both with what is committed.

    python tools/readme_figures.py     computes the sizes anew; writes table, picture and bench/published.json

Sizes are those that ``ingot convert --dry-run`` states for a checkpoint of Llama-3-8B's shapes, which is all header:
its file has no data. Qualities and bits are those of ``spec/recipes.md`` and, in the picture, of
``bench/quality_base.json``; times those of ``spec/loading.md``.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import tempfile
from html import escape
from math import prod
from pathlib import Path

from delta_plot import STYLE
from quality_page import COLOURS, Row, best

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path("docs", "quality-and-speed.svg")
HIDDEN, INNER, VOCABULARY, LAYERS = 4096, 14336, 128256, 32
# Preset, container, what it is for.
PRESETS = (
    ("bf16", "zt", "no change"),
    ("lossless", "zt", "bit for bit, smaller"),
    ("int8", "zt", "no loss that our figures show"),
    ("int4", "zt", "without calibration"),
    ("int4-calibrated", "zt", "the same size, a quarter of the divergence"),
    ("int3-calibrated", "zt", "small"),
    ("int2-calibrated", "zt", "smallest"),
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
    from ingot.ops.convert.convert import prepare

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model.safetensors")
        weights = empty_checkpoint(source)
        for name, suffix, _ in PRESETS:
            if name in _MEASURED and name in presets:
                found[name] = round(weights / 16 * _MEASURED[name])
            elif name in presets:
                with prepare(str(source), str(Path(folder, f"x.{suffix}")), name, None) as prepared:
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
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 300" role="img">',
        "<title>Loss against size beside other programs, and speed of packed weights</title>",
        f"<style>{STYLE}</style>",
    ]
    return "\n".join([*head, *_curves(rows), *_bars(bars), "</svg>", ""])


def _x(bits: float) -> float:
    return 60 + math.log2(bits / 2) / math.log2(9 / 2) * 350


def _y(kl: float) -> float:
    return 70 + math.log10(1 / kl) / 5 * 180


def _curves(rows: list[Row]) -> list[str]:
    """Draw, of each program, the rows that none of its smaller ones is as good as."""
    parts = [
        '<text class="title" x="14" y="20">KL divergence by bits of a quantized weight</text>',
        '<text x="14" y="38">a Llama of 7.7 M, prose; lower and further left is better</text>',
    ]
    for power in range(6):
        y, label = _y(10.0**-power), f"{10.0**-power:g}" if power < 4 else f"1e-{power}"
        parts.append(f'<line class="grid" x1="60" y1="{y:.0f}" x2="410" y2="{y:.0f}"/>')
        parts.append(f'<text x="52" y="{y + 4:.0f}" text-anchor="end">{label}</text>')
    parts += [f'<text x="{_x(tick):.0f}" y="270" text-anchor="middle">{tick}</text>' for tick in (2, 3, 4, 5, 6, 8)]
    marks = sorted(rows, key=lambda row: (row["bits"], row["prose"]["kl"]))
    place = 60
    for program in reversed(COLOURS):  # ours on top
        colour, own = COLOURS[program], best(marks, "prose", program)
        points = [(_x(row["bits"]), _y(row["prose"]["kl"])) for row in own]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    for program, colour in COLOURS.items():
        parts.append(f'<circle cx="{place + 4}" cy="290" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{place + 12}" y="294">{escape(program)}</text>')
        place += 24 + round(6.2 * len(program))
    return parts


def _bars(bars: list[tuple[str, float]]) -> list[str]:
    parts = [
        '<text class="title" x="460" y="20">Tokens a second, 1.5 B model, 2 processors</text>',
        '<text x="460" y="38">more is better</text>',
    ]
    for number, (label, speed) in enumerate(bars):
        top = 62 + 48 * number
        kind = "theirs" if label.startswith("transformers") else "ours"
        width = speed * 16
        parts.append(f'<text x="460" y="{top}">{escape(label)}</text>')
        parts.append(f'<rect class="{kind}" x="460" y="{top + 6}" width="{width:.0f}" height="18" rx="3"/>')
        parts.append(f'<text x="{468 + width:.0f}" y="{top + 19}">{speed:.1f}</text>')
    return parts


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
