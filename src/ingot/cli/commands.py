"""The one table of commands, each imported when it is asked for. A new command is a module and a word here."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args, get_origin

import typer
import typer.main

from ingot.cli.help import help_briefly
from ingot.core.registry import Registry


class Commands(Registry[Any]):
    """Commands of the parser by name, made by the function ``register`` of a module."""

    def _make(self, name: str, target: Any) -> Any:
        app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
        app.callback()(lambda: None)  # or a single command is no group
        target(app)
        command: Any = typer.main.get_group(app).commands[name]
        command.rich_help_panel = PANEL_OF[name]
        for each in (command, *getattr(command, "commands", {}).values()):
            convert_lightly(each)
            help_briefly(each)
        return command


def convert_lightly(command: Any) -> None:
    """Convert arguments of a command without pydantic where they are what they should be.

    Typer converts through pydantic, even a text to a text, and its import takes as long as that of the parser, the
    options and the reports together. Whatever is not plainly right is left to it, errors with it.
    """
    command.get_params = partial(_light, command.get_params)


def _light(get_params: Any, context: Any) -> Any:
    parameters = get_params(context)
    for parameter in parameters:
        if hasattr(parameter, "type_descriptor") and "process_value" not in vars(parameter):
            parameter.process_value = partial(_processed, parameter, parameter.process_value)
    return parameters


def _processed(parameter: Any, process: Any, context: Any, value: Any) -> Any:
    several = parameter.multiple or parameter.nargs == -1
    if value is None and not parameter.required:
        value = () if several else None
    elif _is_right(parameter.type_descriptor.annotation, value):
        value = list(value) if several else value
    else:
        return process(context, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _is_right(annotation: Any, value: Any) -> bool:
    """Whether a value is of its type as it is."""
    if annotation in (str, int, float, bool):
        return type(value) is annotation
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    return annotation == list[str] and type(value) in (list, tuple) and all(type(item) is str for item in value)


# By the panel of ``ingot --help``, in the order shown there: each command's module.
_PANELS = {
    "Convert": {
        "demo": "demo",
        "convert": "convert",
        "matrix": "matrix",
        "calibrate": "calibrate",
        "run-plan": "run_plan",
        "int4": "int4",
        "recipes": "catalog",
    },
    "Look": {
        "inspect": "inspect",
        "verify": "verify",
        "seal": "seal",
        "compare": "compare",
        "report": "report",
        "formats": "catalog",
        "codecs": "catalog",
        "doctor": "doctor",
    },
    "Deltas": {"diff": "diff", "patch": "patch", "store": "store"},
    "Run": {"generate": "generate", "eval": "eval", "cache": "cache"},
    "Targets": {"plan": "plan", "kernel": "kernel", "lut": "lut", "extract": "extract"},
}
PANEL_OF = {name: panel for panel, modules in _PANELS.items() for name in modules}
COMMANDS = Commands(
    "command",
    tuple((name, f"ingot.cli.{module}:register") for modules in _PANELS.values() for name, module in modules.items()),
)
