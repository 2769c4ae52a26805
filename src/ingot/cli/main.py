"""The command ``ingot``: collects the commands and turns errors into one line and an exit code.

Exit codes: 0 fine; 1 the answer is no (corrupt, differs, illegal); 2 wrong usage; 3 a needed extra is missing; 130
interrupted by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ingot.cli.commands import COMMANDS, convert_lightly
from ingot.cli.help import without_types
from ingot.cli.output import Output, open_streams, print_json
from ingot.cli.tables import line
from ingot.cli.welcome import overview, welcome
from ingot.core.border import foreign_error, system_error
from ingot.core.files.atomic import PUBLISHED
from ingot.core.suggest import did_you_mean
from ingot.errors import INGOT_VERSION, PluginError, ResourceError, printable


class _Commands(TyperGroup):
    """Imports a command when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = COMMANDS
        convert_lightly(self)
        without_types(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            welcome()
            ctx.exit()
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        try:
            return super().get_command(ctx, cmd_name)
        except PluginError:
            if ctx.resilient_parsing:  # completion in a shell lists the commands that can be loaded
                return None
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # of a worker: the parser would take it for a reader that left
            raise system_error(error) from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Tell of every command in a line, on a screen, and import none."""
        lines = overview(self.collect_usage_pieces(ctx), self.help or "", self.get_params(ctx))
        formatter.write("".join(f"{text}\n" for text in lines))


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
_REPORTED = {"error": False}
_STOPPED = {"by": INTERRUPTED}


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ingot {INGOT_VERSION}")
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
        return _report(_failure(error), json)
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


def _failure(error: Exception) -> Failure:
    """Return what to print about an error."""
    usage = _usage(error)
    if usage is not None:
        return usage
    translated = foreign_error(error, has_caller=False) or ResourceError(
        f"a defect of Ingot: {type(error).__name__}: {error}. Please report it with what `ingot --debug ...` prints",
        rule="cli.defect",
    )
    return Failure(translated.exit_code, translated.rule or "", str(translated), translated.where or "")


def _usage(error: Exception) -> Failure | None:
    """Return what the parser has to say about the command line: an unknown option, a missing argument."""
    describe: Any = getattr(error, "format_message", None)
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
        print_json({"error": failure})
    line(f"{label}{failure.message}", stream=sys.stderr)
    _REPORTED["error"] = True
    return failure.exit_code


def _warned(message: Warning | str, *_: Any, **__: Any) -> None:
    line(f"warning: {' '.join(str(message).split())}", stream=sys.stderr)


def _terminated(number: int, frame: FrameType | None) -> None:
    _STOPPED["by"] = TERMINATED
    raise KeyboardInterrupt


def _finished(code: int) -> int:
    """Return the exit code of a command after all of its output is written, or could not be."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    cause = sys.stdout.incomplete if isinstance(sys.stdout, Output) else None
    if cause is None or _REPORTED["error"]:
        return code
    error = system_error(OSError(cause.errno, cause.strerror, "standard output"))
    line(f"error: {error}", stream=sys.stderr)
    sys.stderr.flush()
    return code or error.exit_code


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminated)  # a polite kill cleans up like Ctrl-C
    open_streams()
    warnings.showwarning = _warned  # in one line, and not by the line of code that found it
    sys.exit(_finished(run()))


if __name__ == "__main__":
    main()
