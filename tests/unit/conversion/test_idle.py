"""What is asked of a conversion and has no effect is said, and refused under ``strict_recipe``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import UsageError

RECIPE = """
[[rules]]
label = "misspelt"
match = "model.layers.0.mlp.gate_proj.weigth"
codec = "dense"
options = { dtype = "f16" }

[[rules]]
label = "heads"
match = "lm_head.*"
codec = "dense"
options = { dtype = "f16" }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def norms(tmp_path: Path) -> Path:
    path = tmp_path / "norms.safetensors"
    ingot.save(path, {"model.layers.0.mlp.gate_proj": np.ones(96, np.float32)})
    return path


def test_a_rule_that_hits_nothing_is_named(model: Path, recipe: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "out.zt", recipe)
    (warning,) = report.warnings
    assert "misspelt" in warning
    assert "'model.layers.0.mlp.gate_proj.weight'" in warning
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "strict.zt", recipe, strict_recipe=True)
    assert caught.value.rule == "convert.idle"
    assert not (tmp_path / "strict.zt").exists()


def test_importance_that_nothing_looks_at_is_said(model: Path, norms: Path, tmp_path: Path) -> None:
    assert ingot.convert(model, tmp_path / "a.zt", "int4", importance=norms).warnings
    assert not ingot.convert(model, tmp_path / "b.zt", "palette4", importance=norms, strict_recipe=True).warnings
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "c.zt", "int4", importance=norms, strict_recipe=True)
    assert caught.value.rule == "convert.idle"


def test_a_preset_is_for_all_models(model: Path, tmp_path: Path) -> None:
    assert not ingot.convert(model, tmp_path / "a.zt", "bf16", strict_recipe=True).warnings


@pytest.mark.parametrize("more", [["--json"], ["--dry-run", "--json"], ["--quiet"], ["--dry-run"]])
def test_the_command_says_so_beside_its_output(
    model: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    command = ["convert", str(model), str(tmp_path / "out.zt"), "--recipe", str(recipe), *more]
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert "misspelt" in err
    if "--json" in more:
        assert "misspelt" in json.loads(out)["warnings"][0]
    (tmp_path / "out.zt").unlink(missing_ok=True)
    assert run([*command, "--strict-recipe"]) == 2
    assert "convert.idle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "rule", "near"),
    [("itn4", "recipe.unknown", "'int4'"), ("./mi.toml", "recipe.unknown", "my.toml"), ("no/x", "recipe.unknown", "")],
)
def test_a_recipe_that_is_not_there(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, asked: str, rule: str, near: str
) -> None:
    from ingot.recipes.load import load_recipe

    monkeypatch.chdir(recipe.parent)
    with pytest.raises(UsageError) as caught:
        load_recipe(asked)
    assert caught.value.rule == rule
    assert near in str(caught.value)


def test_names_that_are_near_are_offered(model: Path, tmp_path: Path) -> None:
    with ingot.open(model) as checkpoint, pytest.raises(UsageError, match=r"lm_head\.weight"):
        checkpoint.state_dict(names=["lm_head.wieght"])
    with pytest.raises(UsageError, match="'safetensors'"):
        ingot.convert(model, tmp_path / "out", format="safetensor")
