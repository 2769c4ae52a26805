"""Pages, done as a reader does them: each in an empty folder, and all of them in one, in the order of reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
FIRST = ("README", "docs/tour")
MODELS = {"README", "docs/tour", "docs/tutorials/quantize", "docs/howto/run", "docs/howto/sweep"}  # compute, with torch
SLOW = MODELS | {"docs/tutorials/fine-tunes", "docs/tutorials/adapters"}
PAGES = [
    *FIRST,
    *(
        path.relative_to(ROOT).with_suffix("").as_posix()
        for folder in ("start", "tutorials", "howto")
        for path in sorted((DOCS / folder).glob("*.md"))
    ),
]


def done(name: str, reader: Callable[..., Any], check_docs: ModuleType) -> Any:
    reading = reader(0.02 if name in MODELS else 0.0)
    reading.read(check_docs.read(ROOT / f"{name}.md"))
    reading.stop()
    return reading


@pytest.mark.parametrize("name", [name for name in PAGES if name not in SLOW])
def test_a_page_does_what_it_says(name: str, reader: Callable[..., Any], check_docs: ModuleType) -> None:
    if "remote" in name:
        pytest.importorskip("obstore")
    assert done(name, reader, check_docs).compared >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_long_page_does_what_it_says(name: str, reader: Callable[..., Any], check_docs: ModuleType) -> None:
    for needed in ("torch", "transformers", "mlx_lm", "obstore") if name in MODELS else ():
        pytest.importorskip(needed)
    reading = done(name, reader, check_docs)
    assert reading.compared >= 10 or name == "README"
    assert reading.ran >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_pages_work_one_after_the_other_in_one_folder(reader: Callable[..., Any], check_docs: ModuleType) -> None:
    for needed in ("torch", "transformers", "mlx_lm", "obstore"):
        pytest.importorskip(needed)
    for name in PAGES:
        assert done(name, reader, check_docs).ran >= 2


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("```console\n$ ingot --version\n```", True),
        ("```console\n$ ingot --version   # exit code 1\n```", False),
        ("```console\n$ echo one two three\none\n  two three\n```", True),
        ("```console\n$ echo one two three\none two four\n```", False),
        ("```console\n$ echo one two three\ntwo three\n```", False),
        ("```console\n$ echo one two three\n...\nthree\n```", True),
        ("```console\n$ echo one two three\none two\n```", False),
        ("```console\n$ echo one two three\none\n...\n```", True),
        ("```console\n$ echo one two three\n...\nthree\n...\ntwo\n...\n```", False),
        ("```console\n$ ingot verify gone    # exit code 2\nerror:\n...\n```", True),
        ("```console\n$ ls gone\n```", False),
        ("```python\nx = 1\n```\n```python\nprint(x + 1.004)\n```\n```text\n2.0\n```", True),
        ("```python\nprint(2.5)\n```\n```text\n2.0\n```", False),
        ("`a.toml`:\n\n```toml\nx = 1\n```\n```console\n$ cat a.toml\nx = 1\n```", True),
    ],
)
def test_a_page_is_held_to_what_it_shows(
    text: str, right: bool, reader: Callable[..., Any], check_docs: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(text)
    reading, page = reader(0.01), check_docs.read(tmp_path / "page.md")
    if right:
        reading.read(page)
        return
    with pytest.raises(AssertionError):
        reading.read(page)
