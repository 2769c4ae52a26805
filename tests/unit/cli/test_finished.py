"""``--resume`` on a complete run: the same command ends with 0 at once, and any change of its files is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

import ingot
from tests.support.paths import DEMO_DATA

Run = Callable[..., CompletedProcess[str]]

COMMANDS = {
    "convert": ("convert", "model", "out", "--recipe", "int8", "--max-ram", "16GiB"),
    "quantize": ("quantize", "model", "-o", "out", "--for", "vllm", "--calibration", "none"),
    "merge": ("merge", "model", "model:0.5", "-o", "out", "--method", "linear"),
    "archive": ("archive", "model", "-o", "out.zt"),
    "patch": ("patch", "model", "delta.zt", "-o", "out"),
    "diff": ("diff", "model", "tuned.safetensors", "-o", "out.zt"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_DATA, folder, ignore=shutil.ignore_patterns("__*"))
    return folder


def _prepare(name: str, run: Run, tmp_path: Path) -> None:
    if name in ("patch", "diff"):
        weights = {key: np.array(value) for key, value in ingot.numpy.load_file(tmp_path / "model").items()}
        weights["model.norm.weight"] *= 2
        ingot.numpy.save_file(weights, tmp_path / "tuned.safetensors")
    if name == "patch":
        run("diff", "model", "tuned.safetensors", "-o", "delta.zt")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_complete_run_is_not_repeated(name: str, run: Run, model: Path, tmp_path: Path) -> None:
    _prepare(name, run, tmp_path)
    command = (*COMMANDS[name], "--resume")
    run(*command)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert "already complete" in run(*command).stdout
    assert json.loads(run(*command, "--json").stdout)["complete"] is True
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def _other_recipe(model: Path, command: list[str]) -> list[str]:
    return [word.replace("int8", "int4") for word in command]


def _changed_source(model: Path, command: list[str]) -> list[str]:
    os.utime(model / "model.safetensors", ns=(1, 1))
    return command


def _changed_companion(model: Path, command: list[str]) -> list[str]:
    (model / "notes.txt").write_text("new")
    return command


def _changed_result(model: Path, command: list[str]) -> list[str]:
    (model.parent / "out" / "config.json").write_text("{}")
    return command


def _no_record(model: Path, command: list[str]) -> list[str]:
    (model.parent / ".out.ingot-finished").unlink()
    return command


@pytest.mark.parametrize("change", [_other_recipe, _changed_source, _changed_companion, _changed_result, _no_record])
def test_a_changed_run_is_refused_as_before(
    change: Callable[[Path, list[str]], list[str]], run: Run, model: Path
) -> None:
    command = [*COMMANDS["convert"], "--resume"]
    run(*command)
    assert "[target.exists]" in run(*change(model, command), code=2).stderr


def test_a_run_without_resume_leaves_no_record(run: Run, model: Path, tmp_path: Path) -> None:
    run(*COMMANDS["convert"])
    run(*COMMANDS["convert"], "--resume", "--dry-run")
    assert not list(tmp_path.glob(".*"))
    run(*COMMANDS["convert"], "--resume", code=2)


def test_a_result_that_is_gone_is_written_again(run: Run, model: Path, tmp_path: Path) -> None:
    command = (*COMMANDS["convert"], "--resume")
    run(*command)
    shutil.rmtree(tmp_path / "out")
    assert "already complete" not in run(*command).stdout
    assert "already complete" in run(*command).stdout


def test_a_remote_source_leaves_no_record(run: Run, model: Path, tmp_path: Path) -> None:
    """No stamp shows whether its files changed."""
    from ingot.cli.finished import RunRecord

    (tmp_path / "out").mkdir()
    for source in ("org/name", "https://host/model", "library:lib!name"):
        record = RunRecord("convert", {"src": source, "dst": str(tmp_path / "out"), "resume": True})
        (tmp_path / "out" / "file").write_text(source)
        record.write()
        assert not record.is_complete()
    assert not list(tmp_path.glob(".*"))


def test_every_command_that_resumes_names_its_result() -> None:
    from ingot.cli.finished import OUTPUTS
    from ingot.cli.main import app

    resuming = {}
    for name in app.commands:
        names = {parameter.name for parameter in app.commands[name].params}
        if "resume" in names:
            resuming[name] = names & set(OUTPUTS)
    assert {"convert", "quantize", "merge", "archive", "calibrate", "sweep", "patch"} <= set(resuming)
    assert [name for name, outputs in resuming.items() if not outputs] == []
