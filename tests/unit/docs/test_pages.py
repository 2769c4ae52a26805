"""Pages for those who choose, or come from other programs: every command of ours runs, in the pages' order."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["choosing", "coming-from"])
def test_every_command_of_a_page_runs(name: str, reader: Callable[..., Any], check_docs: ModuleType) -> None:
    for needed in ("torch", "transformers", "mlx_lm"):
        pytest.importorskip(needed)
    page = check_docs.read(DOCS / f"{name}.md")
    for block in page.blocks:
        if block.language == "toml":
            Path("w4a16.toml").write_text(block.text)
    shown = [(line, text) for line, text in check_docs.commands(page) if check_docs.parse_command(text) is None]
    assert len(shown) >= 15
    for block in page.blocks:
        lines = enumerate(block.text.splitlines(), block.line + 1)
        shown += [(line, text[2:]) for line, text in lines if re.match(r"\$ (?!ingot )", text)]
    reading = reader()
    for _, text in sorted(shown, key=lambda item: item[0]):
        assert reading.execute(text) == 0, text


def test_the_site_tells_of_every_name_that_ingot_has() -> None:
    told = re.findall(r"^\.\. auto\w+:: ingot\.(\w+)$", (DOCS / "site" / "api.rst").read_text("utf-8"), re.MULTILINE)
    assert set(ingot.__all__) <= {*told, "IngotError"}  # which is among those of ingot.errors
    assert len(told) == len(set(told))
