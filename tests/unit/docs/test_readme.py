"""The README, and the tour, done: every command and every block of Python, in order, as after ``make demo``."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError

ROOT = Path(__file__).resolve().parents[3]


def blocks_of(page: Any, language: str) -> list[str]:
    return [block.text for block in page.blocks if block.language == language]


@pytest.fixture
def toured(after_demo: Path, tour_page: Any, reader: Callable[[], Any]) -> Path:
    """The folder after all commands of the tour, each of which did what the page says."""
    pytest.importorskip("obstore")
    done = reader()
    done.read(tour_page, ("console", "toml"))
    assert done.compared >= 40
    return after_demo


def test_the_tour_does_what_it_says(toured: Path, check_docs: ModuleType, tour_page: Any) -> None:
    """The commands, and after them the blocks of Python."""
    assert len(check_docs.tour(tour_page)) >= 8
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
    blocks = blocks_of(tour_page, "python")
    assert len(blocks) >= 2
    program = "\n".join([*blocks, "assert layer is None  # what follows the layers comes last"])
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (toured / "again.safetensors").is_file()
    assert ingot.compare("model-int4.zt", "again.safetensors").same


def test_what_the_readme_shows_is_in_the_tour(check_docs: ModuleType, readme: Any, tour_page: Any) -> None:
    def called(page: Any) -> list[list[str]]:
        return [shlex.split(line, comments=True) for line, _ in check_docs.tour(page)]

    assert len(called(readme)) >= 9
    assert not [line for line in called(readme) if line not in called(tour_page)]


def test_the_first_page_stays_short(readme: Any) -> None:
    assert len(readme.path.read_text("utf-8").splitlines()) <= 120


def test_ingot_alone_shows_the_six_jobs(
    check_docs: ModuleType, readme: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([]) == 0
    told = capsys.readouterr().out.splitlines()
    jobs = re.findall(r"^\*\*(.+?)\.\*\*", readme.prose.partition("## Six jobs")[2], re.MULTILINE)
    assert len(jobs) == 6
    assert [line.rstrip(":") for line in told[:-1:2]] == jobs
    commands = [line.strip() for line in told[1:-1:2]]
    assert [check_docs.parse_command(command) for command in commands] == [None] * 6
    assert told[-1].endswith("ingot --help")


def test_the_sizes_of_a_large_model_are_those_of_a_plan(readme_figures: ModuleType) -> None:
    stated = json.loads((ROOT / "bench" / "published.json").read_text("utf-8"))["sizes"]
    assert readme_figures.sizes(("bf16", "int8")) == {name: stated[name] for name in ("bf16", "int8")}


def test_the_sizes_in_the_demo_table_are_those_of_today(
    after_demo: Path, check_docs: ModuleType, tour_page: Any
) -> None:
    """Every run of the demo has its row; sizes from the plan alone, where it knows them."""
    from ingot.conversion.run import prepare
    from ingot.demo.run import RUNS

    table = check_docs.marked(tour_page.path.read_text("utf-8"), "demo")
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
