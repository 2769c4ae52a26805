"""Use an installation of the core dependencies alone: ``make core``. Prints faults; exit code 1 if there is one.

    python tools/core_tour.py                     in an environment that has nothing else
    python tools/core_tour.py --block --no-tour   anywhere: what no core dependency brings is taken for not installed

Done: ``--help`` of every command; every listing, as text and as JSON; docs/tour.md, commands and Python, in a
temporary folder. What needs an extra must exit with code 3 and name an extra that pyproject.toml declares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import check_docs
import requirements

ROOT = Path(__file__).resolve().parent.parent
NEED_AN_EXTRA = ("generate", "eval")
_HINT = re.compile(r"pip install 'ingot\[(\w+)\]'")


def foreign_modules() -> set[str]:
    """Top-level modules of what is installed and no core dependency brings, nor what these need in turn."""
    project = tomllib.loads(requirements.PYPROJECT.read_text("utf-8"))
    found: set[str] = set()
    waiting = requirements.declared(project, "core")
    while waiting:
        name = _normal(re.match(r"[\w.-]+", waiting.pop())[0])  # type: ignore[index]
        if name not in found:
            with contextlib.suppress(metadata.PackageNotFoundError):  # of another system or Python
                waiting += [line for line in metadata.requires(name) or () if "extra ==" not in line]
                found.add(name)
    return {
        module
        for module, distributions in metadata.packages_distributions().items()
        if not {*found, "ingot"} & {_normal(distribution) for distribution in distributions}
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Block:
    """Takes what no core dependency brings for not installed."""

    def __init__(self) -> None:
        self._foreign = foreign_modules() - {*sys.stdlib_module_names, "ingot"}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse a foreign module; leave any other to the finders behind this one."""
        if name.partition(".")[0] in self._foreign:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every command and group of commands, as the words that call it."""
    yield names
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*names, name))


def listings() -> Iterator[tuple[str, ...]]:
    """Yield the commands that list what there is."""
    from ingot.recipes.load import PRESETS

    for name in ("recipes", "formats", "codecs", "doctor"):
        yield (name,)
        yield name, "--json"
    for preset in PRESETS:
        yield "recipes", preset


def call(words: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it wrote."""
    from ingot.cli.main import run

    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = run(list(words))
    return code, written.getvalue()


def call_alone(words: Sequence[str]) -> tuple[int, str]:
    """Run a command in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "ingot", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def faults_of(words: Sequence[str], expected: int, extras: set[str]) -> Iterator[str]:
    """Run one command; yield what is wrong with its end."""
    code, written = (call_alone if "--max-ram" in words else call)(words)
    line = shlex.join(["ingot", *words])
    if words and words[0] in NEED_AN_EXTRA and "--help" not in words:
        expected = 3
    if code != expected:
        yield f"{line}: expected exit code {expected}, found {code}: {written[-2000:]}"
    if code == 3 and not set(_HINT.findall(written)) & extras:
        yield f"{line}: expected the name of a declared extra, found: {written[-2000:]}"


@contextlib.contextmanager
def server(page: check_docs.Document) -> Iterator[None]:
    """Run the web server that the page starts in the background."""
    (line,) = re.findall(r"^\$ python (-m .+) &$", "\n".join(block.text for block in page.blocks), re.MULTILINE)
    words = shlex.split(line)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # tests.support
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", int(words[-1]))).close()
                break
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def tour(extras: set[str]) -> Iterator[str]:
    """Do the tour's commands, then its blocks of Python, in the current folder; yield faults."""
    from ingot.errors import MissingExtraError

    data = ROOT / "src" / "ingot" / "demo" / "data"  # the wheel does not contain it
    shutil.copytree(data, Path("ingot-demo", "original"), ignore=shutil.ignore_patterns("__*"))
    page = check_docs.read(ROOT / "docs" / "tour.md")
    (recipe,) = (block.text for block in page.blocks if block.language == "toml")
    Path("mine.toml").write_text(recipe)
    with server(page):
        for line, code in check_docs.tour(page):
            words = shlex.split(line, comments=True)[1:]
            if words[0] == "demo":  # the model, which is there already
                continue
            if not any(word.endswith(".gguf") for word in words):
                yield from faults_of(words, code, extras)
            elif words[0] == "quantize":  # the names of llama.cpp's tensors come from the extra gguf
                yield from faults_of(words, 3, extras)
    for number, block in enumerate(block for block in page.blocks if block.language == "python"):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, f"docs/tour.md, Python block {number}", "exec"), {})
        except MissingExtraError as error:
            if number == 0:
                yield f"the first block of Python needs an extra: {error}"


def main() -> int:
    """Do it all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", action="store_true", help="take what no core dependency brings for not installed")
    parser.add_argument("--no-tour", action="store_true", help="leave the tour out")
    options = parser.parse_args()
    if options.block:
        sys.meta_path.insert(0, Block())  # type: ignore[arg-type]
    from ingot.cli.main import app

    project = tomllib.loads(requirements.PYPROJECT.read_text("utf-8"))
    extras = set(project["project"]["optional-dependencies"])
    every = [(*words, "--help") for words in commands(app)] + list(listings())
    faults = [fault for words in every for fault in faults_of(words, 0, extras)]
    if not options.no_tour:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            faults += tour(extras)
            os.chdir(ROOT)
    print(*faults, f"{len(every)} helps and listings: {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
