"""The command line as a user meets it: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_process(tmp_path: Path) -> Run:
    """As ``run``, in a process as a shell starts it."""

    def call(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "ingot.cli.main", *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    weights = {
        f"model.layers.{i}.mlp.up_proj.weight": (rng.standard_normal((256, 384)) * 0.02).astype(ml_dtypes.bfloat16)
        for i in range(3)
    }
    weights["model.norm.weight"] = np.ones(384, ml_dtypes.bfloat16)
    ingot.save(tmp_path / "source.safetensors", weights, {"format": "pt"})
    return tmp_path / "source.safetensors"


def test_convert_inspect_verify_compare_and_back(run_process: Run, source: Path) -> None:
    run = run_process
    told = run("convert", "source.safetensors", "small.zt", "--recipe", "int4")
    assert "bits per weight" in told.stdout
    assert told.stderr == ""
    listed = run("inspect", "small.zt")
    assert "layers.*.mlp.up_proj.weight" in listed.stdout
    assert "int4" in listed.stdout
    assert "ok" in run("verify", "small.zt").stdout
    differs = run("compare", "source.safetensors", "small.zt", code=1)
    assert "SNR" in differs.stdout
    run("convert", "small.zt", "back.safetensors")
    run("compare", "small.zt", "back.safetensors")


def test_json_is_all_that_is_printed(run: Run, source: Path) -> None:
    report = json.loads(run("convert", "source.safetensors", "small.zt", "--recipe", "int8", "--json").stdout)
    assert report["format"] == "zt"
    assert {item["action"] for item in report["tensors"]} == {"encoded", "moved"}
    found = json.loads(run("inspect", "small.zt", "--json").stdout)
    assert found["elements"] == 3 * 256 * 384 + 384
    assert found["totals"]["codec"]["affine"][0] == 3
    one = json.loads(run("inspect", "small.zt", "--tensor", "model.norm.weight", "--json").stdout)
    assert one["parts"][0]["digest"].startswith("crc32c:")
    assert json.loads(run("verify", "small.zt", "--json").stdout)["ok"] is True
    compared = json.loads(run("compare", "source.safetensors", "small.zt", "--json", code=1).stdout)
    assert compared["tensors"][0]["status"] == "differs"
    assert compared["tensors"][-1]["status"] == "identical"
    plan = json.loads(run("convert", "source.safetensors", "x.zt", "--recipe", "int4", "--dry-run", "--json").stdout)
    assert plan["size_exact"] is True
    for command in ("formats", "codecs", "recipes", "doctor"):
        assert json.loads(run(command, "--json").stdout)


def test_dry_run_names_rules_and_writes_nothing(run: Run, source: Path, tmp_path: Path) -> None:
    told = run("convert", "source.safetensors", "x.zt", "--recipe", "int4", "--dry-run").stdout
    assert "nothing was written" in told
    assert "int4 g64" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.safetensors"]


def test_dry_run_tells_what_will_not_be_pruned(run: Run, tmp_path: Path) -> None:
    matrix = np.ones((128, 64), np.float32)
    fused, *pair = (f"model.layers.0.mlp.{name}.weight" for name in ("gate_up_proj", "fc1", "fc2"))
    ingot.save(tmp_path / "in.safetensors", {fused: matrix, pair[0]: matrix, pair[1]: matrix.T})
    arguments = ("convert", "in.safetensors", "out.zt", "--prune", "0.5", "--dry-run")
    assert fused in run(*arguments).stdout.partition("nothing was written")[2]
    assert any(fused in note for note in json.loads(run(*arguments, "--json").stdout)["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "rule"),
    [
        (("inspect", "absent.zt"), 2, "open.missing"),
        (("convert", "source.safetensors", "out.zt", "--recipe", "int5"), 2, "recipe"),
        (("convert", "source.safetensors", "out.zt", "--max-ram", "lots"), 2, "size"),
        (("convert", "source.safetensors", "out.safetensors", "--recipe", "int4"), 1, "convert.unsupported"),
        (("inspect", "source.safetensors", "--tensor", "nothing"), 2, "tensor.unknown"),
        (("convert", "source.safetensors"), 2, "missing DST"),
        (("no-such-command",), 2, "no such command"),
    ],
)
def test_wrong_usage_is_one_line_and_a_code(
    run: Run, source: Path, arguments: tuple[str, ...], code: int, rule: str
) -> None:
    result = run(*arguments, code=code)
    assert rule in result.stderr
    assert result.stdout == ""


def test_damage_is_exit_code_one(run: Run, source: Path, tmp_path: Path) -> None:
    run("convert", "source.safetensors", "a.zt")
    data = bytearray((tmp_path / "a.zt").read_bytes())
    data[100] ^= 255
    (tmp_path / "a.zt").write_bytes(data)
    assert "part.digest-mismatch" in run("verify", "a.zt", code=1).stdout
    assert "part.digest-mismatch" in run("convert", "a.zt", "b.zt", "--recipe", "int8", code=1).stderr
    (tmp_path / "short.zt").write_bytes(data[:-1])
    assert "zt." in run("inspect", "short.zt", code=1).stderr
    assert json.loads(run("verify", "short.zt", "--json", code=1).stdout)["ok"] is False


def test_formats_that_execute_code_are_named_and_never_opened(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x02}q\x00.")
    result = run("inspect", "model.pt", code=1)
    assert "pickle" in result.stderr


def test_names_with_newlines_stay_on_one_line(run: Run, tmp_path: Path) -> None:
    ingot.save(tmp_path / "odd.zt", {"a\nb": np.ones(3, np.float32)})
    assert "a\\nb" in run("inspect", "odd.zt").stdout


def test_help_has_examples(run: Run) -> None:
    assert "Examples" in run("convert", "--help").stdout
    assert "ingot " in run("--version").stdout


@pytest.mark.slow
def test_interrupting_a_conversion_leaves_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((4096, 2048), np.float32)
    ingot.save(tmp_path / "s.safetensors", {f"model.layers.{i}.mlp.up_proj.weight": matrix for i in range(16)})
    command = [
        sys.executable,
        "-m",
        "ingot.cli.main",
        "convert",
        "s.safetensors",
        "o.zt",
        "--recipe",
        "int4",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".o.zt.ingot-partial" / "files" / "o.zt"
    for _ in range(1000):
        if partial.exists() and partial.stat().st_size > 1000:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "interrupted" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.safetensors"]


def test_read_only_target(run: Run, source: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may write anywhere")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert "store.read-only" in run("convert", "source.safetensors", "locked/out.zt", code=1).stderr
