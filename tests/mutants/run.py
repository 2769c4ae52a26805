"""Apply small wrong changes to the code, one at a time; the tests that each names must fail: ``make mutants``.

    python tests/mutants/run.py                   all of them; exit code 1 if one lives
    python tests/mutants/run.py --only palette    those whose name, file or tests contain a text

A mutant is an entry of a ``*.json`` beside this file:

    name, file     what it is called, and the file that it changes
    old, new       the text, which occurs exactly once in the file, and what stands there instead
    switch         of native code: a number of its own. ``new`` keeps the old behaviour unless ``ingot_mut(number)``;
                   all of these are compiled once, and the environment variable INGOT_MUT chooses one
    tests          files, folders or test ids that must notice
    equivalent     why no test can; such a mutant is not run, but its text must still be there

Everything happens in copies of the tree in a temporary folder. First the tests run unchanged there, and must pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "INGOT_MUT"
SECONDS = 600  # of one mutant's tests; one that makes them run for ever is noticed by that
HEADER = f"""#pragma once
#include <cstdlib>
namespace {{
[[maybe_unused]] const int ingot_mut_on = std::getenv("{SWITCH}") ? std::atoi(std::getenv("{SWITCH}")) : 0;
}}
[[maybe_unused]] static inline bool ingot_mut(int number) {{ return ingot_mut_on == number; }}
"""
FLAGS = ["-q", "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0"]


@dataclass(frozen=True)
class Mutant:
    """An entry of the list."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    switch: int = 0
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """Return the file's text with the change; ValueError where the old text is not there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected once in {self.file}, found {text.count(self.old)} times: {self.old}"
            )
        return text.replace(self.old, self.new)


def mutants(folder: Path = ROOT / "tests" / "mutants") -> list[Mutant]:
    """Return the whole list."""
    entries = [entry for path in sorted(folder.glob("*.json")) for entry in json.loads(path.read_text("utf-8"))]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def faults(found: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Return what is wrong with the list beside the tree: texts that moved, tests that went, numbers used twice."""
    wrong: list[str] = []
    for mutant in found:
        try:
            mutant.applied((root / mutant.file).read_text("utf-8"))
        except (OSError, ValueError) as error:
            wrong.append(str(error))
        wrong += [
            f"{mutant.name}: no such file: {test}"
            for test in mutant.tests
            if not (root / test.partition("::")[0]).exists()
        ]
        if bool(mutant.switch) != mutant.file.startswith("native/") or (
            mutant.switch and f"ingot_mut({mutant.switch})" not in mutant.new
        ):
            wrong.append(f"{mutant.name}: expected native code, and only that, to ask ingot_mut of its switch")
        if not mutant.tests and not mutant.equivalent:
            wrong.append(f"{mutant.name}: expected tests, or why there can be none")
    for key in ("name", "switch"):
        values = [getattr(mutant, key) for mutant in found if getattr(mutant, key)]
        wrong += [f"{key} {value!r} is used twice" for value in sorted({v for v in values if values.count(v) > 1})]
    return wrong


def copy_tree(target: Path) -> None:
    """Copy what git tracks or would track, as it lies in the checkout; beside it ``shared``, where there is one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    models = ROOT.parent / "shared"
    if models.is_dir() and not (target.parent / "shared").exists():
        (target.parent / "shared").symlink_to(models)


def environment_of(tree: Path, place: Path) -> Path:
    """Make an environment that imports Ingot from a tree and all else from this one; return its interpreter.

    The packages are reached by a path: their own ``.pth`` files are not read, an editable Ingot among them.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "tree.pth").write_text("\n".join([str(tree / "src"), *others]) + "\n")
    return place / "bin" / "python"


def native_module() -> Path:
    """Return the file of the native module that this environment has built."""
    spec = importlib.util.find_spec("ingot._native")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def build(tree: Path, work: Path) -> None:
    """Compile a tree's native module, with the function that mutants ask, into its sources."""
    header = work / "ingot_mut.h"
    header.write_text(HEADER)
    environment = {**os.environ, "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -include {header}"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(work / "wheel"), str(tree)], check=True, env=environment)
    (wheel,) = (work / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("ingot/_native") and name.endswith(".so"))
        (tree / "src" / name).write_bytes(archive.read(name))


def run_tests(python: Path, tree: Path, tests: Iterable[str], switch: int = 0, *more: str) -> tuple[int, str]:
    """Run tests of a tree; return pytest's exit code (0 all passed, 1 some failed) and its output."""
    environment = {**os.environ, SWITCH: str(switch), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "2"}
    command = [str(python), "-m", "pytest", *FLAGS, *more, *dict.fromkeys(tests)]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"more than {SECONDS} s"
    return done.returncode, done.stdout + done.stderr


class Lab:
    """Copies of the tree, one for each thread, and one whose native code has all switches."""

    def __init__(self, work: Path, found: Sequence[Mutant], jobs: int) -> None:
        self._work = work
        self._free: SimpleQueue[tuple[Path, Path]] = SimpleQueue()
        for number in range(jobs if any(not mutant.switch for mutant in found) else 0):
            tree = self._copy(f"tree{number}")
            shutil.copy2(native_module(), tree / "src" / "ingot")
            self._free.put((environment_of(tree, work / f"python{number}"), tree))
        self._native = self._switched(found) if any(mutant.switch for mutant in found) else None

    def _copy(self, name: str) -> Path:
        tree = self._work / name
        copy_tree(tree)
        return tree

    def _switched(self, found: Sequence[Mutant]) -> tuple[Path, Path]:
        tree = self._copy("native")
        for mutant in found:
            if mutant.switch:
                path = tree / mutant.file
                path.write_text(mutant.applied(path.read_text("utf-8")), "utf-8")
        build(tree, self._work)
        return environment_of(tree, self._work / "python-native"), tree

    def unchanged(self, found: Sequence[Mutant], jobs: int) -> tuple[int, str]:
        """Run all named tests with no mutant switched on."""
        tests = [test for mutant in found for test in mutant.tests]
        more = ["-n", str(jobs)] if importlib.util.find_spec("xdist") else []
        if self._native is not None:
            return run_tests(*self._native, tests, 0, *more)
        python, tree = self._free.get()
        done = run_tests(python, tree, tests, 0, *more)
        self._free.put((python, tree))
        return done

    def run(self, mutant: Mutant) -> tuple[str, str, float]:
        """Return whether a mutant was ``killed``, ``lives`` or is ``broken``, the output, and the seconds it took."""
        started = time.monotonic()
        if mutant.switch:
            assert self._native is not None
            code, output = run_tests(*self._native, mutant.tests, mutant.switch)
        else:
            python, tree = self._free.get()
            path = tree / mutant.file
            text = path.read_text("utf-8")
            path.write_text(mutant.applied(text), "utf-8")
            code, output = run_tests(python, tree, mutant.tests)
            path.write_text(text, "utf-8")
            self._free.put((python, tree))
        state = "lives" if code == 0 else "killed" if code == 1 or code < 0 else "broken"  # < 0: a crash, by a signal
        return state, output, time.monotonic() - started


def main() -> int:
    """Run the list; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name, file or tests contain it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests unchanged first")
    options = parser.parse_args()
    every = mutants()
    if wrong := faults(every):
        print(*wrong, sep="\n")
        return 1
    chosen = [one for one in every if options.only in f"{one.name} {one.file} {' '.join(one.tests)}"]
    found = [one for one in chosen if not one.equivalent]
    if not found:
        print(f"expected a text that mutants' names, files or tests contain, found {options.only!r}")
        return 2
    with tempfile.TemporaryDirectory(prefix="ingot-mutants-") as folder:
        lab = Lab(Path(folder), found, options.jobs)
        if not options.skip_unchanged:
            code, output = lab.unchanged(found, options.jobs)
            if code:
                print(output[-4000:], "The tests do not pass unchanged.", sep="\n")
                return 1
        alive = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            for one, (state, output, seconds) in zip(found, pool.map(lab.run, found), strict=True):
                print(f"{state:7} {seconds:6.1f} s  {one.name} ({one.file})", flush=True)
                if state == "broken":
                    print(output[-2000:])
                alive += state != "killed"
    equivalent = len(chosen) - len(found)
    print(f"{len(found)} mutants: {len(found) - alive} killed, {alive} not; {equivalent} more are equivalent")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
