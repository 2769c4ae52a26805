"""The tutorial shows the example plugin's files as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent
PAGE = SOURCE.parents[1] / "docs" / "developing" / "plugin.md"


@pytest.mark.parametrize("file", ["pyproject.toml", "codec.py", "format.py", "command.py", "runtime.py"])
def test_page_shows_the_file(file: str) -> None:
    path = SOURCE / file if file == "pyproject.toml" else SOURCE / "ingot_example" / file
    blocks = re.findall(r"^```\w+\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert path.read_text("utf-8") in blocks
