"""The one table of commands, each imported on first use. A new command of Ingot is a module and a line here.

Extensions and plugins add commands by entry points in the group ``ingot.commands``: objects of ``click.Command``.
"""

from __future__ import annotations

from typing import Any

import click

from ingot.core.registry import Registry


class Commands(Registry[click.Command]):
    """Commands of the parser by name."""

    def _make(self, name: str, target: Any) -> click.Command:
        if not isinstance(target, click.Command):
            raise TypeError(f"expected an object of click.Command, found {type(target).__name__}")
        target.short_help = BRIEFLY.get(name, target.short_help)
        return target


PLUGINS = "Plugins"
"""The group of ``ingot --help`` that lists commands of plugins."""

# By the group of ``ingot --help``, in the order shown there: command, module, purpose in a line. The module defines
# ``command``, or the name after a colon. It is empty if an extension defines the command (``core.extensions``).
_GROUPS = {
    "Convert": (
        ("demo", "demo", "Convert a small real model; show size, error, perplexity"),
        ("quantize", "quantize", "Quantize a model for the program that runs it"),
        ("convert", "convert", "Convert a checkpoint, by a recipe or as it is"),
        ("matrix", "matrix", "Show what a conversion to each format would keep"),
        ("calibrate", "calibrate", "Take a model's statistics, by which recipes round better"),
        ("run-plan", "run_plan", "Carry out a plan of `ingot convert --plan-out`"),
        ("int4", "", "Add four-bit forms to a Squish directory, in place"),
        ("recipes", "catalog:recipes", "List the preset recipes, or print one as TOML"),
    ),
    "Look": (
        ("inspect", "inspect", "Show tensors, sizes, codecs, totals, from headers alone"),
        ("verify", "verify", "Check that a checkpoint is whole: digests, every tensor"),
        ("seal", "seal", "Write digests beside files that have none"),
        ("compare", "compare", "Compare two checkpoints tensor by tensor, worst first"),
        ("report", "report", "Make a page for the browser: what A has, how far B is"),
        ("formats", "catalog:formats", "List the formats, and the codecs that each carries"),
        ("codecs", "catalog:codecs", "List the codecs, and the formats that carry them"),
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
    tuple(
        (name, f"ingot.cli.{module if ':' in module else f'{module}:command'}")
        for rows in _GROUPS.values()
        for name, module, _ in rows
        if module
    ),
    group="ingot.commands",
)
