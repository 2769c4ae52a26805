"""What commands print with: tables for people, JSON for tools, a progress bar on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ingot.cli.tables import BARS, terminal_width
from ingot.core.files.system import is_reader_gone
from ingot.core.options import About
from ingot.core.runtime.memory import format_size
from ingot.core.runtime.progress import ProgressCallback, ProgressEvent

Json = Annotated[bool, About("Print data as JSON on stdout.")]
Quiet = Annotated[bool, About("No progress bar and no summary.", ("--quiet", "-q"))]

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
_SHOWN_WORKERS = 4  # more workers are summarized


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
    """Yield a callback that draws bytes, speed and remaining time on stderr; None if stderr is no terminal."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
        monitor_interval = 0  # no thread

    Bar.set_lock(threading.RLock())  # the default lock is one of processes
    size = {"ncols": terminal_width(sys.stderr), "nrows": 20}  # tqdm draws nothing on a terminal that states no size
    with Bar(desc=label, file=sys.stderr, leave=False, miniters=0, bar_format="{desc}", **size) as bar:

        def show(event: ProgressEvent) -> None:
            total = f" of {format_size(event.total)}" if event.total else ""
            speed = bar.format_dict["rate"]
            rate = f", {format_size(int(speed))}/s" if speed else ""
            text = f"{label} {format_size(event.done)}{total}{rate}{_by_workers(event.rates)}"
            bar.set_description_str(text, refresh=False)
            bar.total, bar.ncols = event.total or None, terminal_width(sys.stderr)
            bar.bar_format = "{desc} {bar} {remaining}" if event.total else "{desc}"
            bar.update(event.done - bar.n)

        BARS.append(Bar)
        try:
            yield show
        finally:
            BARS.remove(Bar)


def _by_workers(rates: Mapping[str, float]) -> str:
    """Say how fast workers are: each of a few, by their machines, or how far apart many are."""
    if not rates:
        return ""
    if len(rates) <= _SHOWN_WORKERS:
        each = ", ".join(f"{name} {format_size(int(rate))}/s" for name, rate in sorted(rates.items()))
        return f" ({each})"
    low, high = format_size(int(min(rates.values()))), format_size(int(max(rates.values())))
    return f" ({len(rates)} workers, {low}/s to {high}/s each)"
