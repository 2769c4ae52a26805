"""The workflow that builds and publishes wheels runs nowhere here: its promises are held, and what is packed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
TEXT = WORKFLOW.read_text("utf-8")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")  # of huggingface_hub
    return dict(yaml.safe_load(TEXT)["jobs"])


def test_every_action_is_pinned_to_a_commit_whose_version_is_said() -> None:
    uses = re.findall(r"uses: (.+)", TEXT)
    assert len(uses) >= 8
    for line in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    assert len({line.partition("@")[0] for line in uses}) == len(set(uses))  # one commit of each


def test_programs_are_pinned() -> None:
    runs = re.findall(r"pipx run (\S+)", TEXT)
    assert len(runs) == 3
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", name) for name in runs), runs


def test_only_the_job_that_publishes_may_prove_who_it_is(jobs: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(TEXT)["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert "secrets." not in TEXT
    assert "password" not in TEXT


def test_what_is_published_was_built_and_tried(jobs: dict[str, Any]) -> None:
    assert sorted(jobs["publish"]["needs"]) == ["sdist", "wheels"]
    for name in jobs["publish"]["needs"]:
        assert any("upload-artifact" in step.get("uses", "") for step in jobs[name]["steps"]), name
    assert not any("upload-artifact" in step.get("uses", "") for step in jobs["windows"]["steps"])
    assert jobs["windows"]["if"] == "github.event_name == 'workflow_dispatch'"
    settings = PROJECT["tool"]["cibuildwheel"]
    for command in (settings["test-command"], jobs["sdist"]["steps"][2]["run"]):
        (script,) = re.findall(r"tools/\w+\.py", command)
        assert (ROOT / script).is_file()


def test_code_of_others_checks_out_without_credentials(jobs: dict[str, Any]) -> None:
    checkouts = [step for job in jobs.values() for step in job["steps"] if "actions/checkout" in step.get("uses", "")]
    assert len(checkouts) == 3
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_wheels_are_of_the_pythons_that_are_declared() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert settings["build"] == ["cp311-*", "cp312-*", "cp314t-*"]  # cp312 by the stable ABI, for all later ones
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    assert PROJECT["tool"]["scikit-build"]["overrides"] == [
        {"if": {"python-version": "<3.12"}, "wheel": {"py-api": ""}}
    ]


def test_licences_of_what_is_compiled_in_are_packed() -> None:
    patterns = PROJECT["project"]["license-files"]
    packed = {path.name for pattern in patterns for path in ROOT.glob(pattern)}
    assert packed == {"LICENSE", "nanobind.txt", "robin_map.txt"}
    for name in packed - {"LICENSE"}:
        assert "Copyright (c)" in (ROOT / "licenses" / name).read_text("utf-8")


# Macros and functions of CPython that its limited API (3.12) lacks, and a binding is tempted to use.
UNLIMITED = re.compile(r"\bPy\w+_(?:GET_\w+|SET_ITEM|AS_\w+|DATA|KIND|New(?=\(static_cast)|Pack\d|Unpack\d)\b|->tp_\w+")


def test_bindings_use_what_wheels_for_later_pythons_have() -> None:
    """What bind/limited.h stands in for is allowed; all else of that kind is in a branch for Python 3.11."""
    native = ROOT / "native" / "bind"
    stands_in = set(re.findall(r"#define (Py\w+)", (native / "limited.h").read_text("utf-8")))
    assert len(stands_in) == 6
    found, branches = set(), 0
    for path in sorted(native.glob("*.cc")):
        text = path.read_text("utf-8")
        branches += len(re.findall("^#else$", text, re.MULTILINE))
        limited = re.sub(r"(#if defined\(Py_LIMITED_API\)\n.*?)#else\n.*?(#endif)", r"\1\2", text, flags=re.DOTALL)
        found |= {(path.name, name) for name in UNLIMITED.findall(limited) if name not in stands_in}
    assert branches >= 2
    assert found == set()
