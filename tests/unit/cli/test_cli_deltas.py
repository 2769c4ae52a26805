"""diff, patch, and what inspect and compare say of deltas, as a user meets them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def pair(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for name in ("base", "tuned", "other"):
        folder = tmp_path / name
        folder.mkdir()
        matrix = np.random.default_rng(0).standard_normal((256, 384)) * 0.02
        if name != "base":
            matrix = matrix + rng.standard_normal(matrix.shape) * 0.002
        weights = {
            "model.layers.0.mlp.up_proj.weight": matrix.astype(ml_dtypes.bfloat16),
            "model.norm.weight": np.ones(384, ml_dtypes.bfloat16),
        }
        ingot.save(folder / "model.safetensors", weights)
        (folder / "config.json").write_text("{}")


def test_what_is_hardly_there_is_told(run: Run) -> None:
    weak = ("diff", "base", "tuned", "--strategy", "low-rank", "-o")
    made = json.loads(run(*weak, "delta.zt", "--json").stdout)
    (matrix,) = [item for item in made["tensors"] if not item["exact"]]
    assert matrix["unrestored"] > 0.5
    assert made["short"] == [matrix["name"]]
    assert f"{100 * matrix['unrestored']:.1f} %" in run(*weak, "again.zt").stdout


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    told = run("diff", "base", "tuned", "-o", "delta.zt")
    assert "bit for bit" in told.stdout
    assert "1 apply, 1 same" in told.stdout
    assert told.stderr == ""
    shown = run("inspect", "delta.zt").stdout
    identity = run("inspect", "base", "--content-id").stdout.strip()
    assert f"base: {identity}" in shown
    assert "strategy exact: 1 apply, 1 same" in shown
    told = run("patch", "base", "delta.zt", "-o", "out", "--verify")
    assert "as the delta promises" in told.stdout
    run("compare", "tuned", "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert run("inspect", "out", "--content-id").stdout == run("inspect", "tuned", "--content-id").stdout


def test_json(run: Run) -> None:
    made = json.loads(run("diff", "base", "tuned", "-o", "delta.zt", "--strategy", "int4", "--json").stdout)
    assert made["ops"] == {"apply": 1, "same": 1}
    assert made["exact"] is False
    assert 0 < made["share"] < 0.5
    assert made["tensors"][0]["error"]["snr_db"] > 20
    told = json.loads(run("patch", "base", "delta.zt", "-o", "out.safetensors", "--verify", "--json").stdout)
    assert told["result_id"] == made["result_id"]
    found = json.loads(run("inspect", "out.safetensors", "--content-id", "--json").stdout)
    assert found["content_id"] == made["result_id"]


def test_what_a_delta_costs(run: Run) -> None:
    run("diff", "base", "tuned", "-o", "a.zt", "-q")
    run("diff", "base", "tuned", "-o", "b.zt", "-q", "--strategy", "int8")
    assert "equal bit for bit" in run("compare", "base", "tuned", "--delta", "a.zt").stdout
    assert "1 tensors are not equal" in run("compare", "base", "tuned", "--delta", "b.zt", code=1).stdout
    found = json.loads(run("compare", "base", "tuned", "--delta", "b.zt", "--json", code=1).stdout)
    errors = {item["name"]: item["error"] for item in found["tensors"]}
    assert errors["model.layers.0.mlp.up_proj.weight"]["snr_db"] > 40
    assert errors["model.norm.weight"] is None
    assert "[delta.tuned]" not in run("compare", "base", "other", "--delta", "a.zt", code=1).stderr


def test_a_chain_and_its_wrong_order(run: Run) -> None:
    run("diff", "base", "tuned", "-o", "one.zt")
    run("diff", "tuned", "other", "-o", "two.zt")
    run("patch", "base", "one.zt", "two.zt", "-o", "out.zt", "--verify")
    run("compare", "other", "out.zt")
    refused = run("patch", "base", "two.zt", "one.zt", "-o", "bad.zt", code=1)
    assert "[delta.base]" in refused.stderr
    refused = run("patch", "other", "one.zt", "-o", "bad.zt", code=1)
    assert "[delta.base]" in refused.stderr


def test_wrong_usage(run: Run) -> None:
    assert "[delta.strategy]" in run("diff", "base", "tuned", "-o", "x.zt", "--strategy", "nope", code=2).stderr
    assert "[delta.container]" in run("diff", "base", "tuned", "-o", "x.squizd", code=2).stderr
    assert "[cli.option]" in run("diff", "base", "tuned", "-o", "x.zt", "--option", "bits", code=2).stderr
    assert "[delta.none]" in run("patch", "base", "tuned", "-o", "x.zt", code=2).stderr
    assert "[cli.usage]" in run("patch", "base", "-o", "x.zt", code=2).stderr
    run("diff", "base", "tuned", "-o", "x.zt", "--strategy", "int4", "--option", "group=32", "--option", "scales=f32")


def test_the_result_is_proven_unless_that_is_declined(run: Run) -> None:
    run("diff", "base", "tuned", "-o", "delta.zt")
    assert json.loads(run("patch", "base", "delta.zt", "-o", "a", "--json").stdout)["verified"] is True
    assert json.loads(run("patch", "base", "delta.zt", "-o", "b", "--no-verify", "--json").stdout)["verified"] is False


def test_what_values_need_a_base(run: Run) -> None:
    run("diff", "base", "tuned", "-o", "delta.zt")
    assert "ok" in run("verify", "delta.zt").stdout
    refused = run("convert", "delta.zt", "x.safetensors", code=1)
    assert "delta_exact" in refused.stderr
