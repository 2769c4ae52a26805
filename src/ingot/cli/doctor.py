"""``ingot doctor``."""

from __future__ import annotations

import sys

import typer

from ingot.cli.output import Json, print_json
from ingot.cli.tables import line, table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(command)


def command(json: Json = False) -> None:
    """Say what this installation has, and what to do about what is missing."""
    from ingot.ops.check.doctor import examine

    checks = examine()
    if json:
        print_json(checks)
    else:
        table(("check", "state", "found"), [(item.name, item.state, item.found) for item in checks], left=3)
        for item in checks:
            if item.advice:
                line(f"{item.name}: {item.advice}")
    sys.stdout.flush()
    raise typer.Exit(1 if any(item.state == "bad" for item in checks) else 0)
