"""The command ``ingot``: finds the command to run, and turns errors into one line and an exit code.

Exit codes: 0 success; 1 the check failed (corrupt, different, illegal); 2 wrong usage; 3 a required extra is missing;
130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ingot.cli.commands import BRIEFLY, COMMANDS, GROUP_OF, PLUGINS, SHARED_LINES
from ingot.cli.help import Group
from ingot.cli.output import Output, line, open_streams, print_json
from ingot.core.border import foreign_error, system_error
from ingot.core.files.atomic import PUBLISHED, clean_up
from ingot.core.registry import did_you_mean
from ingot.errors import INGOT_VERSION, IngotError, PluginError, ResourceError, printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_WIDTH = 80
_LABEL = 16  # columns of the names in the list of commands

JOBS = {
    "Make weights smaller": "ingot convert model.safetensors small.zt --recipe int4",
    "Move them to another container": "ingot convert gptq-folder model.gguf",
    "Look, check, compare": "ingot verify small.zt",
    "Keep fine-tunes as deltas": "ingot diff base tuned -o tuned.zt",
    "Run and evaluate them": 'ingot generate folder "Once upon a time"',
    "Make them for one machine": "ingot plan folder --chip m4",
}


def welcome() -> None:
    """Print an example command for each of the common jobs."""
    for job, command in JOBS.items():
        line(f"{job}:")
        line(f"  {command}")
    line("All commands: ingot --help")


def overview(usage: Sequence[str], about: str, parameters: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of ``ingot --help``, at most one screen: commands by group, then the general options."""
    yield f"Usage: ingot {' '.join(usage)}"
    yield about
    for group, names in groupby(GROUP_OF, GROUP_OF.__getitem__):
        yield ""
        for index, (label, text) in enumerate(_lines_of(names)):
            yield f"{'' if index else group:<8} {label:<{_LABEL}} {text}"
    if COMMANDS.plugins():
        yield ""
    for index, (name, plugin) in enumerate(COMMANDS.plugins().items()):
        summary = f"{plugin.distribution}: {plugin.summary}".removesuffix(": ")
        row = f"{'' if index else PLUGINS:<8} {printable(name):<{_LABEL}} {summary}"
        yield row if len(row) <= _WIDTH else f"{row[: _WIDTH - 3]}..."
    for index, option in enumerate(parameters):
        flag = " ".join(filter(None, (max(option.opts, key=len), option.metavar)))
        yield f"{'' if index else 'Options':<8} {flag:<23} {option.help.partition(',')[0].rstrip('.')}"


def _lines_of(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the label and the help line of each command; commands that ``SHARED_LINES`` combines share one line."""
    shared = {siblings[0]: (", ".join(siblings), text) for siblings, text in SHARED_LINES.items()}
    skipped = {name for siblings in SHARED_LINES for name in siblings[1:]}
    for name in names:
        if name not in skipped:
            yield shared.get(name, (name, BRIEFLY[name]))


class _Commands(Group):
    """The group of all commands; it imports a command when the user calls it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = COMMANDS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            welcome()
            ctx.exit()
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        try:
            return super().get_command(ctx, cmd_name)
        except PluginError:
            if ctx.resilient_parsing:  # shell completion skips commands that cannot be loaded
                return None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands and options without importing the built-in commands."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.commands if name.startswith(incomplete)]
        names = [name for name in names if name in BRIEFLY or self.get_command(ctx, name) is not None]
        items = [CompletionItem(name, help=BRIEFLY.get(name)) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # the parser would print an empty line
            raise click.Abort from error
        except (BrokenPipeError, EOFError) as error:  # click would mistake them for a closed pipe or Ctrl-C
            raise _translated(error) from error

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line for each command, on one screen, and import no command."""
        lines = overview(self.collect_usage_pieces(ctx), self.help or "", self.get_params(ctx))
        formatter.write("".join(f"{text}\n" for text in lines))


INTERRUPTED = 130
TERMINATED = 143
USAGE = 2
PROGRAM = "ingot"
_COMPLETE = "_INGOT_COMPLETE"

_DEBUG = {"on": False}
_REPORTED = {"error": False}
_STOPPED = {"by": INTERRUPTED}


def _show_completion(ctx: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    """Print the script that lets a shell complete commands and options."""
    if shell is None or ctx.resilient_parsing:
        return
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(ctx.command, {}, PROGRAM, _COMPLETE).source())
    ctx.exit()


@click.group(
    cls=_Commands,
    help="Ingot shrinks, converts and checks language-model weights.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--cache", "cache_folder", metavar="DIR|off", help="Keep ranges of remote files in this folder.")
@click.option("--cache-size", metavar="SIZE", help="The most bytes kept there, such as 20GiB.")
@click.version_option(INGOT_VERSION, message="ingot %(version)s", help="Print the version.")
@click.option(
    "--show-completion",
    metavar="SHELL",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_show_completion,
    help="Print the completion script of SHELL, which is bash, zsh or fish.",
)
def app(debug: bool, cache_folder: str | None, cache_size: str | None) -> None:
    """Apply the options that precede the command."""
    _DEBUG["on"] = debug
    for name, value in (("INGOT_REMOTE_CACHE", cache_folder), ("INGOT_REMOTE_CACHE_SIZE", cache_size)):
        if value is not None:
            os.environ[name] = value


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; with ``--json`` an error is also printed as JSON on stdout."""
    json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    result: Any = 0
    try:
        result = app.main(arguments, PROGRAM, _COMPLETE, standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        result = INTERRUPTED
        _clean_up()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except Exception as error:
        if _DEBUG["on"]:
            raise
        return _report(_failure_of(error), json)
    if result == INTERRUPTED:
        message = "interrupted; nothing was left under the final name"
        if PUBLISHED:
            message = f"interrupted after {printable(PUBLISHED[-1])} was complete"
        command = sys.argv[1:] if arguments is None else arguments
        if "--resume" in command:
            message += f"; finished parts are kept, continue with: {printable(shlex.join(['ingot', *command]))}"
        return _report(Failure(_STOPPED["by"], "interrupted", message), json, "")
    return result if isinstance(result, int) else 0


def _clean_up() -> None:
    """Remove unfinished files; a second Ctrl-C does not interrupt the removal."""
    previous = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        clean_up()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, previous)


@dataclass(frozen=True)
class Failure:
    """An error to print: exit code, rule, message, and the file or tensor if the error names it."""

    exit_code: int
    rule: str
    message: str
    location: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the error as ``--json`` prints it."""
        return {"exit_code": self.exit_code, "rule": self.rule, "message": self.message, "where": self.location}


def _failure_of(error: Exception) -> Failure:
    """Return the failure to print for an exception."""
    if isinstance(error, click.ClickException):
        return _usage_failure(error)
    translated = _translated(error)
    return Failure(translated.exit_code, translated.rule or "", str(translated), translated.where or "")


def _translated(error: Exception) -> IngotError:
    """Return an exception as one of Ingot's errors; an unexpected one becomes ``cli.defect``."""
    return foreign_error(error, has_caller=False) or ResourceError(
        f"a defect of Ingot: {type(error).__name__}: {error}. Please report it with what `ingot --debug ...` prints",
        rule="cli.defect",
    )


def _usage_failure(error: click.ClickException) -> Failure:
    """Return the failure for an error of the parser, such as an unknown option or a missing argument."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else PROGRAM
    text = " ".join(error.format_message().split())
    if isinstance(error, click.NoSuchOption):
        text = f"no such option: {error.option_name}{did_you_mean(error.option_name, error.possibilities or ())}"
    return Failure(error.exit_code, "cli.usage", f"{printable(text).rstrip('.')}; see `{command} --help` [cli.usage]")


def _report(failure: Failure, json: bool, label: str = "error: ") -> int:
    """Print a failure on stderr, with ``json`` also as JSON on stdout; return the exit code."""
    if json:
        print_json({"error": failure.as_json()})
    line(f"{label}{failure.message}", stream=sys.stderr)
    _REPORTED["error"] = True
    return failure.exit_code


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    line(f"warning: {' '.join(str(message).split())}", stream=sys.stderr)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    _STOPPED["by"] = TERMINATED
    raise KeyboardInterrupt


def _flush(code: int) -> int:
    """Flush the output of a command; return ``code``, or the exit code for lost output."""
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
    """Run ``ingot`` as the console script: replace the streams, handle SIGTERM, exit with the command's code."""
    signal.signal(signal.SIGTERM, _on_sigterm)  # SIGTERM cleans up like Ctrl-C
    open_streams()
    warnings.showwarning = _print_warning  # one line, without the line of code that raised the warning
    sys.exit(_flush(run()))


if __name__ == "__main__":
    main()
