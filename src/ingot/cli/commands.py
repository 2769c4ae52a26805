"""The table of commands: to add one, write a module and a row of ``_GROUPS``. Modules are imported on first use.

Extensions and plugins register ``click.Command`` objects as entry points of the group ``ingot.commands``.
"""

from __future__ import annotations

from typing import Any

import click

from ingot.core.registry import Registry


class Commands(Registry[click.Command]):
    """A registry of the commands by name."""

    def _make(self, name: str, target: Any) -> click.Command:
        if not isinstance(target, click.Command):
            raise TypeError(f"expected an object of click.Command, found {type(target).__name__}")
        target.short_help = BRIEFLY.get(name) or SHORT_NAMES.get(name) or target.short_help
        return target


PLUGINS = "Plugins"
"""The heading of ``ingot --help`` under which commands of plugins are listed."""

# Headings of ``ingot --help`` in order, each with rows: command, module, purpose. The module defines ``command``, or
# the name after a colon. A row without a module is a command of an extension (``core.extensions``).
_GROUPS = {
    "Convert": (
        ("demo", "demo", "Convert a small real model; show size and error"),
        ("quantize", "quantize", "Quantize a model for the program that runs it"),
        ("convert", "convert", "Convert a checkpoint, by a recipe or as it is"),
        ("append", "convert:append", "Add tensors to a .zt without rewriting it"),
        ("matrix", "matrix", "Show what a conversion to each format would keep"),
        ("calibrate", "calibrate", "Collect statistics of a model, for calibrated presets"),
        ("run-plan", "convert:run_plan", "Carry out a plan of `ingot convert --plan-out`"),
        ("recipes", "catalog:recipes", "List the preset recipes, or print one as TOML"),
    ),
    "Look": (
        ("inspect", "inspect", "Show tensors, sizes and codecs, from headers alone"),
        ("verify", "verify", "Check a checkpoint: structure, digests, every tensor"),
        ("seal", "verify:seal", "Write digests beside files that have none"),
        ("compare", "compare", "Compare two checkpoints tensor by tensor, worst first"),
        ("report", "compare:report", "Write an HTML page: contents of A, errors of B"),
        ("formats", "catalog:formats", "List the formats, and the codecs that each carries"),
        ("codecs", "catalog:codecs", "List the codecs, and the formats that carry them"),
        ("doctor", "catalog:doctor", "Check this installation, and show what is missing"),
    ),
    "Deltas": (
        ("diff", "diff", "Store a fine-tune as a delta to its base"),
        ("patch", "diff:patch", "Turn a base into a fine-tune, by one delta or several"),
        ("merge", "convert:merge", "Merge LoRA adapters into their base, tensor by tensor"),
        ("adapter", "adapter", "Convert LoRA adapters, or extract one from a fine-tune"),
        ("store", "store", "Keep many models in a library, each tensor once"),
        ("archive", "archive", "Archive a model's files in one .zt, byte for byte"),
        ("restore", "archive:restore", "Restore the files of an archive"),
        ("push", "push", "Copy a model to a registry or to the Hub"),
        ("pull", "push:pull", "Copy a model from a registry"),
    ),
    "Run": (
        ("generate", "generate", "Continue a prompt, and show time and memory"),
        ("eval", "eval", "Measure perplexity, speed, memory; KL to a reference"),
        ("sweep", "eval:sweep", "Quantize with several presets, and measure each"),
    ),
    "Targets": (
        ("ane", "special:ane", "For Apple's Neural Engine: plan, kernel, lut"),
        ("squish", "special:squish", "For Squish directories: int4, and their caches"),
        ("extract", "extract", "Make or extract a Core ML package; extract draft heads"),
    ),
}
GROUP_OF = {name: group for group, rows in _GROUPS.items() for name, _, _ in rows}
BRIEFLY = {name: text for rows in _GROUPS.values() for name, _, text in rows}
SHARED_LINES = {
    ("convert", "append"): "Convert a checkpoint; add tensors to a .zt in place",
    ("formats", "codecs"): "List the formats, the codecs, and which carries which",
    ("archive", "restore"): "Put files in one .zt; restore them byte for byte",
    ("push", "pull"): "Copy a model to a registry or the Hub; copy it back",
}
"""Pairs of commands that share a line of ``ingot --help`` so that it fits one screen, and the text of that line."""
SHORT_NAMES = {
    "plan": "Show what runs on an Apple Neural Engine, and its cost",
    "kernel": "Pack a weight for an Apple Neural Engine",
    "lut": "Build an activation table for an Apple Neural Engine",
    "int4": "Add four-bit forms to a Squish directory, in place",
    "cache": "Show, build or drop forms of a Squish directory",
}
"""Commands of ``ingot ane`` and ``ingot squish`` that also work without the first word, and their text in listings."""
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
