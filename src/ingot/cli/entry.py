"""Entry point of the console script: imports the commands where Ctrl-C is already taken care of."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``ingot``; an interrupt during the imports ends it as quietly as one later."""
    try:
        from ingot.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()
