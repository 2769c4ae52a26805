"""The help of a command: options, then examples. Of many options those that most calls need, the others by their names.

An option belongs to the others if it has a panel of its own (``About.panel``); ``--help-all`` tells of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from textwrap import wrap
from typing import Annotated, Any

import typer
import typer.main

ALL = "--help-all"
_MANY = 12  # options, of which all are shown
_EXAMPLES = 3
_WIDTH = 78
_WANTED = "ingot.help.all"


def help_briefly(command: Any) -> None:
    """Give a parser's command this help, and ``--help-all`` where it leaves something out."""
    brief = len(command.params) > _MANY and any(_panel(parameter) for parameter in command.params)
    if brief:
        command.params.append(_help_all())
    examples, command.epilog = _examples(command.epilog or ""), None
    command.help = _unbroken(command.help or "")
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
    without_types(command)
    command.format_help = partial(_format, command, command.format_help, examples, brief=brief)


def _panel(parameter: Any) -> str | None:
    panel: str | None = getattr(parameter, "rich_help_panel", None)
    return panel


def without_types(command: Any) -> None:
    """Let a command's help not say of a flag that it is true or false."""
    command.get_params = partial(_untyped, command.get_params)


def _unbroken(text: str) -> str:
    """Return a docstring with a line for each paragraph: terminals break it, not the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _untyped(get_params: Callable[[Any], Any], context: Any) -> Any:
    """Return a command's parameters, flags without a type."""
    parameters = get_params(context)
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.display_type_rich = lambda ctx: None
    return parameters


def _examples(epilog: str) -> Sequence[str]:
    """Return an epilog's lines, its commands broken as a shell takes them."""
    lines = []
    for paragraph in filter(None, epilog.split("\n\n")):
        indent = " " * (len(paragraph) - len(paragraph.lstrip()))
        pieces = wrap(
            paragraph.lstrip(),
            _WIDTH - 2,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
        )
        lines.append(" \\\n".join(pieces))
    return lines


def _format(
    command: Any,
    whole: Callable[[Any, Any], None],
    examples: Sequence[str],
    context: Any,
    formatter: Any,
    *,
    brief: bool,
) -> None:
    """Print what the parser's own help has; what follows the options is the formatter's text, which comes last."""
    brief = brief and not context.meta.get(_WANTED)
    hidden = [parameter for parameter in command.params if _panel(parameter) and not parameter.hidden] if brief else []
    try:
        for parameter in hidden:
            parameter.hidden = True
        whole(context, formatter)
    finally:
        for parameter in hidden:
            parameter.hidden = False
    lines = [*_more(hidden), "", *examples[: 1 + _EXAMPLES]] if hidden else examples
    formatter.write("\n".join(f" {line}".rstrip() for text in lines for line in text.split("\n")) + "\n")


def _more(hidden: Sequence[Any]) -> list[str]:
    """Return the names of options that are not shown, by their panels."""
    panels: dict[str, list[str]] = {}
    for parameter in hidden:
        panels.setdefault(str(_panel(parameter)), []).append(max(parameter.opts, key=len))
    lines = [f"More, told of by {ALL}:"]
    for panel, names in panels.items():
        text = f"{panel}: {' '.join(names)}"
        lines += wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    return lines


def _show(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[_WANTED] = True
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


def _help_all() -> Any:
    return _made().params[0]


@cache
def _made() -> Any:
    app = typer.Typer(add_completion=False)

    @app.command()
    def only(
        all: Annotated[
            bool,
            typer.Option(ALL, is_eager=True, expose_value=False, callback=_show, help="Show every option and example."),
        ] = False,
    ) -> None: ...

    return typer.main.get_command(app)
