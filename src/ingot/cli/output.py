"""What commands print with: tables for people, JSON for tools, a progress bar on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ingot.core.files.system import is_reader_gone
from ingot.core.runtime.memory import format_size
from ingot.core.runtime.progress import ProgressCallback, ProgressEvent

Json = Annotated[bool, typer.Option("--json", help="Print data as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
_FEW = 4  # workers that are shown one by one


class Output(io.TextIOWrapper):
    """Standard output or error that never stops a command.

    After the first error the rest is dropped, and ``error`` is that error. If the reader of a pipe has left, as in
    ``ingot inspect ... | head``, the command still does all of its work.
    """

    error: OSError | None = None

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        if self.closed:
            return
        try:
            super().flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        self.error = self.error or error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)

    @property
    def incomplete(self) -> OSError | None:
        """The error for which a reader that is still there did not get all; None if it did."""
        return None if self.error is None or is_reader_gone(self.error) else self.error


def open_streams() -> None:
    """Make standard output and error print whatever the locale can print, and never stop a command.

    A stream that the shell closed is one that drops everything.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            encoding, by_line, at_once = stream.encoding, stream.line_buffering, stream.write_through
            stream = Output(
                stream.detach(), encoding, "backslashreplace", line_buffering=by_line, write_through=at_once
            )
        elif stream is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        setattr(sys, name, stream)


def print_json(value: Any) -> None:
    """Print a value (dataclasses included) as one JSON document; infinities become null.

    Characters that a terminal obeys or that reorder text (controls, bidirectional marks) are printed as JSON's escapes.
    """
    try:
        data = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a file name that is not text
        data = msgspec.json.encode(_encodable(msgspec.to_builtins(value, enc_hook=str)))
    text = msgspec.json.format(data, indent=2).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # escapes of JSON's own, where the terminal or the locale cannot take UTF-8
        text = json.dumps(json.loads(text), indent=2)
    print(_BEYOND_ASCII.sub(_escaped, text))


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


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
