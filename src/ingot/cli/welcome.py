"""What ``ingot`` prints without arguments, README's six jobs, and with ``--help``: a line for every command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ingot.cli.commands import BRIEFLY, COMMANDS, GROUP_OF, PLUGINS
from ingot.cli.tables import line
from ingot.errors import printable

_WIDTH = 80

JOBS = {
    "Make weights smaller": "ingot convert model.safetensors small.zt --recipe int4",
    "Move them to another container": "ingot convert gptq-folder model.gguf",
    "Look, check, compare": "ingot verify small.zt",
    "Keep fine-tunes as deltas": "ingot diff base tuned -o tuned.zt",
    "Run and evaluate them": 'ingot generate folder "Once upon a time"',
    "Make them for one machine": "ingot plan folder --chip m4",
}


def welcome() -> None:
    """Print the jobs."""
    for job, command in JOBS.items():
        line(f"{job}:")
        line(f"  {command}")
    line("All commands: ingot --help")


def overview(usage: Sequence[str], about: str, parameters: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of ``ingot --help``, a screen of them: commands by group, then the options before a command."""
    yield f"Usage: ingot {' '.join(usage)}"
    yield about
    for group, names in groupby(GROUP_OF, GROUP_OF.__getitem__):
        yield ""
        for place, name in enumerate(names):
            yield f"{'' if place else group:<8} {name:<10} {BRIEFLY[name]}"
    if COMMANDS.plugins():
        yield ""
    for index, (name, plugin) in enumerate(COMMANDS.plugins().items()):
        summary = f"{plugin.distribution}: {plugin.summary}".removesuffix(": ")
        row = f"{'' if index else PLUGINS:<8} {printable(name):<10} {summary}"
        yield row if len(row) <= _WIDTH else f"{row[: _WIDTH - 3]}..."
    yield ""
    for place, option in enumerate(parameters):
        flag = " ".join(filter(None, (max(option.opts, key=len), option.metavar)))
        yield f"{'' if place else 'Options':<8} {flag:<23} {option.help.partition(',')[0].rstrip('.')}"
