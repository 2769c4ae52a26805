"""What commands print with: tables for people, JSON for tools, a progress bar on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

from ingot.core.memory import format_size
from ingot.core.progress import ProgressCallback, ProgressEvent
from ingot.core.system import is_reader_gone

Json = Annotated[bool, typer.Option("--json", help="Print data as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]

_FEW = 4  # workers that are shown one by one


def print_json(value: Any) -> None:
    """Print a value (dataclasses included) as one JSON document; infinities become null."""
    try:
        data = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a file name that is not text
        data = msgspec.json.encode(_encodable(msgspec.to_builtins(value, enc_hook=str)))
    text = msgspec.json.format(data, indent=2).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # escapes of JSON's own, where the terminal or the locale cannot take UTF-8
        text = json.dumps(json.loads(text), indent=2)
    print(text)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Go on quietly when whoever read stdout has seen enough (``ingot inspect ... | head``)."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if not is_reader_gone(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress_bar(label: str, *, quiet: bool = False) -> Iterator[ProgressCallback | None]:
    """Yield a callback that draws bytes, speed and time left on stderr; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=None, amount="")

        def show(event: ProgressEvent) -> None:
            whole = f" of {format_size(event.total)}" if event.total else ""
            speed = bar.tasks[task].speed
            rate = f", {format_size(int(speed))}/s" if speed else ""
            amount = f"{format_size(event.done)}{whole}{rate}{_by_workers(event.rates)}"
            bar.update(task, completed=event.done, total=event.total, amount=amount)

        yield show


def _by_workers(rates: Mapping[str, float]) -> str:
    """Say how fast workers are: each of a few, by their machines, or how far apart many are."""
    if not rates:
        return ""
    if len(rates) <= _FEW:
        each = ", ".join(f"{name} {format_size(int(rate))}/s" for name, rate in sorted(rates.items()))
        return f" ({each})"
    low, high = format_size(int(min(rates.values()))), format_size(int(max(rates.values())))
    return f" ({len(rates)} workers, {low}/s to {high}/s each)"
