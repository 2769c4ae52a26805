"""Files for contributors and for the forge: workflows, forms, hooks, and the length of the pages."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def scripts() -> list[Path]:
    """Return the Python files that no package imports and no type checker reads."""
    folders = (ROOT / name for name in ("tools", "bench", "tests/fuzz", "tests/damage", "tests/mutants"))
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def is_in(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts_import_names_that_ingot_has(script: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(script.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    named = [(node.module, alias.name) for node in imports if node.module for alias in node.names]
    assert [
        f"{module}.{name}" for module, name in named if module.split(".")[0] == "ingot" and not is_in(module, name)
    ] == []


def load(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")  # a dependency of huggingface_hub
    return yaml.safe_load(path.read_text("utf-8"))


def test_each_action_has_one_commit_in_all_workflows() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for line in re.findall(r"uses: (.+)", path.read_text("utf-8")):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), f"{path.name}: {line}"
            pins.setdefault(line.partition("@")[0], set()).add(line)
    assert {"actions/checkout", "actions/setup-python"} <= set(pins)
    assert [lines for lines in pins.values() if len(lines) > 1] == []


def test_the_tests_run_on_each_python_and_platform() -> None:
    workflow = load(GITHUB / "workflows" / "test.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request", "schedule"} <= set(workflow[True])  # YAML 1.1 reads `on` as true
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14", "3.14t"]
    assert matrix["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"]
    assert set(workflow["jobs"]) == {"check", "test", "slow", "newest", "minimum"}
    for name in ("slow", "newest", "minimum"):
        assert "schedule" in workflow["jobs"][name]["if"]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(not step["with"]["persist-credentials"] for step in steps if "checkout" in step.get("uses", ""))


def test_commands_of_the_workflows_name_files_and_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = 0
    for path in WORKFLOWS:
        text = path.read_text("utf-8")
        for name in re.findall(r"(?:tools|tests)/[\w/.-]+", text):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
            named += 1
        for words in re.findall(r"run: make (.+)", text):
            assert {word for word in words.split() if "=" not in word} <= targets, f"{path.name}: {words}"
    assert named > 5


def requirements(*arguments: str) -> list[str]:
    command = [sys.executable, str(ROOT / "tools" / "requirements.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_newest_versions_are_requirements_without_versions() -> None:
    declared, newest = requirements("core", "test"), requirements("--newest", "core", "test")
    assert len(newest) == len(declared)
    assert not [line for line in newest if re.search(r"[<>=]", line.partition(";")[0])]
    assert [line.partition(";")[2] for line in newest] == [line.partition(";")[2] for line in declared]
    assert any(line.startswith("mlx[cpu];") for line in newest)


def test_issue_forms_have_what_the_forge_requires() -> None:
    forms = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
    assert len(forms) >= 2
    for path in forms:
        form = load(path)
        assert {"name", "description", "body"} <= set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all(field["attributes"]["label"] for field in fields)
        assert len({field["id"] for field in fields}) == len(fields) > 0
    assert "blank_issues_enabled" in load(GITHUB / "ISSUE_TEMPLATE" / "config.yml")


def test_hooks_before_a_commit_use_pinned_programs() -> None:
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "pygrep" or hook["entry"].startswith(".venv/bin/")
    (subject,) = (hook["entry"] for hook in repository["hooks"] if hook["language"] == "pygrep")
    assert not re.search(subject, f"{'x' * 72}\n\n{'x' * 90}\n")
    assert re.search(subject, f"{'x' * 73}\n")


@pytest.mark.parametrize(("page", "lines"), [("CONTRIBUTING.md", 50), ("CHANGELOG.md", 80)])
def test_a_page_is_short(page: str, lines: int) -> None:
    text = (ROOT / page).read_text("utf-8")
    newest = text.partition("## [")[2].partition("\n## [")[0] if page == "CHANGELOG.md" else text
    assert 10 < len(newest.splitlines()) <= lines


def test_types_of_fragments_are_those_of_towncrier(check_docs: Any, tmp_path: Path) -> None:
    (tmp_path / "changelog.d").mkdir()
    for section in PROJECT["tool"]["towncrier"]["type"]:
        (tmp_path / "changelog.d" / f"1.{section['directory']}.md").write_text("It works.\n")
    assert len(PROJECT["tool"]["towncrier"]["type"]) == 5
    assert list(check_docs.check_fragments(tmp_path)) == []
