"""Put measured figures into docs/benchmarks.md and docs/tour.md.

    make bench                      measures, runs the demo, writes bench/results/*.json
    python tools/bench_table.py     takes them over into bench/published.json and renders the blocks of both pages

``bench/published.json`` is committed: what they show is rendered from it and nothing else, which ``make docs``
checks. Only benchmarks that have a new result are replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("machine", "kernels", "lossless", "load", "convert", "delta", "patch", "opening", "demo")
_DECODE = ("INT4 g128", "INT4 g128 min-max", "INT8 per row", "INT3 g128", "INT2 g128")
_MIB = 1 << 20

Figures = Mapping[str, Any]


def published(root: Path) -> dict[str, Any]:
    """Return the committed figures."""
    path = root / "bench" / "published.json"
    figures: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return figures


def take_over(root: Path) -> dict[str, Any]:
    """Merge new results into the committed figures and write them."""
    figures = published(root)
    for name in NAMES:
        path = root / "bench" / "results" / f"{name}.json"
        if path.exists():
            figures[name] = json.loads(path.read_text("utf-8"))
    demo = figures.get("demo", {})
    demo.pop("folder", None)
    for row in demo.get("rows", ()):  # times of a small model say nothing; the command prints them
        row.pop("convert_seconds", None)
        row.pop("load_seconds", None)
    (root / "bench" / "published.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return figures


def render(figures: Figures) -> str:
    """Render the benchmarks as Markdown."""
    blocks = [_machine(figures)]
    if "kernels" in figures:
        blocks += _kernels(figures["kernels"])
    if "lossless" in figures:
        blocks += _lossless(figures["lossless"])
    if "load" in figures:
        blocks += _load(figures["load"])
    if "opening" in figures:
        blocks += _opening(figures["opening"])
    if "convert" in figures:
        blocks += _convert(figures["convert"])
    if "delta" in figures:
        blocks += _delta(figures["delta"])
    if "patch" in figures:
        blocks += _patch(figures["patch"])
    return "\n\n".join(blocks)


def _machine(figures: Figures) -> str:
    machine = figures.get("machine", {})
    peers = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    return (
        f"{machine.get('processor') or 'Unknown processor'}, {machine.get('processors')} processors, "
        f"{machine.get('system')}, Python {machine.get('python')}; {peers}."
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _kernels(kernels: Figures) -> list[str]:
    rows = {row["name"]: row for row in kernels["rows"]}

    def rate(name: str) -> str:
        return f"{rows[name]['rate']:.2f}" if name in rows else ""

    codes = []
    for name in _DECODE:
        cells = [rows.get(f"dequantize {name} to {dtype}") for dtype in ("bf16", "f16", "f32")]
        quick = rate(f"quantize {name} absmax from bf16") or rate(f"quantize {name} from bf16")
        shown = [f"{row['ratio']:.2f} ({row['rate']:.1f})" if row else "" for row in cells]
        codes.append([name, *shown, quick, rate(f"quantize {name} MSE from bf16")])
    peers = []
    for name, row in rows.items():
        if name.endswith(": Ingot") and row["ratio"]:
            what = name.removesuffix(": Ingot")
            peer = next(other for other in rows if other.startswith(f"{what}: gguf-py"))
            peers.append([f"{what}, {peer.rpartition(' ')[2]}", rate(name), rate(peer)])
    title = (
        f"**Kernels**, one thread, instruction set {kernels['isa']}: dequantizing, in times memcpy of the output (GB/s "
        "of output); quantizing from bf16, in G weights/s, by absmax or min-max and by least squared error:"
    )
    return [
        title,
        _table(["codes", "to bf16", "to f16", "to f32", "quantize", "by MSE"], codes),
        "The same with groups of 32 from and to f32, beside gguf-py's NumPy kernels, in G weights/s:",
        _table(["", "Ingot", "gguf-py"], peers),
    ]


def _lossless(lossless: Figures) -> list[str]:
    cells = {
        (row["name"], row["source"]): f"{row['bits']:.2f} ({row['encode']:.2f}, {row['decode']:.2f})"
        for row in lossless["rows"]
    }
    sources = list(dict.fromkeys(source for _, source in cells))
    rows = [
        [name, *(cells.get((name, source), "") for source in sources)]
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    title = (
        f"**Without loss**, one thread, instruction set {lossless['isa']}: bits per weight (GB/s of weights encoding, "
        "decoding):"
    )
    return [title, _table(["", *sources], rows)]


def _load(load: Figures) -> list[str]:
    size = load["bytes"] / 1e9
    rows = [
        [" ".join(name.split()), f"{size / warm:.2f}", f"{size / load['cold_s'][name]:.2f}"]
        for name, warm in load["warm_s"].items()
        if not name.startswith("numpy")
    ]
    listed = ", ".join(f"{' '.join(name.split())} {1000 * value:.1f} ms" for name, value in load["list_s"].items())
    imports = ", ".join(f"`{name}` {value:.0f} ms" for name, value in load["import_ms"].items())
    return [
        f"**Loading** {size:.2f} GB of f16 tensors into owned arrays, GB/s, {load['threads']} threads unless said:",
        _table(["", "warm", "cold"], rows),
        *_packed(load.get("packed_s", {}), size),
        f"Opening and listing 10,000 tensors: {listed}. Importing, on top of NumPy: {imports}.",
    ]


def _opening(opening: Figures) -> list[str]:
    peer = next(iter(opening["opened_s"].values()))
    rows = [[name, f"{1000 * took:.1f}", f"{took / peer:.2f}"] for name, took in opening["opened_s"].items()]
    started = ", ".join(f"{name} {1000 * took:.0f}" for name, took in opening["started_s"].items())
    return [
        f"**Opening** and listing {opening['tensors']:,} tensors, processor time:",
        _table(["", "ms", "times safetensors"], rows),
        f"Processes from start to end, ms of processor time: {started}.",
    ]


def _packed(seconds: Figures, size: float) -> list[str]:
    rates = {" ".join(name.split()[1:]): f"{size / value:.2f}" for name, value in seconds.items()}
    if not rates:
        return []
    two, one = (" and ".join(rates[f".{kind} int4{way}"] for kind in ("zt", "squizd")) for way in ("", ", 1 thread"))
    same = "The same weights by recipe int4, digests checked, decoded to f16 from `.zt` and from `.squizd`, warm"
    return [f"{same}: {two} GB/s of f16; on one thread {one}."]


def _convert(convert: Figures) -> list[str]:
    labels = (
        ("copy_seconds", "copying the file"),
        ("copy_flushed_seconds", "copying the file, flushed to disk"),
        ("kernel_seconds", "the recipe's kernel alone, from memory to memory, one thread"),
        ("convert_seconds", "`ingot convert`"),
        ("convert_no_measure_seconds", "`ingot convert --no-measure`"),
        ("convert_one_thread_seconds", "`ingot convert --threads 1`"),
    )
    rows = []
    for key, label in labels:
        if key not in convert:
            continue
        peak = convert.get(key.replace("_seconds", "_peak_anonymous"))
        rows.append([label, f"{convert[key]:.1f}", f"{peak / _MIB:.0f}" if peak else ""])
    size, ceiling = convert["source_bytes"] / 1e9, convert["ceiling"] / _MIB
    return [
        f"**Converting** {size:.1f} GB of bf16 by recipe int4 under `--max-ram {ceiling:.0f}MiB`:",
        _table(["", "seconds", "peak anonymous MiB"], rows),
    ]


def _delta(delta: Figures) -> list[str]:
    """Codecs of differences alone: what they cost, and how fast one thread makes and applies them."""
    rows = [
        [
            row["source"],
            row["name"],
            f"{100 * row['share']:.1f}",
            *(f"{row[key]:.2f}" if row[key] else "" for key in ("encode", "apply")),
        ]
        for row in delta["rows"]
    ]
    title = f"**Differences**, one thread, instruction set {delta['isa']}: size in % of the weights, GB/s of weights:"
    return [title, _table(["pair", "codec", "size", "encode", "apply"], rows)]


def _patch(patch: Figures) -> list[str]:
    """Seconds beside the peer's, which are the first of each kind."""
    found = {(row["strategy"], row["name"]): row for row in patch["rows"] if "seconds" in row}
    names = list(dict.fromkeys(row["name"] for row in patch["rows"]))
    strategies = list(dict.fromkeys(row["strategy"] for row in patch["rows"]))

    def cell(strategy: str, name: str) -> str:
        row = found.get((strategy, name))
        if row is None:
            return ""
        return f"{row['seconds']:.2f}" + (f" ({row['ratio']:.1f} x)" if row.get("ratio") else "")

    rows = [[name, *(cell(strategy, name) for strategy in strategies)] for name in names]
    title = (
        f"**Deltas of {patch['gigabytes']:g} GB** of bf16, from files, seconds (times as fast as deltatensors 0.2.0 in "
        "the same run):"
    )
    return [title, _table(["", *strategies], rows)]


def render_demo(demo: Figures) -> str:
    """Render the demo's table as the command prints it, without the two columns of times."""
    head = ("recipe", "container", "file", "bits/weight", "worst error", "mean error", "perplexity")
    rows = [
        (
            row["recipe"],
            Path(row["file"]).suffix,
            f"{row['size'] / _MIB:.2f} MiB",
            f"{row['bits_per_weight']:.2f}",
            f"{100 * row['worst_error']:.2f} %",
            f"{100 * row['mean_error']:.2f} %",
            f"{row['perplexity']:.3f}",
        )
        for row in demo["rows"]
    ]
    widths = [max(len(line[index]) for line in (head, *rows)) for index in range(len(head))]
    lines = [
        "   ".join(cell.ljust(width) if index < 2 else cell.rjust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in (head, *rows))
    ]
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


def main() -> int:
    figures = take_over(ROOT)
    sys.path.insert(0, str(ROOT / "tools"))
    from check_docs import BENCHMARKS, replace_marked

    pages = {BENCHMARKS: ("bench", render(figures))}
    if "demo" in figures:
        pages["docs/tour.md"] = ("demo", render_demo(figures["demo"]))
    for name, (block, text) in pages.items():
        page = ROOT / name
        page.write_text(replace_marked(page.read_text("utf-8"), block, text), "utf-8")
    print(f"{' and '.join(pages)} show {', '.join(name for name in NAMES if name in figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
