"""Render the matrix of what moves exactly between formats into spec/interop.md.

    python tools/interop_table.py

``tests.support.matrix`` tries every cell; ``tests/oracles/test_matrix.py`` holds the table to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]
    from check_docs import replace_marked

    from tests.support.matrix import explore, table

    page = ROOT / "spec" / "interop.md"
    page.write_text(replace_marked(page.read_text("utf-8"), "matrix", table(explore())), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
