"""What every test may rely on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
_WITHOUT_MODELS = f"NOT TESTED: needs the pair of small language models in {MODELS}"

# A background job of a shell starts with Ctrl-C ignored, and its children inherit that: tests that interrupt a child
# process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests with the marker ``models`` where the models are not."""
    if item.get_closest_marker("models") and not MODELS.is_dir():
        pytest.skip(_WITHOUT_MODELS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end how much was not tested for want of the models, whatever else is summed up."""
    count = sum(_WITHOUT_MODELS in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if count:
        terminalreporter.write_line(f"{count} tests {_WITHOUT_MODELS}", yellow=True, bold=True)
