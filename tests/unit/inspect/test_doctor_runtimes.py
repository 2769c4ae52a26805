"""``ingot doctor --for``: what a program needs on this machine, by its profile."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from ingot.cli.main import run
from ingot.inspect import doctor
from ingot.inspect.doctor import EXTRAS, examine_runtime
from ingot.runtimes.table import BUILT_IN, RUNTIMES


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Packages by name with their versions; the shell finds programs in an empty folder alone."""
    packages: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setenv("PATH", str(tmp_path))
    return packages


def states(name: str) -> dict[str, str]:
    return {check.name: check.state for check in examine_runtime(name)}


def test_everything_is_here(installed: dict[str, str]) -> None:
    profile = RUNTIMES["llama.cpp"]
    package, _, version = profile.package.partition("==")
    installed |= {package: version, "gguf": "1", "transformers": "5"}
    assert states("llama-cpp") == {
        "llama.cpp": "ok",
        "version": "ok",
        "extra gguf": "ok",
        "extra transformers": "ok",
    }
    installed[package] = f"{version}1"
    assert states("llama.cpp")["version"] == "other"


def test_a_program_on_the_path_is_enough(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ollama").write_text("#!/bin/sh\n")
    (tmp_path / "ollama").chmod(0o755)
    assert states("ollama") == {
        "ollama": "ok",
        "version": "other",
        "extra gguf": "missing",
        "extra transformers": "absent",
    }
    (extra,) = [check for check in examine_runtime("ollama") if check.name == "extra gguf"]
    assert "ingot[gguf]" in extra.advice


def test_a_newer_patch_of_a_version_is_that_version(installed: dict[str, str]) -> None:
    requested = RUNTIMES["onnxruntime"].package.partition("==")[2]
    for version, state in ((requested, "ok"), (f"{requested}.0", "ok"), (f"{requested}0", "other")):
        installed["onnxruntime"] = version
        assert states("onnxruntime")["version"] == state


def test_the_exit_code_is_the_answer(installed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--for", "vllm", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["state"] == "missing"
    assert rows[0]["advice"] == RUNTIMES["vllm"].installation.hint
    installed["vllm"] = "9"  # calibration needs transformers; nearest values do not
    assert run(["doctor", "--for", "vllm"]) == 0
    assert run(["doctor", "--for", "vlm"]) == 2


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_profile_says_what_its_program_needs(name: str, installed: dict[str, str]) -> None:
    needs = RUNTIMES[name].installation
    assert needs.programs or needs.packages
    assert needs.hint
    assert {*needs.extras, *needs.calibration} <= set(EXTRAS)
    assert "gguf" in needs.extras or "gguf" not in RUNTIMES[name].containers
    assert states(name)[RUNTIMES[name].title] == "missing"
