"""Check wheels of Ingot: their size, and that they contain nothing of the tests.

    python tools/check_wheel.py WHEEL...

Prints the size and the largest entries of each wheel. Exit code 1 if a wheel is larger than 5 MB, or contains a file
that users do not need. Needs nothing installed.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 5_000_000
TESTING = {"__init__.py", "codecs.py", "encoding.py", "formats.py", "stores.py", "values.py"}
"""The suites for authors of codecs, formats and stores, and what these import."""


def unwanted(name: str) -> str | None:
    """Return why a wheel must not contain an entry; None if it may."""
    top, _, inner = name.partition("/")
    if top != "ingot" and not re.fullmatch(r"ingot-[^/]+\.dist-info", top):
        return "only the package ingot belongs into the wheel"
    if inner.startswith("testing/") and inner.removeprefix("testing/") not in TESTING:
        return "helpers of tests belong into tests/support"
    if inner.startswith("demo/data/"):
        return "the demo's model belongs into the distribution ingot-demo"
    return None


def faults(wheel: Path) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a wheel."""
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        yield f"{wheel.name}: {size:,} bytes, at most {MAX_BYTES:,} are allowed"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            reason = unwanted(name)
            if reason is not None:
                yield f"{wheel.name}: {name}: {reason}"


def print_entries(wheel: Path, count: int = 10) -> None:
    """Print the size of a wheel and its largest entries as they are compressed."""
    with zipfile.ZipFile(wheel) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: -entry.compress_size)
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(entries)} entries")
    for entry in entries[:count]:
        print(f"{entry.compress_size:>12,} of {entry.file_size:>12,}  {entry.filename}")


def main(arguments: list[str]) -> int:
    """Check the wheels; return the exit code."""
    if not arguments:
        print(__doc__)
        return 2
    lines: list[str] = []
    for wheel in map(Path, arguments):
        print_entries(wheel)
        lines += faults(wheel)
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
