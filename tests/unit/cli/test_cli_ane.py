"""``ingot plan``, ``ingot lut``, ``ingot kernel`` and ``ingot inspect`` of a kernel unit, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.ext.ane.kernel import load_kernel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("cli") / "m.safetensors"
    tensors = {f"layers.{n}.mlp.up_proj.weight": rng.standard_normal((64, 96)).astype(np.float16) for n in range(3)}
    ingot.save(path, {**tensors, "norm.weight": np.ones(96, np.float16)})
    return str(path)


def test_plan_shows_equal_layers_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "--chip", "m1,m5"]) == 0
    out = capsys.readouterr().out
    assert out.count("layers.*.mlp.up_proj.weight (3 x)") == 2
    assert "palette-widths" in out  # contradictions are named
    assert run(["plan", model, "--all", "--no-tensors"]) == 0
    assert "up_proj" not in capsys.readouterr().out
    assert run(["plan", model, "--all"]) == 0
    assert capsys.readouterr().out.count("up_proj") == 3


def test_plan_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "--chip", "m4", "--assume", "bandwidth=50", "--json"]) == 0
    (chip,) = json.loads(capsys.readouterr().out)["chips"]
    assert chip["outcomes"] == {"dense": 3}
    assert chip["totals"] == {"stored": 36864, "moved": 36864, "dense": 36864}
    assert chip["time"]["share"] == pytest.approx(36864 / 50e6)
    assert chip["forms"]["palette4"]["outcome"] == "streams"
    weight = chip["weights"][0]
    assert weight["decision"]["evidence"]
    assert weight["better"]["label"] == "int8"  # 64 scales are smaller than a table of 256
    assert weight["room"]["cap"] == 65536


def test_what_weights_rest_on_is_told_in_full(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "i8.zt")
    assert run(["convert", model, out, "--recipe", "int8", "--quiet"]) == 0
    assert run(["plan", out, "--chip", "m5"]) == 0
    text = capsys.readouterr().out
    assert "folds !" in text
    assert "--assume: int8" in text
    assert run(["plan", out, "--chip", "m5", "--assume", "int8=streams"]) == 0
    text = capsys.readouterr().out
    assert "folds !" not in text
    assert "assumed" in text


def test_plan_without_a_known_bandwidth_says_what_to_do(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "--chip", "a16"]) == 0
    assert "--assume bandwidth=" in capsys.readouterr().out


def test_suggest_then_convert_then_plan(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(tmp_path / "r.toml"), str(tmp_path / "out.zt")
    assert run(["plan", model, "--suggest", recipe, "--max-error", "0.02"]) == 0
    assert "palette8" in capsys.readouterr().out
    assert run(["convert", model, out, "--recipe", recipe, "--quiet"]) == 0
    assert run(["plan", out, "--json"]) == 0
    (chip,) = json.loads(capsys.readouterr().out)["chips"]
    assert chip["outcomes"] == {"streams": 3}


def test_presets_stream_on_their_chips(model: str, tmp_path: Path) -> None:
    for chip in ("m1", "m4", "m5"):
        out = tmp_path / f"{chip}.zt"
        ingot.convert(model, out, f"ane-{chip}")
        assert ingot.plan(out, chip)[chip].outcomes == {"streams": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--chip", "m99"], ["--assume", "x"], ["--max-error", "0.1"], ["--suggest", "r.toml", "--max-error", "0"],
        ["--assume", "m4.int8=streams"],
    ],
)  # fmt: skip
def test_wrong_usage_of_plan(model: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", model, *arguments]) == 2
    assert not list(tmp_path.iterdir())


def test_lut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "tanh.svg"
    assert run(["lut", "tanh", "--domain=-3,3", "--svg", str(svg)]) == 0
    assert "43 entries" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg")
    assert run(["lut", "tanh", "--domain=-3,3", "--range=-3,3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["entries"]) == 43
    assert found["domain"] == pytest.approx([-3.0, 3.0], abs=0.01)
    assert found["max_error"] < 0.006
    assert run(["lut", "tanh", "--domain=-3,3", "--outside", "line", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outside"] == "line"
    for wrong in (
        ["sinh"],
        ["tanh", "--outside", "wrap"],
        ["tanh", "--range=1"],
        ["tanh", "--range=2,1"],
        ["exp", "--range=0,90"],
    ):
        assert run(["lut", *wrong]) == 2


def test_kernel_and_inspect(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "up.anek"
    name = "layers.0.mlp.up_proj.weight"
    assert run(["kernel", model, name, str(out), "--chip", "m4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["form"] == "fp16"
    assert run(["inspect", str(out)]) == 0
    assert "kernel unit version 2 for target H16g" in capsys.readouterr().out
    assert run(["inspect", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"] == [64, 96]
    assert [record[1] for record in found["records"]] == [4] * 16
    with ingot.open(model) as checkpoint:
        np.testing.assert_array_equal(load_kernel(out).dense(), checkpoint[name].numpy())
    table = ["--activation", "tanh", "--domain=-3,3", "--outside", "line"]
    assert run(["kernel", model, name, str(out), "--overwrite", *table]) == 0
    lut = load_kernel(out).weight.lut
    assert lut is not None
    assert (lut.knot_inputs[0], lut.outside) == (pytest.approx(-3, abs=0.01), "line")
    assert run(["kernel", model, name, str(out), "--overwrite", "--domain=-3,3"]) == 2
    damaged = tmp_path / "bad.anek"
    damaged.write_bytes(out.read_bytes()[:-1] + b"\x7f")
    assert run(["inspect", str(damaged)]) == 1
    assert run(["kernel", model, "nothing", str(tmp_path / "x")]) == 2
