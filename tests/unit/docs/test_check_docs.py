"""The checker of the documents finds faults that are put before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def page(tmp_path: Path, check_docs: ModuleType):
    """Write a page and return it as the checker sees it."""

    def write(text: str):
        path = tmp_path / "page.md"
        path.write_text(text, "utf-8")
        return check_docs.read(path)

    return write


def test_blocks_are_told_from_prose(page):
    document = page("a `b`\n\n- item\n\n  ```python\n  x = 1\n  ```\n\n````text\n```\n````\n`c`\n")
    assert [(block.language, block.text, block.line) for block in document.blocks] == [
        ("python", "x = 1\n", 5),
        ("text", "```\n", 9),
    ]
    assert list(document.spans()) == [(1, "b"), (12, "c")]


@pytest.mark.parametrize(
    ("link", "faulty"),
    [
        ("page.md", False),
        ("page.md#a-b-c", False),
        ("#a-b-c", False),
        ("https://example.org/nowhere", False),
        ("gone.md", True),
        ("page.md#gone", True),
        ("#gone", True),
    ],
)
def test_links(page, check_docs, link, faulty):
    assert bool(list(check_docs.check_links(page(f"# A `b`, c\n\n[x]({link})\n")))) is faulty


@pytest.mark.parametrize(
    ("text", "faulty"),
    [
        ("`src/a.py`", False),
        ("`src/*.py`", False),
        ("`bench/results`", False),
        ("`tests/<format>/valid`", False),
        ("`src/b.py`", True),
        ("`make all`", False),
        ("`make gone`", True),
        ("```sh\nmake gone\n```", True),
        ("```sh\nmake all X=1   # words\n```", False),
    ],
)
def test_paths_and_targets(page, check_docs, tmp_path, text, faulty):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").touch()
    (tmp_path / "Makefile").write_text("all: x\n\ttouch x\n")
    assert bool(list(check_docs.check_paths(page(text), tmp_path))) is faulty


@pytest.mark.parametrize(
    ("command", "faulty"),
    [
        ("ingot --version", False),
        ("ingot --debug verify a.zt", False),
        ("ingot convert a.safetensors b.zt --recipe int4 --max-ram 2GiB   # words", False),
        ("ingot convert a b \\\n  --resume", False),
        ("ingot convert --help", False),
        ("ingot inspect a.zt --json | head > out.json", False),
        ("ingot --nope verify a.zt", True),
        ("ingot smelt a.zt", True),
        ("ingot convert", True),
        ("ingot convert a b c", True),
        ("ingot convert a b --recpie int4", True),
        ("ingot compare a b --top many", True),
    ],
)
def test_commands(page, check_docs, command, faulty):
    assert bool(list(check_docs.check_commands(page(f"```sh\n{command}\n```\n")))) is faulty
    assert bool(list(check_docs.check_commands(page(f"```console\n$ {command}\n```\n")))) is faulty
    assert not list(check_docs.check_commands(page(f"```console\n{command}\n```\n```text\n{command}\n```\n")))


def test_inline_commands_may_leave_out_arguments_but_not_invent_options(page, check_docs):
    assert not list(check_docs.check_commands(page("`ingot convert --recipe int4` and `ingot convert SRC [--x]`")))
    assert list(check_docs.check_commands(page("`ingot convert --recpie int4`")))


@pytest.mark.parametrize(
    ("text", "faulty"), [("```python\nx = 1\n```", False), ("```python\nx =\n```", True), ("```toml\nx\n```", True)]
)
def test_blocks_compile(page, check_docs, text, faulty):
    assert bool(list(check_docs.check_blocks(page(text)))) is faulty


SOURCE = """
def f(codec):
    refuse("zt.helper", "zt.file.py")
    raise FormatError("zt.direct", "words")
    raise UsageError("words", rule="save.keyword")
    raise CodecError(f"{codec}.suffix", "words")
    yield Finding("note", "part.note", "where", "words [ram.told]")
    open("model.safetensors")
"""
PAGE = "`zt.helper` `zt.direct` `save.keyword` `dense.suffix` `part.note` `ram.told` `cbor.native` `zt.md`"


@pytest.fixture
def project(tmp_path: Path, check_docs: ModuleType):
    """A project with one rule of each kind, all on a page; returns a function from a page's text to the faults."""
    for folder in ("src", "native", "spec"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "a.py").write_text(SOURCE)
    (tmp_path / "native" / "a.cc").write_text('throw Error("cbor.native", 1, "words");')

    def faults(text: str) -> list[str]:
        (tmp_path / "spec" / "page.md").write_text(text)
        return list(check_docs.check_rules(tmp_path))

    return faults


def test_rules_that_agree(project):
    assert project(PAGE) == []


@pytest.mark.parametrize("rule", [word.strip("`") for word in PAGE.split()[:-1]])
def test_a_rule_on_no_page(project, rule):
    (fault,) = project(PAGE.replace(f"`{rule}`", ""))
    assert rule.partition(".")[2] in fault


def test_a_rule_in_no_source(project):
    (fault,) = project(f"{PAGE} `zt.gone` `unknown-family.x`")
    assert "zt.gone" in fault


def test_marked_parts_are_replaced(check_docs):
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert check_docs.marked(text, "x") == "old"
    assert check_docs.replace_marked(text, "x", r"new \1") == "a\n<!-- x -->\nnew \\1\n<!-- /x -->\nb\n"
    assert check_docs.marked(text, "y") is None


def test_versions(check_docs, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "9.9.9"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [9.9.8] - unreleased\n")
    assert len(list(check_docs.check_version(tmp_path))) == 2


@pytest.mark.parametrize(
    ("name", "text", "faulty"),
    [
        ("README.md", "# Fragments\n\nMore.\n", False),
        ("38.fixed.md", "It works.\n", False),
        ("38.fixed.1.md", "It works.\n", False),
        ("+gguf-names.added.md", "It works.\n", False),
        ("38.broken.md", "It works.\n", True),
        ("gguf.added.md", "It works.\n", True),
        ("38.fixed.txt", "It works.\n", True),
        ("38.fixed.md", "", True),
        ("38.fixed.md", "It works.\n\nAnd more.\n", True),
    ],
)
def test_fragments_of_the_changelog(check_docs, tmp_path, name, text, faulty):
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / name).write_text(text)
    assert bool(list(check_docs.check_fragments(tmp_path))) is faulty


def test_what_the_site_leads_to(check_docs, tmp_path):
    (tmp_path / "docs/site").mkdir(parents=True)
    (tmp_path / "docs/site/conf.py").write_text(
        '_LEADS = {"README": ("docs/a", "docs/twice", "docs/twice", "spec/gone")}'
    )
    for name in ("a", "twice", "left-out"):
        (tmp_path / f"docs/{name}.md").touch()
    faults = [fault.partition("leads to ")[2] for fault in check_docs.check_site(tmp_path)]
    assert faults == [
        "docs/left-out 0 times, expected once",
        "docs/twice 2 times, expected once",
        "spec/gone, which is not there",
    ]


def test_tests_that_are_named(check_docs, tmp_path):
    for folder in ("spec", "tests", "src/ingot/testing"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/ingot/testing/suites.py").write_text("class Suite:\n    def test_shared(self): ...\n")
    (tmp_path / "tests/test_a.py").write_text(
        "def test_one(): ...\n\nclass TestMine(Suite):\n    def test_own(self): ...\n"
    )
    named = ("test_one", "test_one[a.b+c d]", "TestMine::test_own", "TestMine::test_shared")
    gone = ("test_two", "TestMine::test_one", "TestOther::test_own", "test_own")
    rows = [f"| 1 | x | tests/test_a.py::{name} | — |" for name in (*named, *gone)]
    (tmp_path / "spec/conformance.md").write_text("\n".join([*rows, "| 2 | x | tests/test_b.py::test_one | — |"]))
    faults = list(check_docs.check_named_tests(tmp_path))
    assert [fault.rpartition(" ")[2] for fault in faults] == [
        *(f"tests/test_a.py::{name}" for name in gone),
        "tests/test_b.py::test_one",
    ]


@pytest.mark.slow
def test_every_named_test_can_be_run(check_docs):
    """With its parameters: pytest collects each, or says that there is none."""
    named = list(dict.fromkeys(check_docs.named_tests(check_docs.ROOT)))
    assert len(named) > 100
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, *named]
    done = subprocess.run(command, cwd=check_docs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
