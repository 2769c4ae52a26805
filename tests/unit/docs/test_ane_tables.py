"""The pages on chips and times are what the data files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_pages_are_written_from_the_data() -> None:
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "ane_tables.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
