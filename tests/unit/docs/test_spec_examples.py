"""The Python on the pages of formats runs as it stands there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

SPEC = Path(__file__).resolve().parents[3] / "spec"
PAGES = ("wdelta.md", "zt.md")


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(check_docs: ModuleType, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in check_docs.read(SPEC / page).blocks if block.language == "python"]
    assert blocks
    for block in blocks:
        exec(compile("\n" * block.line + block.text, page, "exec"), {})
