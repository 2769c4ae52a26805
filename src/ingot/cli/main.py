"""The command ``ingot``: collects the commands and turns errors into one line and an exit code.

Exit codes: 0 fine; 1 the answer is no (corrupt, differs, illegal); 2 wrong usage; 3 a needed extra is missing; 130
interrupted.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ingot
from ingot.cli import (
    cache,
    catalog,
    compare,
    convert,
    demo,
    diff,
    doctor,
    eval,
    extract,
    generate,
    inspect,
    int4,
    kernel,
    lut,
    patch,
    plan,
    verify,
)
from ingot.cli.output import reader_may_leave
from ingot.errors import IngotError, printable


class _Commands(TyperGroup):
    """Meets a reader that went away before the parser does, which would exit with 1."""

    def invoke(self, ctx: Any) -> Any:
        with reader_may_leave():
            return super().invoke(ctx)


app = typer.Typer(
    name="ingot",
    cls=_Commands,
    help="Model weights at rest and on the move: convert, verify, compare, patch, plan and run, exactly or measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

INTERRUPTED = 130

_DEBUG = {"on": False}

for module in (
    demo,
    convert,
    int4,
    inspect,
    verify,
    compare,
    diff,
    patch,
    extract,
    plan,
    kernel,
    lut,
    generate,
    eval,
    cache,
    catalog,
    doctor,
):
    module.register(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ingot {ingot.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before the command."""
    _DEBUG["on"] = debug


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    result: Any = 0
    try:
        result = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except Exception as error:
        return _failed(error)
    if result == INTERRUPTED:  # the parser turns Ctrl-C into this code by itself
        _say("interrupted; nothing was left under the final name")
    return result if isinstance(result, int) else 0


def _failed(error: Exception) -> int:
    """Tell an error in one line; with --debug, or if it is a defect of Ingot, raise it with its traceback."""
    if _DEBUG["on"]:
        raise error
    if isinstance(error, IngotError):
        _say(f"error: {error}")
        return error.exit_code
    if isinstance(error, MemoryError):
        _say("error: not enough memory; give --max-ram, or convert on a machine with more [ram.exhausted]")
        return 1
    if isinstance(error, OSError):
        _say(f"error: {error.filename or 'input/output'}: {error.strerror or error} [os.{error.errno}]")
        return 1
    describe: Any = getattr(error, "format_message", None)  # of the parser: an unknown option, a missing argument
    code = getattr(error, "exit_code", None)
    if describe is None or code is None:
        raise error
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context else "ingot"
    text = printable(" ".join(describe().split())).rstrip(".")
    _say(f"error: {text}; see `{command} --help` [cli.usage]")
    return int(code)


def _say(text: str) -> None:
    print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


def _warned(message: Warning | str, *_: Any, **__: Any) -> None:
    _say(f"warning: {printable(' '.join(str(message).split()))}")


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _prepare_streams() -> None:
    """Whatever the locale can print, and with streams that the shell closed: no traceback for want of a character."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminated)  # a polite kill cleans up like Ctrl-C
    _prepare_streams()
    warnings.showwarning = _warned  # in one line, and not by the line of code that found it
    sys.exit(run())


if __name__ == "__main__":
    main()
