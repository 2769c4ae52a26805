"""Draw docstrings at random, for a reader who marks those that need a second reading.

    python tools/sample_docstrings.py [--seed 0] [--count 120]

The same seed draws the same docstrings from the same sources. Each is printed with its number, file and line.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the place (file, line and name) and the text of each docstring below ``src``."""
    for path in sorted((root / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node, clean=False)
                if text:
                    name = "module" if isinstance(node, ast.Module) else node.name
                    yield f"{path.relative_to(root).as_posix()}:{node.body[0].lineno} {name}", inspect.cleandoc(text)


def sample(root: Path, seed: int, count: int) -> list[tuple[str, str]]:
    """Draw ``count`` docstrings, or all if there are fewer."""
    everything = list(docstrings(root))
    return random.Random(seed).sample(everything, min(count, len(everything)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    options = parser.parse_args()
    for number, (place, text) in enumerate(sample(ROOT, options.seed, options.count), 1):
        print(f"{number}. {place}\n\n{text}\n")


if __name__ == "__main__":
    main()
