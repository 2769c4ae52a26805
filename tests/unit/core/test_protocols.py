"""Contracts are base classes: few protocols are asked for at run time, and each of them at a cost."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3] / "src" / "ingot"
LIMIT = 10


def test_few_protocols_are_checked_at_run_time() -> None:
    decorated = re.compile(r"^@runtime_checkable\nclass (\w+)", re.MULTILINE)
    names = [name for path in SOURCE.rglob("*.py") for name in decorated.findall(path.read_text("utf-8"))]
    assert 0 < len(names) <= LIMIT, f"give callers a base class with default methods instead: {sorted(names)}"
