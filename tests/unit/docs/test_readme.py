"""What the README and the pages say of themselves; ``test_tutorials.py`` does what they say."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = (page for folder in ("start", "tutorials", "howto") for page in sorted((DOCS / folder).glob("*.md")))
FOLLOWED = ["tour.md", *(page.relative_to(DOCS).as_posix() for page in PAGES)]


def blocks_of(page: Any, language: str) -> list[str]:
    return [block.text for block in page.blocks if block.language == language]


def test_the_first_commands_install_ingot_and_its_demo(readme: Any) -> None:
    """A test installs nothing; what the command names is there, and brings the model of ``ingot demo``."""
    (install,) = blocks_of(readme, "sh")
    words = shlex.split(install, comments=True)
    assert words == ["pip", "install", ".[gguf]", "./demo"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "gguf" in project["optional-dependencies"]
    distribution = tomllib.loads((ROOT / "demo" / "pyproject.toml").read_text("utf-8"))["project"]
    assert any(line.startswith(distribution["name"]) for line in project["optional-dependencies"]["demo"])


@pytest.mark.parametrize("page", FOLLOWED)
def test_a_page_names_the_extras_of_its_commands(page: str, check_docs: ModuleType) -> None:
    document = check_docs.read(DOCS / page)
    lines = [line for line, _ in check_docs.tour(document)]
    needs = {
        "gguf": any(re.search(r"\.gguf|--format gguf", line) for line in lines),
        "transformers": any(re.match(r"ingot (?:eval|generate|sweep|calibrate) ", line) for line in lines),
        "remote": any("python -m tests.support.web" in block.text for block in document.blocks),
    }
    for extra, needed in needs.items():
        assert not needed or re.search(rf"extras?\b[^.]*`{extra}`", document.prose), extra


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
