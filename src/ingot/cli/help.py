"""The help of a command: usage, arguments, options by heading, examples.

If a command has many options, ``--help`` describes those without a heading and lists the names of the rest;
``--help-all`` describes all. ``About.panel`` of a field is the heading of its option.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any

import click

from ingot.core.registry import did_you_mean

ALL = "--help-all"
_ARGUMENTS = "Arguments"
_OPTIONS = "Options"
_BRIEF_LIMIT = 12  # a command with at most this number of parameters shows them all
_EXAMPLES = 3
_WIDTH = 78
_SPACE = "\N{NO-BREAK SPACE}"
_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_ALL_REQUESTED = "ingot.help.all"


class Option(click.Option):
    """An option whose help may be listed under a heading, and which may have names that the help does not list."""

    def __init__(
        self, declarations: Sequence[str], panel: str | None = None, aliases: Sequence[str] = (), **attributes: Any
    ) -> None:
        super().__init__([*declarations, *aliases], **attributes)
        self.panel = panel
        self._listed = [name for name in self.opts if name not in aliases]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's listed names and its description."""
        names = self.opts
        self.opts = self._listed
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the option's listed names, for an error message."""
        return " / ".join(map(repr, self._listed))


class Command(click.Command):
    """A command with Ingot's help; it has ``--help-all`` if it has many options."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        if len(self.params) > _BRIEF_LIMIT and any(_panel(parameter) for parameter in self.params):
            self.params.append(_help_all())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # some errors of the parser do not name the command
            raise

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, description, arguments, options and examples."""
        write_help(self, ctx, formatter)


class Group(click.Group):
    """A command with subcommands and Ingot's help; an error for a mistyped name suggests similar names."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise click.UsageError(f"no such command: {args[0]}{did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, description, options, commands and examples."""
        write_help(self, ctx, formatter)


def write_help(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the help of a command."""
    command.format_usage(ctx, formatter)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(_unbroken(command.help or ""))
    parameters = command.get_params(ctx)
    is_brief = any(ALL in parameter.opts for parameter in parameters) and not ctx.meta.get(_ALL_REQUESTED)
    sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OPTIONS: []}
    names: dict[str, list[str]] = {}
    for parameter in parameters:
        panel = _panel(parameter)
        if is_brief and panel:
            names.setdefault(panel, []).append(max(parameter.opts, key=len))
        elif isinstance(parameter, click.Argument):
            sections[_ARGUMENTS].append((parameter.make_metavar(ctx), getattr(parameter, "help", None) or ""))
        elif (record := parameter.get_help_record(ctx)) is not None:
            sections.setdefault(panel or _OPTIONS, []).append(record)
    if isinstance(command, click.Group):
        sections["Commands"] = [(name, _first_paragraph(item)) for name, item in command.commands.items()]
    for title, rows in filter(lambda section: section[1], sections.items()):
        with formatter.section(_styled(title, bold=True)):
            formatter.write_dl([(_styled(name, fg="cyan"), _unbroken(text)) for name, text in rows])
    formatter.buffer = [text.replace(_SPACE, " ").replace(_HYPHEN, "-") for text in formatter.buffer]
    for title, lines in _closing(names, command.epilog or "", is_brief):
        formatter.write(f"\n{_styled(title, bold=True)}\n")
        formatter.write("".join(f"{line}\n" for line in lines))


def _closing(names: dict[str, list[str]], epilog: str, is_brief: bool) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the title and the lines of the sections after the options: names without description, examples."""
    if names:
        yield f"More options, which {ALL} describes:", _name_lines(names)
    title, *examples = [paragraph for paragraph in epilog.split("\n\n") if paragraph] or [""]
    if title:
        yield title, map(_example, examples[:_EXAMPLES] if is_brief else examples)


def _name_lines(names: dict[str, list[str]]) -> Iterator[str]:
    for panel, options in names.items():
        text = f"{panel}: {' '.join(options)}"
        yield from wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)


def _example(text: str) -> str:
    """Return an example, broken into lines that end with backslashes so that a shell accepts it."""
    indent = " " * (len(text) - len(text.lstrip()))
    lines = wrap(
        text.lstrip(), _WIDTH - 2, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False
    )
    return " \\\n".join(lines)


def _first_paragraph(command: click.Command) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _unbroken(text: str) -> str:
    """Return text whose hyphens and defaults the formatter does not break; ``write_help`` restores the characters."""
    return text.replace("-", _HYPHEN).replace("[default: ", f"[default:{_SPACE}")


def _panel(parameter: click.Parameter) -> str | None:
    panel: str | None = getattr(parameter, "panel", None)
    return panel


def _styled(text: str, **style: Any) -> str:
    """Return text with colours, unless the environment forbids them; click removes them if stdout is no terminal."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, **style)


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL_REQUESTED] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _help_all() -> click.Option:
    text = "Show every option and example."
    return click.Option([ALL], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help=text)
