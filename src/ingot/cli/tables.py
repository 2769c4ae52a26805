"""Tables and lines for people: as wide as the terminal, no word broken; whole where a program reads them."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import IO, Any

from ingot.errors import printable

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
