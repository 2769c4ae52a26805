"""``python -m tests.oracles.run [COUNT [SEED]]``: COUNT random cases of every codec against the oracles."""

from __future__ import annotations

import sys
import zlib

import numpy as np

from .cases import CASES, differs


def run(name: str, count: int, seed: int) -> tuple[int, list[tuple[int, str]]]:
    """Return how many cases were compared (others a codec refuses by a rule), and what differs: case and how."""
    compared, wrong = 0, []
    for index in range(count):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), index])
        item = CASES[name](rng)
        if item is None:
            continue
        compared += 1
        found = differs(item)
        if found is not None:
            wrong.append((index, found))
    return compared, wrong


def main() -> int:
    """Print a line for every codec; 1 if anything differs."""
    count, seed = (int(text) for text in (*sys.argv[1:], *("1000", "0")[len(sys.argv) - 1 :]))
    bad = 0
    for name in CASES:
        compared, wrong = run(name, count, seed)
        bad += len(wrong)
        print(f"{name:40} {compared:7} cases, {len(wrong)} differ", flush=True)
        for index, how in wrong[:5]:
            print(f"    seed {seed}, case {index}: {how}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
