"""What the documents' tests share: the blocks of pages, and the demo's model where the tour says it is."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ingot.cli.main import run
from tests.support.paths import DEMO_DATA
from tests.support.registry import FakeRegistry

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    """Import a script of tools/."""
    spec = importlib.util.spec_from_file_location(f"ingot_tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(ROOT / "tools"))  # scripts import their neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="session")
def check_docs() -> ModuleType:
    return tool("check_docs")


@pytest.fixture(scope="session")
def check_words() -> ModuleType:
    return tool("check_words")


@pytest.fixture(scope="session")
def check_style() -> ModuleType:
    return tool("check_style")


@pytest.fixture(scope="session")
def sample_docstrings() -> ModuleType:
    return tool("sample_docstrings")


@pytest.fixture(scope="session")
def bench_table() -> ModuleType:
    return tool("bench_table")


@pytest.fixture(scope="session")
def readme_figures() -> ModuleType:
    return tool("readme_figures")


@pytest.fixture(scope="session")
def readme(check_docs: ModuleType) -> Any:
    return check_docs.read(ROOT / "README.md")


@pytest.fixture(scope="session")
def tour_page(check_docs: ModuleType) -> Any:
    return check_docs.read(ROOT / "docs" / "tour.md")


@pytest.fixture
def after_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder as ``make demo`` leaves it, as far as the documents use it."""
    data = DEMO_DATA
    shutil.copytree(data, tmp_path / "ingot-demo" / "original", ignore=shutil.ignore_patterns("__*"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Pages that are done -------------------------------------------------------------------------------------------------

SERVE = "python -m tests.support.web "
REGISTRY = "docker run -d -p 5000:5000 registry:2"


class Reader:
    """Does what a page says, block by block, in the current folder, and holds it to what it shows.

    A command must end with the exit code that its line states, 0 if none. What stands under it it must have printed,
    word for word however lines are broken; a line of three dots stands for any. Python runs as one session, and must
    have printed the block of text that follows it. TOML goes into the file that the line before it names. The server
    of a page runs at a free port. Figures with a decimal point may differ by ``tolerance``.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], exit_code: Callable[[str], int], tolerance: float) -> None:
        self.capsys, self.exit_code, self.tolerance = capsys, exit_code, tolerance
        self.server: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.registry: FakeRegistry | None = None
        self.printed = ""
        self.session: dict[str, Any] = {"__name__": "__main__"}
        self.compared = 0
        self.ran = 0

    def read(self, page: Any, languages: Sequence[str] = ("console", "python", "text", "toml")) -> None:
        lines = page.path.read_text("utf-8").splitlines()
        for block in page.blocks:
            if block.language not in languages or lines[block.line - 2].startswith("<!-- "):  # a table of figures
                continue
            if block.language == "console":
                self.console(block.text.replace("\\\n", " "))
            elif block.language == "python":
                exec(compile(self.here(block.text), str(page.path), "exec"), self.session)
                self.printed = self.capsys.readouterr().out
            elif block.language == "text":
                self.compare(block.text, page.path.name)
            else:
                before = " ".join(lines[max(0, block.line - 4) : block.line - 1])
                Path(re.findall(r"`([\w.-]+\.toml)`", before)[-1]).write_text(block.text, "utf-8")

    def here(self, text: str) -> str:
        """Return text with the addresses of this page's servers for those of the page."""
        if self.registry is not None:
            text = text.replace("localhost:5000", self.registry.host)
        return text if self.server is None else re.sub(r"(http://127\.0\.0\.1):\d+", rf"\1:{self.port}", text)

    def console(self, text: str) -> None:
        for piece in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = piece.partition("\n")
            stated = re.search(r"exit code (\d)", line)
            code = self.execute(self.here(line))
            self.ran += 1
            out, err = self.capsys.readouterr()
            assert code == (int(stated[1]) if stated else 0), f"{line}\n{out}\n{err}"
            self.printed = f"{out}\n{err}"
            self.compare(shown, line)

    def execute(self, line: str) -> int:
        words = shlex.split(line, comments=True)
        if line.startswith(SERVE):
            self.serve(words[3])
        elif line == REGISTRY:
            self.registry = FakeRegistry().__enter__()
        elif line.startswith("kill %1"):
            self.stop()
        elif words[0] == "ingot" and not {"|", ">", "&&"} & set(words):
            return self.exit_code(line)
        elif words[0] != "source":
            done = subprocess.run(line, shell=True, check=False, capture_output=True, text=True)
            print(done.stdout, done.stderr)
            return done.returncode
        return 0

    def compare(self, shown: str, where: str) -> None:
        found, at = self.printed.split(), 0
        pieces = [piece.split() for piece in re.split(r"^\s*\.\.\.\s*$", self.here(shown), flags=re.MULTILINE)]
        for index, wanted in enumerate(pieces):
            places = range(at, 1 + (len(found) - len(wanted) if index else at))
            place = next((i for i in places if all(map(self.same, wanted, found[i : i + len(wanted)]))), None)
            assert place is not None, f"{where}: {' '.join(wanted)!r} is not in\n{self.printed}"
            at = place + len(wanted)
            self.compared += len(wanted)
        assert at == len(found) or not shown.strip() or not pieces[-1], f"{where}: more than it shows\n{self.printed}"

    def same(self, wanted: str, found: str) -> bool:
        """Whether a word was printed; the lines under heads are as long as what stands below, speeds among it."""
        if set(wanted) == set(found) == {"─"}:
            return True
        figures = [re.fullmatch(r"(-?\d+\.\d+)(\D*)", word) for word in (wanted, found)]
        if not self.tolerance or None in figures:
            return wanted == found
        (first, unit), (second, other) = (figure.groups() for figure in figures if figure)
        return unit == other and abs(float(first) - float(second)) <= self.tolerance * abs(float(first))

    def serve(self, folder: str) -> None:
        self.stop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = [sys.executable, *shlex.split(SERVE)[1:], folder, str(self.port)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}  # a reader is in a clone
        self.server = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment)
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            time.sleep(0.05)
        raise AssertionError(f"no server at port {self.port}")

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()
        self.server = None

    def close(self) -> None:
        self.stop()
        if self.registry is not None:
            self.registry.__exit__(None, None, None)


def exit_code_of(line: str) -> int:
    """Run a command; one with a ceiling of memory in a process of its own, for this one holds what all tests left."""
    arguments = shlex.split(line, comments=True)[1:]
    if "--max-ram" not in arguments:
        return run(arguments)
    done = subprocess.run([sys.executable, "-m", "ingot", *arguments], check=False, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done.returncode


@pytest.fixture
def reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Reader]]:
    """Makes readers of pages, in an empty folder: a page makes all that it needs."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    made: list[Reader] = []

    def reader(tolerance: float = 0.0) -> Reader:
        made.append(Reader(capsys, exit_code_of, tolerance))
        return made[-1]

    yield reader
    for item in made:
        item.close()
