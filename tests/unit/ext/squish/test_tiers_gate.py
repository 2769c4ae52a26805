"""The gate of packed tiers: which tensors get more bits, what is kept of it, and what happens when nothing passes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import CodecError, IngotError, ResourceError
from ingot.ext.squish.tiers.build import build
from ingot.ext.squish.tiers.choose import choose
from ingot.ext.squish.tiers.gate import ROUNDS, GateResult, gate_result_from_json
from ingot.ext.squish.tiers.status import TierStatus, status_of
from ingot.ext.squish.tiers.table import THREE_BIT
from ingot.stores.location import Location

MATRICES = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(8)]


def weights() -> dict[str, np.ndarray]:
    """Eight matrices, each with heavier tails than the one before, and one that 3 bits cannot keep."""
    rng = np.random.default_rng(5)
    found = {name: rng.standard_normal((64, 128)) for name in MATRICES}
    for index, name in enumerate(MATRICES):
        found[name][:, ::64] *= 1 + 0.3 * index
    found["model.layers.0.mlp.gate_proj.weight"] = rng.standard_normal((64, 128)) ** 3
    found["model.norm.weight"] = np.ones(64)
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in found.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    ingot.save(folder / "model.safetensors", weights())
    return folder


@pytest.fixture
def squish(original, tmp_path):
    ingot.convert(original, tmp_path / "squish", "int8", "npydir")
    return tmp_path / "squish"


def three_bit(folder: Path) -> TierStatus:
    return status_of(Location.parse(folder).store(), THREE_BIT)


def bits_of(tier: Path) -> dict[str, int]:
    with ingot.open(tier) as checkpoint:
        return {name: tensor.params["bits"] for name, tensor in checkpoint.items() if tensor.codec != "dense"}


@dataclass
class Counting:
    """A gate whose perplexity is 10, and a tenth more for each matrix of the eight at 3 bits."""

    max_rise: float = 0.05
    text: str = "a text"
    base: float = 10.0
    asked: list[int] = field(default_factory=list)

    def reference(self) -> float:
        return 10.0

    def perplexity(self, tier: Path) -> float:
        low = sum(bits_of(tier)[name] == 3 for name in MATRICES)
        self.asked.append(low)
        return self.base + 0.1 * low


def test_errors_of_the_tensors_decide_without_a_gate(squish):
    report = build(squish, "3bit", ungated=True)
    found = bits_of(Path(report.path))
    assert {found[name] for name in MATRICES} == {3}
    assert report.raised == ("model.layers.0.mlp.gate_proj.weight",)
    assert found[report.raised[0]] == 4
    assert report.gate is None
    assert three_bit(squish).raised == report.raised


def test_what_passes_at_once_is_left(squish):
    gate = Counting(max_rise=0.08)
    report = build(squish, "3bit", gate=gate)
    assert gate.asked == [8]
    assert report.gate == GateResult("a text", 0.08, 10.0, 10.8, 1)
    assert len(report.raised) == 1


def test_those_that_lose_most_get_more_bits(squish):
    """Five may stay at 3 bits; three halvings of eight find four."""
    gate = Counting(max_rise=0.0401)
    report = build(squish, "3bit", gate=gate)
    assert report.gate is not None
    assert report.gate.perplexity <= 10.4
    assert len(gate.asked) <= ROUNDS + 3
    with ingot.open(squish) as checkpoint:
        plain = {name: checkpoint[name].numpy("f32") for name in MATRICES}
    ingot.convert(squish, squish.parent / "three", "mlx-3bit", "mlx", allow_requantize=True, keep_names=True)
    with ingot.open(squish.parent / "three") as checkpoint:
        loss = {
            name: np.square(checkpoint[name].numpy("f32") - plain[name]).sum() / np.square(plain[name]).sum()
            for name in MATRICES
        }
    raised = [name for name in MATRICES if name in report.raised]
    kept = [name for name in MATRICES if name not in report.raised]
    assert len(kept) == 4
    assert min(loss[name] for name in raised) > max(loss[name] for name in kept)
    assert gate.asked[-1] == 4
    assert three_bit(squish).gate == report.gate


def test_a_tier_that_does_not_pass_is_removed(squish):
    with pytest.raises(CodecError) as caught:
        build(squish, "3bit", gate=Counting(base=11.0))
    assert caught.value.rule == "tier.gate"
    assert caught.value.exit_code == 1
    assert three_bit(squish).state == "missing"
    assert choose(squish, "mlx").tier.name == "tensors"


@pytest.mark.parametrize("found", [float("nan"), float("inf")])
def test_no_number_does_not_pass(squish, found):
    with pytest.raises(CodecError) as caught:
        build(squish, "4bit", gate=Counting(base=found))
    assert caught.value.rule == "tier.gate"


def test_a_tier_that_passed_is_built_anew_for_another_gate_only(squish):
    assert build(squish, "3bit", ungated=True).built
    assert build(squish, "3bit", gate=Counting(max_rise=0.1)).built
    assert not build(squish, "3bit", gate=Counting(max_rise=0.1)).built
    assert not build(squish, "3bit", gate=Counting(max_rise=0.09)).built
    assert build(squish, "3bit", gate=Counting(max_rise=0.01)).built
    assert build(squish, "3bit", gate=Counting(max_rise=0.1, text="another")).built
    assert not build(squish, "3bit").built


def test_a_gate_that_cannot_measure_leaves_what_was_there(squish):
    class Broken(Counting):
        def reference(self) -> float:
            raise ResourceError("no", rule="ram.guard")

    build(squish, "3bit", ungated=True)
    with pytest.raises(ResourceError):
        build(squish, "3bit", force=True, gate=Broken())
    assert three_bit(squish).usable


def test_exact_tiers_have_no_gate(squish):
    with pytest.raises(IngotError) as caught:
        build(squish, "bf16", gate=Counting())
    assert caught.value.rule == "tier.no-gate"


@pytest.mark.parametrize(
    "value", [None, [], {}, {"text": 1}, {"reference": 0.0}, {"perplexity": "x"}, {"rounds": True}]
)
def test_records_of_another_kind_are_none(squish, value):
    good = GateResult("t", 0.1, 10.0, 10.5, 2).to_json()
    assert gate_result_from_json(good) == GateResult("t", 0.1, 10.0, 10.5, 2)
    bad = {**good, **value} if value else value
    assert gate_result_from_json(bad) is None
    build(squish, "3bit", ungated=True)
    mark = squish / ".squish_3bit_ready"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "gate": bad, "raised": 7}))
    found = three_bit(squish)
    assert found.usable
    assert (found.raised, found.gate) == ((), None)


@pytest.mark.parametrize("shape", [(129, 96), (34, 32800)])
def test_runs_that_do_not_divide_the_elements_take_the_next_way(tmp_path, shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ingot.save(tmp_path / "m.safetensors", {"model.layers.0.mlp.up_proj.weight": values})
    report = ingot.convert(tmp_path / "m.safetensors", tmp_path / "squish", "squish-int3", "npydir")
    assert "int4" in report.tensors[0].rule
