"""The checker of words finds forbidden names and phrases, and nothing in good text."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Project = Callable[[str, str], list[tuple[str, int, str]]]


@pytest.fixture
def check(tmp_path: Path, check_words: ModuleType) -> Project:
    """Write a file of a project; return its hits as rule, line and text."""

    def hits(name: str, text: str) -> list[tuple[str, int, str]]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        assert check_words.files(tmp_path) == [path]
        return [(hit.rule, hit.line, hit.text) for hit in check_words.hits_of(path, tmp_path)]

    return hits


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "found: int",
        "_found = 1",
        "found_ = 1",
        "FOUND = 1",
        "a, *found = b",
        "a.found = 1",
        "def found(): ...",
        "async def found(): ...",
        "class Found: ...",
        "def f(found): ...",
        "def f(*found): ...",
        "def f(*, found=1): ...",
        "f = lambda found: 1",
        "a = [1 for found in b]",
        "if (found := f()): ...",
        "import a as found",
        "from a import b as found",
        "with a as found: ...",
        "try: ...\nexcept E as found: ...",
        "match a:\n    case [1, *found]: ...",
        "match a:\n    case {'b': found}: ...",
    ],
)
def test_a_forbidden_name_in_python(check: Project, code: str) -> None:
    assert [(rule, text.strip("_").lower()) for rule, _, text in check("src/ingot/a.py", code)] == [("name", "found")]


@pytest.mark.parametrize(
    "code",
    [
        "found_layout = 1",
        "kept_bytes = 1",
        "def founder(): ...",
        "a = found",
        "np.where(a)",
        "f(where=1)",
        "import found",
        "a = {'found': 1}",
    ],
)
def test_a_longer_name_and_a_use_are_allowed(check: Project, code: str) -> None:
    assert check("src/ingot/a.py", code) == []


def test_the_name_of_a_module_or_of_a_package_is_checked(check: Project, tmp_path: Path) -> None:
    assert check("src/ingot/many.py", "") == [("name", 1, "many")]
    (tmp_path / "src/ingot/many.py").unlink()
    assert check("src/ingot/kinds/__init__.py", "") == [("name", 1, "kinds")]


@pytest.mark.parametrize(
    "code",
    [
        "int at = 1;",
        "const std::size_t at = f();",
        "void f(const float* __restrict at, int n);",
        "for (const auto& at : items) {}",
        "const __m256i at = g();",
        "Layout at;",
        "struct At {",
        "enum class At {",
        "auto [n, at] = f();",
        "std::vector<int> at(3);",
    ],
)
def test_a_forbidden_name_in_c(check: Project, code: str) -> None:
    assert [(rule, line, text.lower()) for rule, line, text in check("native/core/a.cc", f"\n{code}\n")] == [
        ("name", 2, "at")
    ]


@pytest.mark.parametrize(
    "code", ["int format = 1;", "return at;", "f(at, 1);", "// int at = 1;", 'f("int at = 1;");', "a.at(1);"]
)
def test_a_longer_name_and_a_use_in_c_are_allowed(check: Project, code: str) -> None:
    assert check("native/core/a.h", code) == []


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("src/ingot/a.py", '"""Good.\n\nHere the caller is\ntold by nobody."""\n', 4),
        ("src/ingot/a.py", "\n# Here the caller is\n# told by nobody.\n", 3),
        ("src/ingot/a.py", "f('{} is told by nobody')\n", 1),
        ("src/ingot/a.py", "f(f'{a} is told by nobody')\n", 1),
        ("src/ingot/a.py", "f(f'{a} is ' f'told by nobody')\n", 1),
        ("native/core/a.cc", "int n;\n// Here the caller is\n// told by nobody.\n", 3),
        ("native/core/a.cc", 'f("it is told by nobody");\n', 1),
        ("docs/a.md", "# Title\n\nHere the caller is\ntold by nobody.\n", 4),
        ("README.md", "- is told by nobody\n", 1),
    ],
)
def test_phrases_are_found_in_docstrings_comments_messages_and_pages(
    check: Project, name: str, code: str, line: int
) -> None:
    assert sorted((rule, line_) for rule, line_, _ in check(name, code)) == [("is told", line), ("somebody", line)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("docs/a.md", "```text\nwhat is told by nobody\n```\n\n  ```sh\n  # who is told\n  ```\n"),
        ("src/ingot/a.py", "is_told = nobody\n"),
        ("src/ingot/a.py", '"""Return the offset. Of course it is aligned. What is it? Here is what it does."""\n'),
        ("docs/a.md", "| Where | What |\n| --- | --- |\n| a | b |\n"),
    ],
)
def test_good_text_has_no_hits(check: Project, name: str, code: str) -> None:
    assert check(name, code) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("begins with Of", "Of a tensor the beginning is read."),
        ("begins with Of", "Good. Of a tensor the beginning is read."),
        ("begins with What, Where or Who", "## What lies there"),
        ("begins with What, Where or Who", "Good. Where it is compressed, it is decoded."),
        ("who without a noun", "whoever reads"),
        ("who without a noun", "for who reads it"),
        ("somebody", "nobody reads it"),
        ("is told", "it tells whether the file is complete"),
        ("knows", "it knows no hardware"),
        ("so many", "reads so many bytes"),
        ("the like", "chunks and the like"),
        ("errors as", "errors as ``read``"),
        ("as there", "as of ``begin``"),
        ("as it lies", "moved as it lies"),
        ("beside", "files beside it"),
        ("those that", "those that fit and those of the base"),
        ("of which it is", "the kind of which it is"),
        ("found none", "expected a folder, found none"),
    ],
)
def test_each_phrase(check: Project, check_words: ModuleType, rule: str, text: str) -> None:
    assert rule in check_words.PHRASES
    assert [hit[0] for hit in check("docs/a.md", f"{text}\n")] == [rule]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of two commits with one hit, which is allowed."""
    (tmp_path / "src/ingot/core").mkdir(parents=True)
    (tmp_path / "src/ingot/core/a.py").write_text("found = 1\n")
    (tmp_path / "tools").mkdir()

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@localhost", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "x" * 100)  # before the check began
    packages = {"src/ingot/core": {"names": 1, "phrases": 0}}
    settings = {"commits_after": git("rev-parse", "HEAD"), "packages": packages}
    (tmp_path / "tools/words_allowed.json").write_text(json.dumps(settings))
    git("commit", "--allow-empty", "-m", "y" * 72)
    return tmp_path


def test_as_many_hits_as_are_allowed_pass(
    project: Path, check_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_words.main([], project) == 0
    assert capsys.readouterr().out == "1 hits, 0 faults\n"


def test_one_more_hit_fails_in_any_package(
    project: Path, check_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "src/ingot/core/b.py").write_text("kind = 1\n")
    assert check_words.main([], project) == 1
    assert "src/ingot/core: 2 names, 1 allowed" in capsys.readouterr().out
    (project / "src/ingot/core/b.py").rename(project / "src/ingot/b.py")
    assert check_words.main([], project) == 1
    assert "src/ingot: 1 names, 0 allowed" in capsys.readouterr().out
    assert check_words.main([str(project / "src/ingot/b.py")], project) == 0
    assert "src/ingot/b.py:1: name: kind" in capsys.readouterr().out


def test_fewer_hits_pass_and_the_number_is_lowered(
    project: Path, check_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "src/ingot/core/a.py").write_text("layout = 1\n")
    assert check_words.main([], project) == 0
    assert "src/ingot/core: 0 names, 1 allowed" in capsys.readouterr().out
    assert check_words.main(["--write"], project) == 0
    assert json.loads((project / "tools/words_allowed.json").read_text())["packages"] == {}


def test_hits_may_move_to_another_package_but_their_total_does_not_rise(
    project: Path, check_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (project / "tools/words_allowed.json").read_text()
    (project / "src/ingot/b.py").write_text("kind = 1\n")
    assert check_words.main(["--write"], project) == 1
    assert "2 names in all packages, 1 allowed" in capsys.readouterr().out
    assert (project / "tools/words_allowed.json").read_text() == before
    (project / "src/ingot/core/a.py").unlink()
    assert check_words.main(["--write"], project) == 0
    assert check_words.main([], project) == 0


def test_a_subject_of_73_characters_fails(
    project: Path, check_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["git", "-C", str(project), "-c", "user.name=A", "-c", "user.email=a@localhost"]
    subprocess.run([*command, "commit", "--allow-empty", "-m", "z" * 73], check=True, capture_output=True)
    assert check_words.main([], project) == 1
    out = capsys.readouterr().out
    assert "subject of 73 characters" in out
    assert out.count("subject of") == 1


def test_the_words_are_those_of_the_glossary(check_words: ModuleType) -> None:
    assert {"found", "kind", "where", "at", "begun"} <= check_words.FORBIDDEN
    assert not {"other", "done", "offset"} & check_words.FORBIDDEN  # words of the field
    assert len(check_words.PHRASES) == 15
