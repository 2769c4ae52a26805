"""Packed tiers of arrays that have few bits already, and tiers whose build was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.engine.journal import Journal
from ingot.errors import UsageError
from ingot.ext.squish.tiers.build import build
from ingot.ext.squish.tiers.int4 import add_int4
from ingot.ext.squish.tiers.prepare import prepare

NAMES = {
    "model.embed_tokens.weight": (96, 64),
    **{f"model.layers.{layer}.self_attn.q_proj.weight": (128, 128) for layer in range(3)},
    "model.layers.0.mlp.down_proj.weight": (64, 128),
    "model.norm.weight": (64,),
}
MATRICES = 4


@pytest.fixture
def squish(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in NAMES.items()}
    ingot.save(tmp_path / "model.safetensors", arrays)
    ingot.convert(tmp_path / "model.safetensors", tmp_path / "squish", "squish-int8", "npydir")
    return tmp_path / "squish"


def values(path: str | Path) -> dict[str, np.ndarray]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy("f32") for name, tensor in checkpoint.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("options", [{}, {"group": 64, "scales": "f16"}, {"form": "q4", "scales": "f16"}])
@pytest.mark.parametrize("drop", [False, True])
def test_a_tier_of_four_bit_arrays_has_their_values(squish, options, drop):
    add_int4(squish, drop_int8=drop, **options)
    report = build(squish, "4bit")
    assert same(values(report.path), values(squish))
    assert (report.exact, report.requantized) == (len(NAMES), 0)
    with ingot.open(report.path) as checkpoint:
        assert sum(tensor.params.get("bits") == 4 for tensor in checkpoint.values()) == MATRICES


def test_arrays_of_more_bits_are_quantized_as_the_recipe_says(squish):
    report = build(squish, "4bit")
    assert (report.exact, report.requantized) == (0, 0)
    assert not same(values(report.path), values(squish))


@pytest.mark.parametrize(("options", "tier"), [({"group": 16}, "4bit"), ({"form": "q4"}, "4bit"), ({}, "3bit")])
def test_what_cannot_be_taken_is_quantized_again_only_if_asked_for(squish, options, tier, capsys):
    add_int4(squish, **options)
    with pytest.raises(UsageError) as caught:
        build(squish, tier, ungated=True)
    assert caught.value.rule == "tier.requantize"
    assert not (squish / f"squish_{tier}").exists()
    assert prepare(squish, "mlx").tier.name == ("4bit" if tier == "3bit" else "tensors")
    assert run(["cache", "build", str(squish), "--tier", tier, "--ungated", "--allow-requantize"]) == 0
    assert "quantized again" in capsys.readouterr().out
    report = build(squish, tier, force=True, ungated=True, allow_requantize=True)
    assert report.requantized == MATRICES
    assert not same(values(report.path), values(squish))


def test_three_bits_need_a_gate(squish, monkeypatch):
    with pytest.raises(UsageError) as caught:
        build(squish, "3bit")
    assert caught.value.rule == "tier.ungated"
    read = []

    class Recorded:
        max_rise = 0.02

        def __init__(self, folder, text, *_args, **_more):
            read.append(Path(text).name)
            self.text = str(text)

        def reference(self):
            return 10.0

        def perplexity(self, tier):
            return 10.0

    monkeypatch.setattr("ingot.ext.squish.gate.PerplexityGate", Recorded)
    for _ in range(2):  # the second finds it complete, and measures nothing
        assert run(["cache", "build", str(squish), "--tier", "3bit", "--quiet"]) == 0
    assert read == ["heldout.txt"]
    assert build(squish, "3bit").gate is not None


KILLED = """
import os, signal, sys
from ingot.engine.journal import Journal
from ingot.ext.squish.tiers.build import build
note, done = Journal.append, []
def append(self, record, nbytes):
    note(self, record)
    done.append(record)
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = append
build(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize("tier", ["bf16", "4bit"])
def test_a_killed_build_goes_on_where_it_stopped(squish, tier, tmp_path, monkeypatch):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(squish), tier], check=False)
    assert killed.returncode == -signal.SIGKILL
    written, note = [], Journal.append
    monkeypatch.setattr(Journal, "append", lambda self, record, nbytes: (written.append(record), note(self, record))[1])
    report = build(squish, tier)
    # Small pieces wait in memory for others: the last tensor that was noted may not be in the file.
    assert len(NAMES) - 3 <= len(written) <= len(NAMES) - 2
    assert not [path for path in squish.iterdir() if path.name.endswith(".ingot-partial")]
    first = {path.name: path.read_bytes() for path in squish.rglob("*.safetensors")}
    assert build(squish, tier, force=True).built
    assert {path.name: path.read_bytes() for path in squish.rglob("*.safetensors")} == first
    assert report.built
