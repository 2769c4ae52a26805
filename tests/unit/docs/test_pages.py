"""Pages for those who choose, or come from other programs: every command of ours runs, in the pages' order."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import ingot
from ingot.cli.main import run

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["choosing", "coming-from"])
def test_every_command_of_a_page_runs(name: str, after_demo: Path, check_docs: ModuleType) -> None:
    for needed in ("torch", "transformers", "mlx_lm"):
        pytest.importorskip(needed)
    page = check_docs.read(DOCS / f"{name}.md")
    for folder in ("model", "tuned"):
        shutil.copytree("ingot-demo/original", folder)
    for block in page.blocks:
        if block.language == "toml":
            Path("w4a16.toml").write_text(block.text)
    shown = [text for _, text in check_docs.commands(page) if check_docs.parse_command(text) is None]
    assert len(shown) >= 15
    for text in shown:
        assert run(check_docs.shlex.split(text, comments=True)[1:]) == 0, text


def test_the_site_tells_of_every_name_that_ingot_has() -> None:
    told = re.findall(r"^\.\. auto\w+:: ingot\.(\w+)$", (DOCS / "site" / "api.rst").read_text("utf-8"), re.MULTILINE)
    assert set(ingot.__all__) <= {*told, "IngotError"}  # which is among those of ingot.errors
    assert len(told) == len(set(told))
