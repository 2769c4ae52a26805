"""The one table of commands, each imported on first use. A new command of Ingot is a module and a line here.

Extensions and plugins add commands by entry points in the group ``ingot.commands``: functions ``register(app)``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args, get_origin

import typer
import typer.main

from ingot.cli.help import help_briefly
from ingot.core.registry import Registry


class Commands(Registry[Any]):
    """Commands of the parser by name, built by the ``register`` functions of their modules."""

    def _make(self, name: str, target: Any) -> Any:
        app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
        app.callback()(lambda: None)  # or a single command is no group
        target(app)
        command: Any = typer.main.get_group(app).commands.get(name)
        if command is None:
            raise TypeError(f"its function adds no command {name!r}")
        command.rich_help_panel = GROUP_OF.get(name, PLUGINS)
        command.short_help = BRIEFLY.get(name, command.short_help)
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


PLUGINS = "Plugins"
"""The group of ``ingot --help`` that lists commands of plugins."""

# By the group of ``ingot --help``, in the order shown there: command, module, purpose in a line. The module is empty if
# an extension registers the command (``core.extensions``).
_GROUPS = {
    "Convert": (
        ("demo", "demo", "Convert a small real model; show size, error, perplexity"),
        ("convert", "convert", "Convert a checkpoint, by a recipe or as it is"),
        ("matrix", "matrix", "Show what a conversion to each format would keep"),
        ("calibrate", "calibrate", "Take a model's statistics, by which recipes round better"),
        ("run-plan", "run_plan", "Carry out a plan of `ingot convert --plan-out`"),
        ("int4", "", "Add four-bit forms to a Squish directory, in place"),
        ("recipes", "catalog", "List the preset recipes, or print one as TOML"),
    ),
    "Look": (
        ("inspect", "inspect", "Show tensors, sizes, codecs, totals, from headers alone"),
        ("verify", "verify", "Check that a checkpoint is whole: digests, every tensor"),
        ("seal", "seal", "Write digests beside files that have none"),
        ("compare", "compare", "Compare two checkpoints tensor by tensor, worst first"),
        ("report", "report", "Make a page for the browser: what A has, how far B is"),
        ("formats", "catalog", "List the formats, and the codecs that each carries"),
        ("codecs", "catalog", "List the codecs, and the formats that carry them"),
        ("doctor", "doctor", "Say what this installation has, and what is missing"),
    ),
    "Deltas": (
        ("diff", "diff", "Store what turns a base into a fine-tune"),
        ("patch", "patch", "Turn a base into a fine-tune, by one delta or several"),
        ("store", "store", "Keep many models in one place, each tensor once"),
    ),
    "Run": (
        ("generate", "generate", "Continue a prompt, and say what it took"),
        ("eval", "eval", "Measure perplexity, speed, memory; KL to a reference"),
        ("cache", "", "Show, build or drop forms of a Squish directory"),
    ),
    "Targets": (
        ("plan", "", "Say what runs on an Apple Neural Engine, and its cost"),
        ("kernel", "", "Pack a weight for an Apple Neural Engine"),
        ("lut", "", "Build an activation table for an Apple Neural Engine"),
        ("extract", "extract", "Take out a draft head, a Core ML package; make one"),
    ),
}
GROUP_OF = {name: group for group, rows in _GROUPS.items() for name, _, _ in rows}
BRIEFLY = {name: text for rows in _GROUPS.values() for name, _, text in rows}
COMMANDS = Commands(
    "command",
    tuple((name, f"ingot.cli.{module}:register") for rows in _GROUPS.values() for name, module, _ in rows if module),
    group="ingot.commands",
)
