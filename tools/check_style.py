"""Check modules and assignments: ``make words``. Exit code 1 if a package has too many hits.

    python tools/check_style.py            compare the hits of each package with tools/style_allowed.json
    python tools/check_style.py PATH...    list the hits in files or folders
    python tools/check_style.py --write    write the present numbers, if neither total is higher than before

A module of Ingot has at least ``SHORTEST`` lines, unless it is an ``__init__`` or a public front (``FRONTS``). A
statement assigns one value: ``a, b = x, y`` is two statements on one line. Exchanges (``a, b = b, a``), unpacked values
(``a, b = f()``) and constants that share a name or a description (``A, B = ALL = (1, 2)``) are one statement each.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = "tools/style_allowed.json"
SHORTEST = 40
FRONTS = ("__main__", "hf", "lm_eval", "mlx", "numpy", "torch", "views")
"""Modules directly in ``src/ingot`` that users import or start; most of them re-export names."""
TYPES = ("assignments", "modules")


class Hit(NamedTuple):
    """A module or a statement that breaks a rule."""

    path: str
    line: int
    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def joined_assignments(tree: ast.Module) -> Iterator[ast.Assign]:
    """Yield each assignment of several values to as many targets that separate statements could replace."""
    described = set()
    for node in ast.walk(tree):
        bodies = (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
        for body in bodies:
            if isinstance(body, list):
                described |= {id(first) for first, second in pairwise(body) if _is_text(second)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and id(node) not in described and _is_joined(node):
            yield node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_joined(node: ast.Assign) -> bool:
    target, value = node.targets[0], node.value
    if len(node.targets) != 1 or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    starred = any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts))
    if starred or len(target.elts) != len(value.elts):
        return False
    return not any(
        _reads(later, earlier) for index, earlier in enumerate(target.elts) for later in value.elts[index + 1 :]
    )


def _reads(value: ast.expr, target: ast.expr) -> bool:
    """Return whether an expression reads what an assignment to the target changes."""
    text = ast.unparse(target)
    stored = {item.id for item in ast.walk(target) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}
    return any(
        (isinstance(item, ast.Name) and item.id in stored)
        or (isinstance(item, ast.Attribute | ast.Subscript) and ast.unparse(item) == text)
        for item in ast.walk(value)
    )


def hits_of(path: Path, root: Path) -> Iterator[Hit]:
    """Yield the hits of a file."""
    name, source = path.relative_to(root).as_posix(), path.read_text("utf-8")
    front = path.stem == "__init__" or (path.stem in FRONTS and path.parent == root / "src" / "ingot")
    lines = len(source.splitlines())
    if lines < SHORTEST and not front:
        yield Hit(name, 1, "modules", f"a module of {lines} lines: merge it with the module that uses it")
    for node in joined_assignments(ast.parse(source)):
        yield Hit(name, node.lineno, "assignments", f"several values: {ast.unparse(node)[:80]}")


def package_of(path: str) -> str:
    """Return the folder of a file, at most one below ``src/ingot``."""
    return "/".join(Path(path).parts[:-1][:3])


def count_by_package(hits: list[Hit]) -> dict[str, dict[str, int]]:
    counts = Counter((package_of(hit.path), hit.type) for hit in hits)
    return {name: {type_: counts[name, type_] for type_ in TYPES} for name in sorted({name for name, _ in counts})}


def compare(present: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> tuple[list[str], list[str]]:
    """Return a line for each number that is too high, and a line for each number that can be lowered."""
    too_high, can_be_lowered = [], []
    for package in sorted({*present, *allowed}):
        for type_ in TYPES:
            count, limit = present.get(package, {}).get(type_, 0), allowed.get(package, {}).get(type_, 0)
            if count > limit:
                too_high.append(f"{package}: {count} {type_}, {limit} allowed: tools/check_style.py PATH lists them")
            elif count < limit:
                can_be_lowered.append(f"{package}: {count} {type_}, {limit} allowed: tools/check_style.py --write")
    return too_high, can_be_lowered


def write(root: Path, allowed: dict[str, dict[str, int]], present: dict[str, dict[str, int]]) -> list[str]:
    """Write the present numbers. Return a line for each total that is higher than before; then nothing is written."""
    faults = []
    for type_ in TYPES:
        before = sum(counts[type_] for counts in allowed.values())
        now = sum(counts[type_] for counts in present.values())
        if now > before:
            faults.append(f"{now} {type_} in all packages, {before} allowed: remove some first")
    if not faults:
        rows = [f"  {json.dumps(package)}: {json.dumps(counts)}" for package, counts in present.items()]
        (root / ALLOWED).write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")
    return faults


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--write", action="store_true", help="write the present numbers to tools/style_allowed.json")
    options = parser.parse_args(arguments)
    chosen = {path.resolve() for path in options.paths}
    files = sorted((root / "src" / "ingot").rglob("*.py"))
    checked = [path for path in files if not chosen or chosen & {path, *path.parents}]
    hits = [hit for path in checked for hit in hits_of(path, root)]
    if chosen:
        print(*hits, f"{len(hits)} hits", sep="\n")
        return 0
    allowed = json.loads((root / ALLOWED).read_text("utf-8"))
    present = count_by_package(hits)
    if options.write:
        notes, faults = list[str](), write(root, allowed, present)
    else:
        faults, notes = compare(present, allowed)
    print(*notes, *faults, f"{len(hits)} hits, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
