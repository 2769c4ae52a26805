"""The commands ``ingot ane`` and ``ingot squish``, each for one type of device or container.

Their subcommands also work without the first word, such as ``ingot plan``. The caches of ``ingot cache`` are
subcommands of ``ingot squish``.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import click

from ingot.cli.commands import COMMANDS
from ingot.cli.help import Group


class _Members(MutableMapping[str, click.Command]):
    """A mapping of command names to commands of ``ingot`` or of its groups, each imported on first use."""

    def __init__(self, paths: dict[str, tuple[str, ...]]) -> None:
        self._paths = paths

    def __getitem__(self, name: str) -> click.Command:
        first, *inner = self._paths[name]
        command = COMMANDS[first]
        for member in inner:
            assert isinstance(command, click.Group)
            command = command.commands[member]
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        raise TypeError("the members of this group are fixed")

    def __delitem__(self, name: str) -> None:
        raise TypeError("the members of this group are fixed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _group(name: str, help: str, epilog: str, paths: dict[str, tuple[str, ...]]) -> Group:
    group = Group(name=name, help=help, epilog=epilog)
    group.commands = _Members(paths)
    return group


ane = _group(
    "ane",
    "Plan for an Apple Neural Engine, and pack weights and activation tables for it. No Mac is needed.",
    "Examples:\n\n  ingot ane plan ./Llama-3-8B --chip m4\n\n  ingot ane kernel model.zt lm_head.weight -o head.anek",
    {name: (name,) for name in ("plan", "kernel", "lut")},
)
squish = _group(
    "squish",
    "Add four-bit forms to a Squish directory, and show, build or drop its caches.",
    "Examples:\n\n  ingot squish int4 ./model-squish\n\n  ingot squish status ./model-squish",
    {"int4": ("int4",), **{name: ("cache", name) for name in ("status", "build", "drop")}},
)
