"""The demo's table, on one window of text: every run leaves a file, and what the rows say fits together."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import ingot
from ingot.cli.main import run
from ingot.demo import run as demo


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "WINDOWS", 1)
        return demo.run(tmp_path_factory.mktemp("demo") / "out")


def test_the_demo_begins_with_a_quantization_and_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NEW_TOKENS", 2)
    result = demo.quantize_model(tmp_path / "demo")
    assert result.text
    assert result.report.bits_per_weight < 7
    assert run(shlex.split(result.command)[1:]) == 0
    assert "preset Q4_K_M" in capsys.readouterr().out


def test_every_run_has_a_row_and_a_whole_file(report: demo.DemoReport) -> None:
    assert [(row.recipe, Path(row.file).suffix) for row in report.rows[1:]] == list(demo.RUNS)
    for row in report.rows[1:]:
        path = Path(report.folder) / row.file
        assert path.stat().st_size == row.size
        assert row.bits_per_weight == pytest.approx(8 * row.size / report.parameters)
        assert not [finding for finding in ingot.verify(path, strict=True) if finding.level == "error"]


def test_exact_rows_share_the_perplexity_of_the_original_and_others_do_not(report: demo.DemoReport) -> None:
    original = report.rows[0].perplexity
    exact = {"(original)", "bf16", "lossless", "lossless-max", "tca-tbe"}
    for row in report.rows:
        assert (row.worst_error == 0) is (row.recipe in exact)
        assert (row.perplexity == original) is (row.recipe in exact)


def test_a_recipe_gives_the_same_weights_in_either_container(report: demo.DemoReport) -> None:
    zt, squizd = (row for row in report.rows if row.recipe == "int4")
    assert ingot.compare(Path(report.folder) / zt.file, Path(report.folder) / squizd.file).same
    assert zt.perplexity == pytest.approx(squizd.perplexity)
    assert zt.size < squizd.size


def test_a_second_demo_replaces_the_files_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WINDOWS", 1)
    monkeypatch.setattr(demo, "RUNS", (("bf16", ".zt"),))
    first, second = (demo.run(tmp_path / "demo") for _ in range(2))
    assert [row.size for row in first.rows] == [row.size for row in second.rows]
