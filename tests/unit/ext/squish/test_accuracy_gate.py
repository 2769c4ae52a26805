"""The gate by perplexity on the model that ships with Ingot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.ext.squish.gate import PerplexityGate
from ingot.ext.squish.tiers.build import build
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.loading.options import Loading, Protocol
from tests.support.paths import DEMO_DATA as DEMO

TEXT = DEMO / "heldout.txt"
SHORT = Protocol(window=64, sequences=4)


@pytest.fixture
def squish(tmp_path: Path) -> Path:
    ingot.convert(DEMO, tmp_path / "squish", "squish-int8", "npydir")
    return tmp_path / "squish"


def test_the_figures_are_those_of_eval(squish: Path) -> None:
    report = build(squish, "3bit", gate=PerplexityGate(squish, TEXT, 1.0, SHORT))
    assert report.gate is not None
    assert report.gate.reference == evaluate(squish, TEXT, None, SHORT, Loading(cache=False)).perplexity
    assert report.gate.perplexity == evaluate(report.path, TEXT, None, SHORT).perplexity
    assert report.gate.perplexity != report.gate.reference
    assert sorted(one.name for one in squish.glob(".squish*")) == [".squish_3bit_ready"]


def test_the_command(squish: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT.read_text("utf-8")[:2000], "utf-8")
    arguments = ["cache", "build", str(squish), "--tier", "3bit", "--gate", str(text)]
    assert run([*arguments, "--max-rise", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gate"]["rounds"] == 1
    assert told["gate"]["max_rise"] == 5
    assert run(["cache", "status", str(squish)]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert run([*arguments, "--max-rise", "0", "--quiet"]) in (0, 1)  # by luck fewer bits may be better
    assert run([*arguments, "--max-rise", "-1"]) == 2
    assert run(["cache", "build", str(squish), "--gate", str(text)]) == 2
    assert "tier.no-gate" in capsys.readouterr().err


@pytest.mark.parametrize("rise", [-0.1, float("nan"), float("inf")])
def test_a_rise_is_a_share(squish: Path, rise: float) -> None:
    with pytest.raises(IngotError) as caught:
        PerplexityGate(squish, TEXT, rise)
    assert caught.value.rule == "tier.max-rise"


def test_a_text_that_is_not_there(squish: Path) -> None:
    with pytest.raises(IngotError) as caught:
        PerplexityGate(squish, squish / "none.txt")
    assert caught.value.rule == "store.missing"
