"""The README's tour, done: every command and every block of Python, in order, as after ``make demo``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError


def blocks_of(readme: Any, language: str) -> list[str]:
    return [block.text for block in readme.blocks if block.language == language]


def execute(line: str) -> int:
    """Run a line; one with a ceiling of memory in a process of its own, for this one holds what all tests left."""
    arguments = shlex.split(line, comments=True)[1:]
    if "--max-ram" not in arguments:
        return run(arguments)
    return subprocess.run([sys.executable, "-m", "ingot", *arguments], check=False).returncode


@pytest.fixture
def toured(after_demo: Path, check_docs: ModuleType, readme: Any, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder after all commands of the tour.

    Each returned the exit code that the README gives, 0 if none, and printed, in this order, the lines that a console
    block shows under it, up to an ellipsis.
    """
    (recipe,) = blocks_of(readme, "toml")
    (after_demo / "mine.toml").write_text(recipe)
    shown: dict[str, list[str]] = {}
    for block in blocks_of(readme, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                shown[line] = []
            elif line.strip() != "...":
                shown[next(reversed(shown))].append(line)
    for line, code in check_docs.tour(readme):
        assert execute(line) == code, line
        wanted = shown[f"$ {line}"]
        assert capsys.readouterr().out.splitlines()[: len(wanted)] == wanted
    assert sum(map(len, shown.values())) >= 4
    return after_demo


def test_the_tour_does_what_it_says(toured: Path, check_docs: ModuleType, readme: Any) -> None:
    """The commands, and after them the blocks of Python."""
    assert len(check_docs.tour(readme)) >= 8
    assert {
        "model-int4.zt",
        "back.safetensors",
        "small",
        "mixed",
        "model.squizd",
        "moved.zt",
        "squish",
        "up-m1.zt",
    } <= {path.name for path in toured.iterdir()}
    assert not [path for path in toured.rglob("*") if "ingot-partial" in path.name]
    for needed in ("torch", "transformers", "mlx_lm"):
        pytest.importorskip(needed)
    blocks = blocks_of(readme, "python")
    assert len(blocks) >= 2
    program = "\n".join([*blocks, "assert layer is None  # what follows the layers comes last"])
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (toured / "again.safetensors").is_file()
    assert ingot.compare("model-int4.zt", "again.safetensors").same


def test_the_sizes_in_the_demo_table_are_those_of_today(after_demo: Path, check_docs: ModuleType, readme: Any) -> None:
    """Every run of the demo has its row; sizes from the plan alone, where it knows them."""
    from ingot.demo.run import RUNS
    from ingot.ops.convert.convert import prepare

    table = check_docs.marked(readme.path.read_text("utf-8"), "demo")
    rows = {tuple(line.split()[:2]): line for line in table.splitlines()[2:-1]}
    assert set(rows) == {("(original)", ".safetensors"), *RUNS}
    for (recipe, suffix), line in rows.items():
        if recipe in ("(original)", "lossless", "lossless-max", "tca-tbe"):
            continue  # a plan knows the most that these take
        with prepare("ingot-demo/original/model.safetensors", f"x{suffix}", recipe, None) as prepared:
            assert f"{prepared.plan.size / 2**20:.2f} MiB" in line


def test_what_the_limits_say(after_demo: Path) -> None:
    """Containers that are said to be recognised and refused by name are."""
    for head, rule in ((b"\x80\x02", "detect.pickle"),):
        Path("x.bin").write_bytes(head + bytes(64))
        with pytest.raises(IngotError) as caught:
            ingot.open("x.bin")
        assert caught.value.rule == rule
