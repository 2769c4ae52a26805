"""Write the tables of spec/ane-chips.md, spec/ane-registers.md and spec/ane-times.md from the chips' data files.

python tools/ane_tables.py            rewrite the pages
python tools/ane_tables.py --check    exit with 1 if a page is not what the data say
"""

from __future__ import annotations

import sys
from pathlib import Path

from check_docs import ROOT, replace_marked

from ingot.ext.ane.chips.candidates import outcomes
from ingot.ext.ane.chips.chips import Cell, Chip, chip_names, contradictions, data, load_chip
from ingot.ext.ane.chips.gates import Conditions
from ingot.ext.ane.chips.measured import measured_rows

CHIPS = ("a12", "m1", "m2-pro", "m3", "m4", "m5-pro", "a19", "m6")
CELLS = (
    "isa_version", "gate_master", "gate_palette", "gate_affine", "gate_blockwise", "gate_e4m3",
    "palette_width_1", "palette_width_2", "palette_width_3", "palette_width_4", "palette_width_6", "palette_width_8",
    "asymmetric", "sparse_binary", "multi_palette", "vector_palette", "detect_zeros", "winograd", "double_int8",
    "copies_per_core", "dense_cap", "streamed_cap", "working_set", "activation_lut_budget", "palette_lut_budget",
    "weight_tiles", "num_nes", "ocg_channels", "tile_alignment", "segment_alignment", "bandwidth", "palette_rate",
    "mac_rate", "bandwidth_sparse", "bandwidth_sparse_palette", "floor",
)  # fmt: skip
CLASS = {"measured": "M", "decompiled": "D", "inferred": "I", "predicted": "P", "contradicted": "X", "unknown": "?"}


def table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    value = cell.value
    if value is None or isinstance(value, bool):
        value = {True: "yes", False: "no", None: ""}[value]
    return f"{value} {CLASS[cell.evidence]}".strip()


def products() -> str:
    rows = [[f"`{name}`", load_chip(name).target, load_chip(name).product] for name in chip_names()]
    return table(["chip", "target", "product"], rows)


def cells() -> str:
    chips = [load_chip(name) for name in CHIPS]
    rows = [[f"`{key}`", *(cell_text(chip.cells.get(key)) for chip in chips)] for key in CELLS]
    return table(["cell", *(f"{chip.name} ({chip.target})" for chip in chips)], rows)


def forms() -> str:
    chips = [load_chip(name) for name in CHIPS]
    found: list[dict[str, str]] = [_forms_of(chip) for chip in chips]
    rows = [[label, *(item[label] for item in found)] for label in found[0]]
    return table(["form", *(chip.name for chip in chips)], rows)


def _forms_of(chip: Chip) -> dict[str, str]:
    return {
        label: f"{decision.outcome} {CLASS[decision.evidence]}"
        for label, decision in outcomes(chip, Conditions()).items()
    }


def disputes() -> str:
    rows = [
        [
            f"`{item.key}`",
            item.about,
            "; ".join(item.sides),
            item.used_claim,
            ", ".join(f"`{key}`" for key in item.keys),
        ]
        for item in contradictions().values()
    ]
    return table(["key", "about", "claims", "taken", "`--assume`"], rows)


def times() -> str:
    rows = [
        [
            row.chip, f"{row.weights:,}", row.label if row.density == 1 else f"{row.label}, {row.density:.0%} kept",
            f"{row.moved:,}", f"{row.predicted:.4f}", f"{row.measured:.4f}", f"{row.off:+.1%}",
            "fit" if row.fitted else "no", row.source,
        ]
        for row in measured_rows()
    ]  # fmt: skip
    columns = ["chip", "weights", "form", "bytes moved", "predicted ms", "measured ms", "off", "fitted", "source"]
    return table(columns, rows)


def streams() -> str:
    rows = [
        [name, f"`{row['section']}`", *(f"`{value:#06x}`" for value in row["registers"]), f"`{row['later']:#06x}`",
         f"{CLASS[row['evidence']]}: {row['source']}"]
        for name, row in data("descriptor")["streams"].items()
    ]  # fmt: skip
    columns = ["stream", "section", "enable", "base offset", "relocation", "enable from H16 on (FT)", "evidence"]
    return table(columns, rows)


def kernel_word() -> str:
    rows = []
    for name, row in data("descriptor")["kernel_word"].items():
        low, high = row["low"], row["low"] + row["bits"] - 1
        place = f"{low}" if low == high else f"{low} to {high}"
        rows.append([f"`{name}`", place, f"H{row['since']}", f"{CLASS[row['evidence']]}: {row['source']}"])
    return table(["field", "bits", "from", "evidence"], rows)


def format_codes() -> str:
    rows = [
        [name, f"{row['value']}", f"H{row['since']}", f"{CLASS[row['evidence']]}: {row['source']}"]
        for name, row in data("descriptor")["format_codes"].items()
    ]
    return table(["reaches the multiplier as", "code", "from", "evidence"], rows)


def types() -> str:
    rows = [
        [f"{row['number']}", name, f"{CLASS[row['evidence']]}: {row['source']}"]
        for name, row in data("descriptor")["types"].items()
    ]
    return table(["number", "type", "evidence"], rows)


def zero_skip() -> str:
    rows = [
        ["all others" if name == "rule" else f"`{name}`",
         ", ".join(f"{kept:g}: {left:g}" for kept, left in row["points"]),
         f"{CLASS[row['evidence']]}: {row['source']}"]
        for name, row in data("descriptor")["zero_skip"].items()
    ]  # fmt: skip
    return table(["chip", "kept: multiplications left", "evidence"], rows)


PAGES = {
    "spec/ane-chips.md": {"products": products, "cells": cells, "forms": forms, "disputes": disputes},
    "spec/ane-times.md": {"times": times},
    "spec/ane-registers.md": {
        "streams": streams,
        "kernel-word": kernel_word,
        "format-codes": format_codes,
        "types": types,
        "zero-skip": zero_skip,
    },
}


def rendered(root: Path) -> dict[Path, str]:
    """Return each page as it should be."""
    found = {}
    for name, blocks in PAGES.items():
        text = (root / name).read_text("utf-8")
        for mark, render in blocks.items():
            text = replace_marked(text, mark, render())
        found[root / name] = text
    return found


def main() -> int:
    stale = {path: text for path, text in rendered(ROOT).items() if path.read_text("utf-8") != text}
    if "--check" not in sys.argv[1:]:
        for path, text in stale.items():
            path.write_text(text, "utf-8")
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)}: out of date: python tools/ane_tables.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
