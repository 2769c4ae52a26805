"""The table of presets: bits per weight, the programs that run the result, and whether it uses statistics."""

from __future__ import annotations

import json

import pytest

from ingot.cli.main import run
from ingot.inspect.catalog import RecipeInfo, recipes
from ingot.recipes.load import ALL_PRESETS, PRESETS, load_recipe

INFO = {item.name: item for item in recipes()}


def test_every_preset_has_a_row() -> None:
    assert tuple(INFO) == ALL_PRESETS
    assert all(item.runs_in for item in INFO.values())
    assert {name for name, item in INFO.items() if item.calibrated} == {
        name for name in ALL_PRESETS if name.endswith("-calibrated")
    }


@pytest.mark.parametrize(
    ("name", "bits", "programs"),
    [
        ("int4", "4.25", {"vLLM", "transformers", "MLX (mlx-lm)", "llama.cpp"}),
        ("w4a16-calibrated", "4.25", {"vLLM", "transformers"}),
        ("coded4-calibrated", "4.00", {"Ingot"}),
        ("trellis4-calibrated", "4.25", {"Ingot"}),
        ("mlx-8bit", "8.50", {"MLX (mlx-lm)"}),
        ("q4_k", "4.50", {"llama.cpp"}),
        ("q2_k-calibrated", "2.62", {"llama.cpp"}),
        ("int2", "2.50 to 4.25", {"transformers", "MLX (mlx-lm)"}),
        ("squish-int4", "", {"Squish"}),
        ("lossless", "", {"Ingot"}),
        ("keep", "", {"any program"}),
    ],
)
def test_rows(name: str, bits: str, programs: set[str]) -> None:
    row = INFO[name]
    assert programs <= set(row.runs_in)
    assert row == RecipeInfo(name, bits or row.bits, row.runs_in, name.endswith("-calibrated"))


def test_what_only_ingot_reads_says_so_first() -> None:
    for name in PRESETS:
        if name.startswith(("coded", "trellis", "table")):
            assert load_recipe(name).description.startswith("Only Ingot reads it"), name


def test_prose_comes_with_a_name_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "description" not in json.dumps(rows)
    assert "w4a16-calibrated" in json.dumps(rows)
    assert run(["recipes", "w4a16"]) == 0
    assert "chosen by least squared error" in capsys.readouterr().out
