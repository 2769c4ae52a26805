"""What every test may rely on."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Libraries that start a thread per processor, in each of the processes that tests run in, wait for each other: many
# times as long as they compute where processors have other work. Before they are imported, and for child processes.
for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
_WITHOUT_MODELS = f"NOT TESTED: needs the pair of small language models in {MODELS}"

# No test asserts a time, and a loaded machine takes any.
settings.register_profile("ingot", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("ingot"), max_examples=4)  # under emulation: `make arm64`
settings.load_profile("ingot")

# A background job of a shell starts with Ctrl-C ignored, and its children inherit that: tests that interrupt a child
# process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--must-run", action="store_true", help="fail where every test was skipped")
    parser.addoption(
        "--one-in", type=int, default=1, metavar="N", help="of the cases of a test the first, and one in N"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most cases of tests that have many, where that was asked for; which, depends on their names alone."""
    every, seen = config.getoption("--one-in"), set[str]()
    kept: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test not in seen or zlib.crc32(item.nodeid.encode()) % every == 0:
            kept.append(item)
        seen.add(test)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let no test depend on a terminal's width, nor on the cache that a command of another test asked for in this
    process; skip those with the marker ``models`` where the models are not."""
    for name in ("COLUMNS", "INGOT_REMOTE_CACHE", "INGOT_REMOTE_CACHE_SIZE"):  # pytest-xdist sets the first in workers
        os.environ.pop(name, None)
    if item.get_closest_marker("models") and not MODELS.is_dir():
        pytest.skip(_WITHOUT_MODELS)


def _nothing_ran(config: pytest.Config) -> bool:
    """Whether every test was skipped where some must run; False in pytest-xdist's workers, which see some only."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return bool(config.getoption("--must-run")) and reporter is not None and "passed" not in reporter.stats


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail where tests were asked for by name, and none of them ran."""
    if exitstatus == pytest.ExitCode.OK and _nothing_ran(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end how much was not tested for want of the models, whatever else is summed up."""
    if _nothing_ran(terminalreporter.config):
        terminalreporter.write_line("NOTHING WAS TESTED: expected some of these tests to run", red=True, bold=True)
    count = sum(_WITHOUT_MODELS in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if count:
        terminalreporter.write_line(f"{count} tests {_WITHOUT_MODELS}", yellow=True, bold=True)
