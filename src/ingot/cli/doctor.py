"""``ingot doctor``."""

from __future__ import annotations

import sys

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json
from ingot.cli.render import render


@declare("doctor")
def command(json: Json = False) -> None:
    """Say what this installation has, and what to do about what is missing."""
    from ingot.inspect.doctor import checks_report, examine

    checks = examine()
    render(checks_report(checks), json=json)
    sys.stdout.flush()
    raise Exit(1 if any(item.state == "bad" for item in checks) else 0)
