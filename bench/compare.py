"""Compare two runs of ``make bench``: the ratio of every figure, and what fell.

    python bench/compare.py old.json new.json
    python bench/compare.py old.json new.json --fell 0.1 --all

Each file is ``bench/results/all.json`` of a run, or one benchmark's own JSON. A ratio is new to old, turned so that
above 1 is better: seconds, bytes and errors count the other way round. Figures whose names tell no direction are not
compared. What peers did in both runs is told apart: it shows how far the machine alone moved the figures. The exit
status is 1 where something of ours fell by more than ``--fell``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

# Names of figures, or their last words.
HIGHER = ("gb_per_s", "tokens_per_s", "rate", "ratio", "speed", "encode", "decode", "apply", "times")
LOWER = (
    *("seconds", "us", "ms", "processor", "wall", "memory", "peak_extra", "share", "percent", "bits", "size"),
    *("bits_per_weight", "worst_error", "mean_error", "squared_error", "perplexity"),
)
PEERS = (
    *("memcpy", "numpy", "torch", "safetensors", "ztensor", "gguf", "zipnn", "zstd", "coremltools", "deltatensors"),
    *("copy", "transformers", "ggml", "llama.cpp", "fastcdc", "(original)"),
)
# Figures of rows that are no measurement of ours, or that follow from others.
IGNORED = ("target", "met", "torch_us", "torch_gb_per_s", "torch_tokens_per_s")


@dataclass(frozen=True)
class Change:
    """One figure in both files; ``ratio`` is above 1 where the new one is better."""

    name: str
    old: float
    new: float
    ratio: float

    @property
    def of_peer(self) -> bool:
        """Whether somebody else's speed was measured."""
        words = (part.replace("_", " ").split() for part in re.split(r"/|, ", self.name))
        return any(first in PEERS for first, *_ in filter(None, words))


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and what only one has."""

    changes: Sequence[Change]
    gone: Sequence[str]
    added: Sequence[str]

    def fallen(self, share: float) -> list[Change]:
        """Return what is worse by more than ``share``, the worst first."""
        worse = [change for change in self.changes if change.ratio < 1 - share and not change.of_peer]
        return sorted(worse, key=lambda change: change.ratio)


def direction(name: str) -> int:
    """Return 1 where more is better, -1 where less is, 0 where the name does not tell."""
    for key in reversed(name.split("/")):  # the innermost that tells
        if key in IGNORED:
            return 0
        if key in HIGHER or key.endswith(("_per_s", "_ratio")):
            return 1
        if key in LOWER or key.endswith(("_s", "_us", "_ms", "_seconds", "_anonymous")):
            return -1
    return 0


def figures(result: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number with its path; a row of a table is named by its texts and by what it is a row of."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from figures(value, f"{name}/{key}" if name else str(key))
    elif isinstance(result, list):
        seen: dict[str, int] = {}
        for index, row in enumerate(result):
            label = _label(row) if isinstance(row, Mapping) else str(index)
            seen[label] = seen.get(label, 0) + 1
            label += f" #{seen[label]}" if seen[label] > 1 else ""
            yield from figures(row, f"{name}/{label}" if name else label)
    elif isinstance(result, (int, float)) and not isinstance(result, bool) and isfinite(result):
        yield name, float(result)


def _label(row: Mapping[str, Any]) -> str:
    """Return what tells a row from the others: its texts, its shape, and the counts that it is for."""
    keys = [value for key, value in row.items() if isinstance(value, str) and key != "unit"]
    keys += [f"{key} {row[key]}" for key in ("shape", "batch", "threads", "count") if key in row]
    return ", ".join(keys)


def compare(old: Any, new: Any) -> Comparison:
    """Compare the figures of two results."""
    before, after = (dict(figures(_without_machine(result))) for result in (old, new))
    changes = []
    for name, was in before.items():
        sign = direction(name)
        if name not in after or not sign:
            continue
        now = after[name]
        if was > 0 and now > 0:
            changes.append(Change(name, was, now, now / was if sign > 0 else was / now))
    return Comparison(
        changes, [name for name in before if name not in after], [name for name in after if name not in before]
    )


def _without_machine(result: Any) -> Any:
    return {key: value for key, value in result.items() if key != "machine"} if isinstance(result, Mapping) else result


def differing(old: Any, new: Any) -> list[str]:
    """Return what is said of the machines and versions of two runs and is not the same: ratios across it say little."""
    before, after = (dict(_texts(result.get("machine", {}))) for result in (old, new))
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {before.get(name)} and {after.get(name)}" for name in names if before.get(name) != after.get(name)
    ]


def _texts(value: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _texts(item, f"{name}{key} ")
        else:
            yield name + key, str(item)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--fell", type=float, default=0.05, help="the share that counts as fallen (.05)")
    parser.add_argument("--all", action="store_true", help="print every ratio, not only what changed by that share")
    asked = parser.parse_args()
    old, new = (json.loads(path.read_text("utf-8")) for path in (asked.old, asked.new))
    for difference in differing(old, new):
        print(f"not the same: {difference}")
    found = compare(old, new)
    fallen = found.fallen(asked.fell)
    for change in sorted(found.changes, key=lambda change: change.ratio):
        if asked.all or abs(change.ratio - 1) > asked.fell:
            peer = "peer: " if change.of_peer else ""
            print(f"{change.ratio:7.3f} x  {peer}{change.name}  ({change.old:g} and {change.new:g})")
    for names, what in ((found.gone, "gone"), (found.added, "new")):
        for name in names:
            if direction(name):
                print(f"{what}: {name}")
    print(f"{len(found.changes)} figures in both; {len(fallen)} fell by more than {asked.fell:.0%}")
    for change in fallen:
        print(f"fell: {change.name} to {change.ratio:.3f} of what it was")
    sys.exit(1 if fallen else 0)


if __name__ == "__main__":
    main()
