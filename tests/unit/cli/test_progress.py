"""The progress bar: on a terminal, on stderr, and gone when the work is done."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from ingot.cli.output import progress_bar
from ingot.cli.tables import BARS, line
from ingot.core.runtime.progress import ProgressEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal; a fixture would be too early, pytest replaces stderr after it."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stream


def rows(terminal: Terminal) -> list[str]:
    """Everything that was drawn, by carriage returns and line feeds."""
    return [text.rstrip() for text in re.split(r"[\r\n]+", terminal.getvalue()) if text.strip()]


def draw(label: str, total: int, rates: dict[str, float] | None = None) -> None:
    with progress_bar(label) as show:
        assert show is not None
        for done in (2**20, 3 * 2**20):
            time.sleep(0.11)  # the bar is drawn ten times a second at most
            show(ProgressEvent(done, total, "a tensor", rates or {}))


def test_bytes_speed_and_remaining_time_are_drawn_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    draw("converting", 4 * 2**20)
    drawn = rows(terminal)
    assert re.fullmatch(r"converting 3\.00 MiB of 4\.00 MiB(, \S+ MiB/s)? \S+ +00:00", drawn[-1])
    assert max(map(len, drawn)) <= 80
    assert terminal.getvalue().split("\r")[-2].strip() == ""  # nothing remains
    assert not BARS


def test_a_job_of_unknown_size_shows_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    draw("hashing", 0, {"a": 2.0**20, "b": 2.0**21})
    assert re.fullmatch(r"hashing 3\.00 MiB(, \S+ MiB/s)? \(a 1\.00 MiB/s, b 2\.00 MiB/s\)", rows(terminal)[-1])


def test_a_line_printed_meanwhile_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with progress_bar("converting") as show:
        assert show is not None
        line("warning: a b", stream=sys.stderr)
    assert "warning: a b" in rows(terminal)


@pytest.mark.parametrize("case", ["quiet", "dumb", "file"])
def test_no_bar_is_drawn_where_it_is_not_wanted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    if case == "file":
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("TERM", "dumb" if case == "dumb" else "xterm")
    with progress_bar("converting", quiet=case == "quiet") as show:
        assert show is None
    assert terminal.getvalue() == ""
