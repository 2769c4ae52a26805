"""``ingot sweep``: several presets of one model, measured on the same texts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.cli.main import run as run_command
from ingot.errors import IngotError
from ingot.runtime.loading.options import Protocol
from ingot.runtime.sweep import run as sweep_module
from ingot.runtime.sweep.report import SweepReport
from tests.support import model_folder

SHORT = Protocol(window=32, sequences=3)
PRESETS = ["q4_0", "int8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model ``m`` and two texts, which is the working directory."""
    model_folder.write(tmp_path / "m")
    (tmp_path / "a.txt").write_text("The lake is deep, and the pond is not. " * 20)
    (tmp_path / "b.txt").write_text("def add(first, second):\n    return first + second\n" * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(**options: Any) -> SweepReport:
    return ingot.sweep("m", PRESETS, ["a.txt", "b.txt"], **{"out": "sweep.json", "protocol": SHORT, **options})


def scores_of(report: SweepReport) -> list[Any]:
    return [(row.preset, row.size, row.scores) for row in report.rows]


def test_rows_have_the_figures_of_evaluate(folder: Path) -> None:
    report = sweep()
    ingot.convert("m", "small", "q4_0")
    for score, original, text in zip(report.rows[0].scores, report.original, ("a.txt", "b.txt"), strict=True):
        expected = ingot.evaluate("small", text, "m", SHORT)
        assert score.kl == pytest.approx(expected.kl, rel=1e-6)
        assert score.kl_interval == pytest.approx(expected.intervals["kl"], rel=1e-6)
        assert score.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
        assert original.perplexity == pytest.approx(expected.reference_perplexity, rel=1e-6)
    with ingot.open("small") as checkpoint:
        stored = sum(tensor.nbytes for tensor in checkpoint.values())
    assert report.rows[0].size >= stored
    assert [row.preset for row in report.rows] == PRESETS
    assert report.rows[0].scores[0].kl > 10 * report.rows[1].scores[0].kl > 0


def test_the_command_writes_json_and_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "m", "--presets", "q4_0,int8", "--texts", "a.txt,b.txt", "-o", "s.json", "--page", "s.md"]
    assert run_command([*words, "--window", "32", "--sequences", "3"]) == 0
    printed = capsys.readouterr()
    assert "KL a" in printed.out
    assert "perplexity b" in printed.out
    assert "q4_0: " in printed.err
    report = json.loads((folder / "s.json").read_text())
    assert [row["preset"] for row in report["rows"]] == PRESETS
    assert report["tokens"] == [96, 96]
    page = (folder / "s.md").read_text()
    assert page.startswith("# Sweep of m\n")
    assert r"| q4\_0 |" in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    words = [*words[:-4], "-o", "t.json", "--json", "--window", "32", "--sequences", "3"]
    assert run_command(words) == 0
    assert json.loads(capsys.readouterr().out).keys() == report.keys()


def test_a_killed_sweep_continues_after_its_last_preset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = sweep(out="complete.json")
    converted: list[str] = []
    convert = sweep_module.convert

    def stop_at_second(options: Any) -> Any:
        if converted == PRESETS[:1]:
            raise KeyboardInterrupt
        converted.append(options.recipe.name)
        return convert(options)

    monkeypatch.setattr(sweep_module, "convert", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        sweep(resume=True)
    assert not (folder / "sweep.json").exists()
    converted.clear()
    resumed = sweep(resume=True)
    assert converted == PRESETS[1:]
    assert scores_of(resumed) == scores_of(complete)
    assert resumed.original == complete.original
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt", "complete.json", "m", "sweep.json"]


def test_an_interrupted_sweep_without_resume_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "convert", stop)
    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt", "m"]


@pytest.mark.parametrize("change", ["text", "window"])
def test_rows_of_another_protocol_are_not_reused(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    def fail(path: Any) -> Any:
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(sweep_module.Staging, "publish", lambda self, names: fail(names))
        with pytest.raises(IngotError):
            sweep(resume=True)
    if change == "text":
        (folder / "a.txt").write_text("Another text of about the same length. " * 20)
    protocol = SHORT if change == "text" else replace(SHORT, window=16)
    with pytest.raises(IngotError) as raised:
        ingot.sweep("m", PRESETS, ["a.txt", "b.txt"], "sweep.json", protocol=protocol, resume=True)
    assert raised.value.rule == "resume.changed"


def test_statistics_are_taken_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    calibrate = sweep_module.calibrate

    def few_samples(options: Any) -> Any:
        calls.append(options)
        return calibrate(replace(options, samples=4, length=16))

    monkeypatch.setattr(sweep_module, "calibrate", few_samples)
    presets = "q4_0-calibrated,iq4_xs-calibrated,q4_0"
    report = ingot.sweep("m", presets, "a.txt", "sweep.json", protocol=SHORT)
    assert len(calls) == 1
    assert report.statistics == "samples of the model"
    assert [row.preset for row in report.rows] == presets.split(",")
    assert report.rows[0].scores != report.rows[2].scores
    ingot.calibrate("m", "s.safetensors", samples=4, length=16)
    again = ingot.sweep("m", presets, "a.txt", "again.json", protocol=SHORT, calibration="s.safetensors")
    assert len(calls) == 1
    assert scores_of(again) == scores_of(report)
    assert again.statistics == "s.safetensors"


def test_results_for_a_program_are_in_its_container(folder: Path) -> None:
    report = ingot.sweep("m", "q4_0", "a.txt", "sweep.json", protocol=SHORT, runtime="llama.cpp")
    zt = ingot.sweep("m", "q4_0", "a.txt", "zt.json", protocol=SHORT)
    assert report.rows[0].container == "gguf"
    assert report.rows[0].scores[0].kl == pytest.approx(zt.rows[0].scores[0].kl, rel=0.3)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"presets": "q4_0,q4_0"}, "sweep.presets"),
        ({"presets": []}, "sweep.presets"),
        ({"presets": "q4_0,q5"}, "recipe.unknown"),
        ({"presets": "q4_0,"}, "recipe.unknown"),
        ({"texts": []}, "sweep.texts"),
        ({"texts": "a.txt,a.txt"}, "sweep.texts"),
        ({"texts": "a.txt,c.txt"}, "store.missing"),
        ({"texts": "m"}, "store.not-a-file"),
        ({"model": "n"}, "open.missing"),
        ({"model": "m/model.safetensors"}, "quantize.model"),
        ({"calibration": "c.safetensors"}, "store.missing"),
        ({"out": "x/sweep.json"}, "target.no-parent"),
        ({"out": "a.txt"}, "target.exists"),
        ({"page": "a.txt"}, "target.exists"),
        ({"page": "page.html"}, "sweep.page"),
        ({"out": "s.md", "page": "s.md"}, "sweep.page"),
        ({"runtime": "vlm"}, "runtime.unknown"),
    ],
)
def test_wrong_options_are_refused(folder: Path, options: Any, rule: str) -> None:
    with pytest.raises(IngotError) as raised:
        ingot.sweep(**{"model": "m", "presets": "q4_0", "texts": "a.txt", "out": "sweep.json", **options})
    assert raised.value.rule == rule


def test_a_wrong_preset_is_refused_before_torch_is_imported(folder: Path) -> None:
    words = ["sweep", "m", "--presets", "q4_0,q9", "--texts", "a.txt", "-o", "s.json"]
    code = f"import sys; from ingot.cli.main import run; print(run({words}), 'torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    assert process.stdout == "2 False\n"
    assert "q9" in process.stderr


def test_all_conversions_are_planned_before_the_first_begins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "convert", lambda options: pytest.fail("a conversion began"))
    with pytest.raises(IngotError, match="preset w8a8"):
        ingot.sweep("m", "q4_0,w8a8", "a.txt", "sweep.json", protocol=SHORT)


def test_texts_of_one_name_have_their_paths_as_labels(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "a.txt").write_text((folder / "b.txt").read_text())
    report = ingot.sweep("m", "int8", ["a.txt", "other/a.txt"], "sweep.json", protocol=SHORT)
    assert [score.text for score in report.original] == ["a.txt", "other/a.txt"]


def test_a_file_name_with_a_comma_is_one_text(folder: Path) -> None:
    (folder / "a.txt").rename("x, y.txt")
    report = ingot.sweep("m", "int8", "x, y.txt", "sweep.json", protocol=SHORT)
    assert [score.text for score in report.original] == ["x, y"]
