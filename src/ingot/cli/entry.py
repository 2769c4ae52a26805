"""Entry point of the console script: imports the commands where Ctrl-C and a lack of resources are already handled."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``ingot``; what goes wrong with the imports ends it in one line, as later errors do."""
    try:
        from ingot.cli.main import main as run
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except (ImportError, MemoryError, OSError, RuntimeError, SystemError) as error:
        text = " ".join(str(error).split()) or "not enough memory"
        _end(f"error: Ingot cannot start: {type(error).__name__}: {text}; check limits and installation [cli.start]", 1)
    try:
        run()
    except MemoryError:
        _end("error: not enough memory, even to say what failed [ram.exhausted]", 1)


def _end(message: str, code: int) -> None:
    if sys.stderr is not None:
        print(message, file=sys.stderr)
    sys.exit(code)
