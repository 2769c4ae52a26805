"""The command ``ingot``: collects the commands and turns errors into one line and an exit code.

Exit codes: 0 fine; 1 the answer is no (corrupt, differs, illegal); 2 wrong usage; 3 a needed extra is missing; 130
interrupted by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ingot
from ingot.cli.commands import COMMANDS, convert_lightly
from ingot.cli.help import without_types
from ingot.cli.output import print_json, reader_may_leave
from ingot.cli.tables import line
from ingot.cli.welcome import overview, welcome
from ingot.core.atomic import PUBLISHED
from ingot.core.suggest import did_you_mean
from ingot.errors import IngotError, printable


class _Commands(TyperGroup):
    """Imports a command when it is asked for.

    Meets a reader that went away before the parser does, which would exit with 1.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = COMMANDS
        convert_lightly(self)
        without_types(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            with reader_may_leave():
                welcome()
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Tell of every command in a line, on a screen, and import none."""
        lines = overview(self.collect_usage_pieces(ctx), self.help or "", self.get_params(ctx))
        formatter.write("".join(f"{text}\n" for text in lines))

    def invoke(self, ctx: Any) -> Any:
        with reader_may_leave():
            return super().invoke(ctx)


app = typer.Typer(
    name="ingot",
    cls=_Commands,
    help="Model weights, smaller, elsewhere, and provably the same.",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

INTERRUPTED, TERMINATED = 130, 143
USAGE = 2

_DEBUG = {"on": False}
_STOPPED = {"by": INTERRUPTED}


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ingot {ingot.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    cache_folder: Annotated[
        str | None,
        typer.Option("--cache", metavar="DIR|off", help="Keep ranges of remote files in this folder."),
    ] = None,
    cache_size: Annotated[
        str | None, typer.Option("--cache-size", metavar="SIZE", help="The most bytes kept there, such as 20GiB.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before the command."""
    _DEBUG["on"] = debug
    for name, value in (("INGOT_REMOTE_CACHE", cache_folder), ("INGOT_REMOTE_CACHE_SIZE", cache_size)):
        if value is not None:
            os.environ[name] = value


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; with ``--json`` an error is a JSON document on stdout as well."""
    json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    result: Any = 0
    try:
        result = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except Exception as error:
        if _DEBUG["on"]:
            raise
        if _is_bare(error):  # the parser has printed the help
            return USAGE
        failure = _failure(error)
        if failure is None:  # a defect of Ingot: with its traceback
            raise
        return _report(failure, json)
    if result == INTERRUPTED:  # the parser turns Ctrl-C into this code by itself
        message = "interrupted; nothing was left under the final name"
        if PUBLISHED:
            message = f"interrupted after {printable(PUBLISHED[-1])} was complete"
        given = sys.argv[1:] if arguments is None else arguments
        if "--resume" in given:
            message += f"; what is finished is kept, go on with: {printable(shlex.join(['ingot', *given]))}"
        return _report(Failure(_STOPPED["by"], "interrupted", message), json, "")
    return result if isinstance(result, int) else 0


@dataclass(frozen=True)
class Failure:
    """What the command line says of an error: the exit code, the rule, a sentence, and where."""

    exit_code: int
    rule: str
    message: str
    where: str = ""


def _is_bare(error: Exception) -> bool:
    return type(error).__name__ == "NoArgsIsHelpError"


def _failure(error: Exception) -> Failure | None:
    """Return what to say of an error; None for one that nobody foresaw."""
    if isinstance(error, IngotError):
        return Failure(error.exit_code, error.rule or "", str(error), error.where or "")
    if isinstance(error, MemoryError):
        text = "not enough memory; give --max-ram, or convert on a machine with more [ram.exhausted]"
        return Failure(1, "ram.exhausted", text)
    if isinstance(error, OSError):
        rule = f"os.{error.errno}"
        text = f"{error.filename or 'input/output'}: {error.strerror or error} [{rule}]"
        return Failure(1, rule, text, str(error.filename or ""))
    describe: Any = getattr(error, "format_message", None)  # of the parser: an unknown option, a missing argument
    code = getattr(error, "exit_code", None)
    if describe is None or code is None:
        return None
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context else "ingot"
    text = printable(_described(error, describe())).rstrip(".")
    return Failure(int(code), "cli.usage", f"{text}; see `{command} --help` [cli.usage]")


def _described(error: Exception, text: str) -> str:
    """Return what the parser says in one line; of an option that is not there, which one may have been meant."""
    name, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if isinstance(name, str) and near:
        return f"no such option: {name}{did_you_mean(name, near)}"
    return " ".join(text.split()).replace(": Value error, ", ": ")


def _report(failure: Failure, json: bool, label: str = "error: ") -> int:
    """Say it on stderr, and on stdout as data where data was asked for; return the exit code."""
    if json:
        with reader_may_leave():
            print_json({"error": failure})
    line(f"{label}{failure.message}", stream=sys.stderr)
    return failure.exit_code


def _warned(message: Warning | str, *_: Any, **__: Any) -> None:
    line(f"warning: {' '.join(str(message).split())}", stream=sys.stderr)


def _terminated(number: int, frame: FrameType | None) -> None:
    _STOPPED["by"] = TERMINATED
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
