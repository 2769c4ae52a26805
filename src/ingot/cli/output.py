"""What commands print with: tables for people, JSON for tools, a progress bar on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from ingot.core.files.system import is_reader_gone
from ingot.core.options import About
from ingot.core.runtime.memory import format_size
from ingot.core.runtime.progress import ProgressCallback, ProgressEvent
from ingot.errors import printable
from ingot.reporting.report import LEFT_ALIGNED, Figure, Line, Report, Table, cell, format_lines

_GAP = 2
_NARROWEST = 20  # columns; below it nothing readable fits
_NAME = 34  # columns that a shortened name keeps where another column can give way instead
_TEXT = 24  # columns that other text keeps before optional columns go
_LABEL = re.compile(r" *\S+ {2,}")
_UNKNOWN_WIDTH = 80  # columns of a terminal that states none

BARS: list[Any] = []
"""Classes of the progress bars on the terminal; ``line`` removes the bars while it prints."""


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Return the columns of a terminal, ``COLUMNS`` first; None where a file or a program reads, and nothing is cut."""
    stream = sys.stdout if stream is None else stream
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit():
        return max(int(asked), _NARROWEST)
    try:
        if not stream.isatty():
            return None
        return max(os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH, _NARROWEST)
    except (OSError, ValueError):  # a terminal without a size, a stream that is closed
        return None


def line(text: str, *, stream: IO[str] | None = None, whole: bool = False) -> None:
    """Print one line; on a terminal it is broken between words, and what follows is indented below the first words.

    What is ``whole`` the terminal breaks, so that it is copied as one line.
    """
    stream = sys.stdout if stream is None else stream
    width = terminal_width(stream)
    text = printable(text)
    if width is not None and len(text) > width and not whole:
        label = _LABEL.match(text)
        indent = len(text) - len(text.lstrip())
        text = "\n".join(
            textwrap.wrap(
                text.lstrip(),
                width,
                initial_indent=" " * indent,
                subsequent_indent=" " * (label.end() if label else indent + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    with BARS[-1].external_write_mode() if BARS else nullcontext():
        print(text, file=stream)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, optional: Sequence[str] = ()
) -> None:
    """Print a table; the first ``left`` columns are text, the others numbers on the right. Cells are plain text.

    Where the terminal is too narrow, the ``optional`` columns go first, in their order, and a line says so; then the
    first column is shortened in the middle, and other text is wrapped between words. Columns without content are left
    out.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if not cells or any(row[i] for row in cells)]
    natural = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    width = terminal_width()
    gone: list[str] = []
    for name in optional:
        if width is None or _least(natural, kept, left) <= width:
            break
        if columns.index(name) in kept:
            kept.remove(columns.index(name))
            gone.append(name)
    widths = [natural[i] for i in kept]
    texts = sum(i < left for i in kept)
    if width is not None:
        _narrow(widths, texts, width)
    names = _distinct([row[kept[0]] for row in (columns, *cells)], widths[0])
    for index, (name, row) in enumerate(zip(names, (columns, *cells), strict=True)):
        for printed in _lines([name, *(row[i] for i in kept[1:])], widths, texts):
            sys.stdout.write(f"{printed}\n")
        if index == 0:
            sys.stdout.write(("─" if _encodes("─") else "-") * (sum(widths) + _GAP * (len(widths) - 1)) + "\n")
    if gone:
        line(f"(left out at {width} columns: {', '.join(gone)}; COLUMNS=200 or a wider terminal shows all)")


def _least(natural: Sequence[int], kept: Sequence[int], left: int) -> int:
    """Return the columns that a table takes when its text is as narrow as is tolerable."""
    least = (min(natural[i], _NAME if i == 0 else _TEXT) if i < left else natural[i] for i in kept)
    return sum(least) + _GAP * (len(kept) - 1)


def _narrow(widths: list[int], texts: int, width: int) -> None:
    """Make text columns narrower until a table fits: the widest first, the names past the tolerable only at last."""
    room = width - _GAP * (len(widths) - 1)
    for name, text in ((_NAME, _NARROWEST // 2), (_NARROWEST // 2, _NARROWEST // 2)):
        while sum(widths) > room:
            least = [name, *[text] * (texts - 1)]
            spare, index = max(((widths[i], i) for i in range(texts) if widths[i] > least[i]), default=(0, -1))
            if not spare:
                break
            widths[index] -= 1


def _distinct(names: Sequence[str], width: int) -> Sequence[str]:
    """Return names of at most ``width`` columns; whole where what is left of them would not tell them apart."""
    for head in (None, 0):
        short = [shortened(name, width, head) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return names


def _lines(row: Sequence[str], widths: Sequence[int], texts: int) -> Iterable[str]:
    """Lay one row out: more than one line where a text is wrapped."""
    pieces = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        if 0 < i < texts and len(cell) > width
        else [cell]
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    for words in zip_longest(*pieces, fillvalue=""):
        fitted = (
            (cell if i == 0 else shortened(cell, width)).ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(words, widths, strict=True))
        )
        yield (" " * _GAP).join(fitted).rstrip()


def shortened(text: str, width: int, head: int | None = None) -> str:
    """Return text of at most ``width`` columns: the middle goes, and most of the end stays, which tells names apart."""
    if len(text) <= width:
        return text
    mark = "…" if _encodes("…") else "..."
    head = (width - len(mark)) // 6 if head is None else head
    tail = width - len(mark) - head
    return f"{text[:head]}{mark}{text[len(text) - tail :]}"


def _encodes(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
            encoding = stream.encoding
            by_line = stream.line_buffering
            at_once = stream.write_through
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
    low = format_size(int(min(rates.values())))
    high = format_size(int(max(rates.values())))
    return f" ({len(rates)} workers, {low}/s to {high}/s each)"


def render(report: Report, *, json: bool = False, quiet: bool = False) -> None:
    """Print a report; ``quiet`` leaves out what is for people."""
    if json:
        print_json(data_of(report))
    elif not quiet:
        print_text(report)


def data_of(report: Report) -> Any:
    """Return a report as JSON-like data: figures by name, tables as lists of rows."""
    tables = {item.name: rows_of(item) for item in report.tables if item.data}
    if not any(item.data for item in report.figures) and list(tables) == [""]:
        return tables[""]
    return {item.name: item.value for item in report.figures if item.data} | tables


def rows_of(item: Table) -> list[dict[str, Any]]:
    """Return a table's rows by the names of its columns."""
    named = [(index, column.name) for index, column in enumerate(item.columns) if column.name]
    return [{name: row[index] for index, name in named} for row in item.rows]


def print_text(report: Report) -> None:
    """Print a report for people."""
    figures = {item.name: item for item in report.figures}
    print_lines(report.lines, figures)
    shown = [item for item in report.tables if item.shown]
    for index, item in enumerate(shown):
        if index or report.lines:
            print()
        print_table(item)
    print_lines(report.closing, figures)


def print_lines(lines: Sequence[Line], figures: Mapping[str, Figure]) -> None:
    """Print lines with their figures put in."""
    for item, text in format_lines(lines, figures):
        line((f"  {item.label:<8} " if item.label else "") + text, whole=item.copyable)


def print_table(item: Table) -> None:
    """Print a table's columns that are for people."""
    shown = [(index, column) for index, column in enumerate(item.columns) if column.head]
    columns = [column for _, column in shown]
    left = next((i for i, column in enumerate(columns) if column.unit not in LEFT_ALIGNED), len(columns))
    dropped = sorted((column for column in columns if column.drop), key=lambda column: column.drop)
    rows = [[cell(row[index], column) for index, column in shown] for row in item.rows]
    if item.title:
        line(item.title)
    table([column.head for column in columns], rows, left=left, optional=[column.head for column in dropped])
    if item.after:
        line(item.after)
