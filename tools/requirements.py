"""Print requirements that pyproject.toml declares, one to a line, for ``pip install -r``.

    python tools/requirements.py core test             # core dependencies and the group ``test``
    python tools/requirements.py --minimum core jax    # the lowest versions declared, of core and of the extra ``jax``
    python tools/requirements.py --minimum torch --but torch==2.13.0
    python tools/requirements.py --newest core test    # without versions

``core`` stands for the project's dependencies; other names are extras or dependency groups (PEP 735). Dependencies are
installed this way, each built as it asks to be, and only Ingot itself without build isolation. Needs nothing installed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_LOWER_BOUND = re.compile(r"(?P<name>[\w.-]+(?:\[[\w,]+\])?)\s*>=\s*(?P<version>[\w.]+)(?P<rest>\s*;.*)?")


def declared(project: dict[str, Any], name: str) -> list[str]:
    """Return what ``core``, an extra or a group asks for; exits with a message where there is no such name."""
    if name == "core":
        return list(project["project"]["dependencies"])
    known = {**project["project"].get("optional-dependencies", {}), **project.get("dependency-groups", {})}
    if name not in known:
        sys.exit(f"expected core, {', '.join(known)}, found {name}")
    return [
        line
        for entry in known[name]
        for line in (declared(project, entry["include-group"]) if isinstance(entry, dict) else [entry])
    ]


def pinned(requirement: str) -> str:
    """Return ``name==version`` for ``name>=version``; what is pinned already stays."""
    if "==" in requirement:
        return requirement
    found = _LOWER_BOUND.fullmatch(requirement)
    if found is None:
        sys.exit(f"expected NAME>=VERSION, found {requirement!r}")
    return f"{found['name']}=={found['version']}{found['rest'] or ''}"


def unpinned(requirement: str) -> str:
    """Return a requirement without its versions."""
    name, semicolon, marker = requirement.partition(";")
    return re.sub(r"[<>=!~].*", "", name).strip() + semicolon + marker


def main() -> None:
    """Print the requirements of all names, each once, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME")
    versions = parser.add_mutually_exclusive_group()
    versions.add_argument("--minimum", action="store_true", help="the lowest version that each allows")
    versions.add_argument("--newest", action="store_true", help="without versions, so that pip takes the newest")
    parser.add_argument("--but", action="append", default=[], metavar="NAME==VERSION", help="in place of the declared")
    options = parser.parse_args()
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))
    lines = [line for name in options.names for line in declared(project, name)]
    change = pinned if options.minimum else unpinned if options.newest else str
    instead = {line.partition("==")[0]: line for line in options.but}
    print("\n".join(dict.fromkeys(instead.get(line.partition("==")[0], line) for line in map(change, lines))))


if __name__ == "__main__":
    main()
