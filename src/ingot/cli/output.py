"""Output of commands: text and tables on a terminal, JSON for programs, a progress bar on stderr."""

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

from ingot.core.about import About
from ingot.core.files.system import is_reader_gone
from ingot.core.runtime.memory import format_size
from ingot.core.runtime.progress import ProgressCallback, ProgressEvent
from ingot.errors import printable
from ingot.reporting.report import LEFT_ALIGNED, Figure, Line, Report, Table, cell, format_lines

_GAP = 2
_NARROWEST = 20  # columns; a narrower terminal is treated as one of this width
_NAME = 34  # columns to which names are shortened before other text is narrowed below ``_NARROWEST // 2``
_TEXT = 24  # columns to which other text is narrowed before optional columns are left out
_LABEL = re.compile(r" *\S+ {2,}")
_UNKNOWN_WIDTH = 80  # columns of a terminal that reports no size

BARS: list[Any] = []
"""Classes of the progress bars on the terminal; ``line`` hides the bars while it prints."""


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Return the number of columns for output: ``COLUMNS`` if it is set, else the width of the terminal.

    Returns None if ``COLUMNS`` is not set and the stream is no terminal.
    """
    stream = sys.stdout if stream is None else stream
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit():
        return max(int(columns), _NARROWEST)
    try:
        if not stream.isatty():
            return None
        return max(os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH, _NARROWEST)
    except (OSError, ValueError):  # a terminal without a size, or a closed stream
        return None


def line(text: str, *, stream: IO[str] | None = None, wrap: bool = True) -> None:
    """Print one line of text; on a terminal, wrap it between words and indent the continuation.

    With ``wrap=False``, the text is printed unbroken, so that a user can copy it as one line.
    """
    stream = sys.stdout if stream is None else stream
    width = terminal_width(stream)
    text = printable(text)
    if width is not None and len(text) > width and wrap:
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
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1, optional: Sequence[str] = ()
) -> None:
    """Print a table of plain text; the first ``text_columns`` columns are aligned left, the number columns right.

    Columns without content are left out. If the terminal is too narrow, the ``optional`` columns are left out too, in
    their order, and a line below the table lists them. If that is not enough, names in the first column are shortened
    in the middle, and other text is wrapped between words.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    shown = [i for i in range(len(columns)) if not cells or any(row[i] for row in cells)]
    natural = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    width = terminal_width()
    omitted: list[str] = []
    for name in optional:
        if width is None or _minimum_width(natural, shown, text_columns) <= width:
            break
        if columns.index(name) in shown:
            shown.remove(columns.index(name))
            omitted.append(name)
    widths = [natural[i] for i in shown]
    texts = sum(i < text_columns for i in shown)
    if width is not None:
        _narrow(widths, texts, width)
    names = _shorten_names([row[shown[0]] for row in (columns, *cells)], widths[0])
    for index, (name, row) in enumerate(zip(names, (columns, *cells), strict=True)):
        for printed in _row_lines([name, *(row[i] for i in shown[1:])], widths, texts):
            sys.stdout.write(f"{printed}\n")
        if index == 0:
            sys.stdout.write(("─" if _encodes("─") else "-") * (sum(widths) + _GAP * (len(widths) - 1)) + "\n")
    if omitted:
        line(f"(left out at {width} columns: {', '.join(omitted)}; COLUMNS=200 or a wider terminal shows all)")


def _minimum_width(natural: Sequence[int], shown: Sequence[int], text_columns: int) -> int:
    """Return the width of a table, in characters, if its text columns are narrowed to ``_NAME`` and ``_TEXT``."""
    widths = (min(natural[i], _NAME if i == 0 else _TEXT) if i < text_columns else natural[i] for i in shown)
    return sum(widths) + _GAP * (len(shown) - 1)


def _narrow(widths: list[int], texts: int, width: int) -> None:
    """Reduce the widths of the first ``texts`` columns, the widest first, until the table fits into ``width``.

    The first column stays at ``_NAME`` or more as long as narrowing the other text columns is enough.
    """
    available = width - _GAP * (len(widths) - 1)
    for name, text in ((_NAME, _NARROWEST // 2), (_NARROWEST // 2, _NARROWEST // 2)):
        while sum(widths) > available:
            minimums = [name, *[text] * (texts - 1)]
            spare, index = max(((widths[i], i) for i in range(texts) if widths[i] > minimums[i]), default=(0, -1))
            if not spare:
                break
            widths[index] -= 1


def _shorten_names(names: Sequence[str], width: int) -> Sequence[str]:
    """Return names shortened to at most ``width`` characters; unchanged names if two names would become equal."""
    for head in (None, 0):
        short = [shortened(name, width, head) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return names


def _row_lines(row: Sequence[str], widths: Sequence[int], texts: int) -> Iterable[str]:
    """Yield the lines of one row: more than one if text is wrapped."""
    wrapped = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        if 0 < i < texts and len(cell) > width
        else [cell]
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    for cells in zip_longest(*wrapped, fillvalue=""):
        padded = (
            (cell if i == 0 else shortened(cell, width)).ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield (" " * _GAP).join(padded).rstrip()


def shortened(text: str, width: int, head: int | None = None) -> str:
    """Return text of at most ``width`` characters: an ellipsis replaces the middle.

    Most of the end stays, because it distinguishes tensor names. ``head`` is the number of characters kept at the
    beginning, by default about a sixth of ``width``.
    """
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
_SHOWN_WORKERS = 4  # rates of more workers are summarized


class Output(io.TextIOWrapper):
    """Standard output or error that never stops a command.

    After the first error all further output is dropped, and ``error`` is that error. If the reader of a pipe has
    closed it, as in ``ingot inspect ... | head``, the command still does all of its work.
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
        """The error that made the output incomplete; None without an error, or if the reader closed the pipe."""
        return None if self.error is None or is_reader_gone(self.error) else self.error


def open_streams() -> None:
    """Replace standard output and error by streams that escape what the locale cannot print and never stop a command.

    A stream that the shell closed is replaced by one that drops everything.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            encoding = stream.encoding
            line_buffering = stream.line_buffering
            write_through = stream.write_through
            stream = Output(
                stream.detach(),
                encoding,
                "backslashreplace",
                line_buffering=line_buffering,
                write_through=write_through,
            )
        elif stream is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        setattr(sys, name, stream)


def print_json(value: Any) -> None:
    """Print a value (dataclasses included) as one JSON document; infinities become null.

    Characters that control a terminal or reorder text (controls, bidirectional marks) are printed as JSON escapes.
    """
    try:
        data = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a file name with undecodable bytes
        data = msgspec.json.encode(_encodable(msgspec.to_builtins(value, enc_hook=str)))
    text = msgspec.json.format(data, indent=2).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # the stream is not UTF-8: escape everything beyond ASCII
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
    """Yield a callback that shows bytes, speed and remaining time on stderr; None if stderr is no terminal."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
        monitor_interval = 0  # no monitor thread

    Bar.set_lock(threading.RLock())  # tqdm's default lock also uses multiprocessing
    size = {"ncols": terminal_width(sys.stderr), "nrows": 20}  # tqdm draws nothing if the terminal reports no size
    with Bar(desc=label, file=sys.stderr, leave=False, miniters=0, bar_format="{desc}", **size) as bar:

        def show(event: ProgressEvent) -> None:
            total = f" of {format_size(event.total)}" if event.total else ""
            speed = bar.format_dict["rate"]
            rate = f", {format_size(int(speed))}/s" if speed else ""
            text = f"{label} {format_size(event.processed)}{total}{rate}{_worker_rates(event.rates)}"
            bar.set_description_str(text, refresh=False)
            bar.total = event.total or None
            bar.ncols = terminal_width(sys.stderr)
            bar.bar_format = "{desc} {bar} {remaining}" if event.total else "{desc}"
            bar.update(event.processed - bar.n)

        BARS.append(Bar)
        try:
            yield show
        finally:
            BARS.remove(Bar)


def _worker_rates(rates: Mapping[str, float]) -> str:
    """Return each worker's bytes per second as text; for more than ``_SHOWN_WORKERS``, only the lowest and highest."""
    if not rates:
        return ""
    if len(rates) <= _SHOWN_WORKERS:
        listed = ", ".join(f"{name} {format_size(int(rate))}/s" for name, rate in sorted(rates.items()))
        return f" ({listed})"
    low = format_size(int(min(rates.values())))
    high = format_size(int(max(rates.values())))
    return f" ({len(rates)} workers, {low}/s to {high}/s each)"


def render(report: Report, *, json: bool = False, quiet: bool = False) -> None:
    """Print a report as JSON or as text; with ``quiet`` no text is printed."""
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
    """Return a table's rows as dictionaries by column name."""
    named = [(index, column.name) for index, column in enumerate(item.columns) if column.name]
    return [{name: row[index] for index, name in named} for row in item.rows]


def print_text(report: Report) -> None:
    """Print a report as text: opening lines, tables, closing lines."""
    figures = {item.name: item for item in report.figures}
    print_lines(report.lines, figures)
    shown = [item for item in report.tables if item.shown]
    for index, item in enumerate(shown):
        if index or report.lines:
            print()
        print_table(item)
    print_lines(report.closing, figures)


def print_lines(lines: Sequence[Line], figures: Mapping[str, Figure]) -> None:
    """Print lines with their figures filled in."""
    for item, text in format_lines(lines, figures):
        line((f"  {item.label:<8} " if item.label else "") + text, wrap=not item.copyable)


def print_table(item: Table) -> None:
    """Print a table, without the columns that have no heading."""
    shown = [(index, column) for index, column in enumerate(item.columns) if column.head]
    columns = [column for _, column in shown]
    text_columns = next((i for i, column in enumerate(columns) if column.unit not in LEFT_ALIGNED), len(columns))
    droppable = sorted((column for column in columns if column.drop), key=lambda column: column.drop)
    rows = [[cell(row[index], column) for index, column in shown] for row in item.rows]
    if item.title:
        line(item.title)
    optional = [column.head for column in droppable]
    table([column.head for column in columns], rows, text_columns=text_columns, optional=optional)
    if item.after:
        line(item.after)
