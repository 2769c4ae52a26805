"""The entry point of the console script; it handles Ctrl-C and errors during the import of the commands."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``ingot``; an error during the imports is printed in one line, like later errors."""
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
