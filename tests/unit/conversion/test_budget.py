"""Budgets: files within the target to the byte, made by a recipe that anybody can take again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.budget.report import BudgetReport
from ingot.conversion.budget.sensitivity import losses
from ingot.conversion.candidates import stored_rows
from ingot.conversion.options import ConvertOptions
from ingot.conversion.run import prepare
from ingot.errors import IngotError, UsageError
from ingot.model.calibration import Calibration
from ingot.model.statistics import Statistics
from ingot.recipes.choice import Choice
from ingot.recipes.load import load_recipe
from ingot.recipes.types import NAMES, recipes_of_type

LAYER = "model.layers.{}."
SHAPES = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (64, 64),
    "self_attn.v_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
}
UP = "model.layers.1.mlp.up_proj.weight"


def weights(*, tied: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    found = {"model.embed_tokens.weight": random.normal(size=(80, 64)).astype(np.float16)}
    for layer in range(2):
        for name, shape in SHAPES.items():
            found[LAYER.format(layer) + name] = random.normal(size=shape).astype(np.float16)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[LAYER.format(layer) + norm] = np.ones(64, np.float16)
    head = found["model.embed_tokens.weight"] if tied else random.normal(size=(80, 64)).astype(np.float16)
    return {**found, "model.norm.weight": np.ones(64, np.float16), "lm_head.weight": head}


def folder_of(path: Path, *, tied: bool = False) -> Path:
    path.mkdir()
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    more = {"num_key_value_heads": 4, "vocab_size": 80, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", **config, **more, "tie_word_embeddings": tied})
    )
    ingot.save(path / "model.safetensors", weights(tied=tied))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("budget") / "model")


def planned(model: Path, target: Path, **more: Any) -> tuple[int, BudgetReport]:
    with prepare(ConvertOptions(model, target, **more)) as prepared:
        assert prepared.budget is not None
        return prepared.plan.size, prepared.budget


def types_of(report: BudgetReport) -> Mapping[str, str]:
    return {name: group.type for group in report.groups for name in group.tensors}


def smallest(model: Path, target: Path, types: str) -> int:
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, target, target_size=1, types=types, no_tokenizer=True)
    assert refused.value.rule == "convert.budget"
    return int(refused.value.message.split("at least ")[1].split()[0])


@pytest.mark.parametrize(
    ("target", "types"),
    [("out.zt", "int2,int3,int4,int6"), ("out.gguf", "q4_0,q5_0,q8_0"), ("out.squizd", "int2-hybrid,keep")],
)
def test_files_are_within_the_target_and_no_step_more_would_be(
    model: Path, tmp_path: Path, target: str, types: str
) -> None:
    out = tmp_path / target
    size = smallest(model, out, types) + 7_001
    report = ingot.convert(model, out, target_size=size, types=types, no_tokenizer=True)
    assert report.budget is not None
    assert report.size == report.budget.size == out.stat().st_size <= size
    steps = [
        nbytes - group.nbytes
        for group in report.budget.groups
        for nbytes, loss in group.candidates.values()
        if loss < group.loss
    ]
    assert report.size + min(steps) > size - 64  # a better type of any one tensor; headers differ by some bytes


def test_the_recipe_makes_the_same_file_again(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "one.zt", target_bpw=5.5)
    path = tmp_path / "one.toml"
    assert report.budget is not None
    assert path.read_text() == report.budget.text
    assert {rule.label for rule in load_recipe(path).rules} <= {"as stored", *NAMES}
    ingot.convert(model, tmp_path / "two.zt", path, strict_recipe=True)
    assert (tmp_path / "two.zt").read_bytes() == (tmp_path / "one.zt").read_bytes()


def test_a_dry_run_writes_nothing_that_was_not_asked_for(model: Path, tmp_path: Path) -> None:
    size, report = planned(model, tmp_path / "out.zt", target_bpw=6)
    assert size == report.size
    assert not list(tmp_path.iterdir())
    planned(model, tmp_path / "out.zt", target_bpw=6, recipe_out=tmp_path / "own.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]


def test_a_target_that_cannot_be_met_names_the_smallest(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zt"
    least = smallest(model, out, "int3,int4")
    assert not list(tmp_path.iterdir())
    assert ingot.convert(model, out, target_size=least, types="int3,int4").size == least
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, out, target_size=least - 1, types="int3,int4", overwrite=True)
    assert refused.value.rule == "convert.budget"


def test_what_is_large_enough_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    assert set(types_of(planned(model, tmp_path / "out.zt", target_size="1GiB")[1]).values()) == {"as stored"}


@pytest.mark.parametrize(
    "more",
    [
        {"target_bpw": 4, "recipe": "int4"},
        {"target_bpw": 4, "target_size": 10_000},
        {"target_bpw": 4, "tp": 2},
        {"target_bpw": 0},
        {"target_bpw": float("nan")},
        {"types": "int4"},
        {"recipe_out": "own.toml"},
    ],
)
def test_options_that_contradict_each_other_are_refused(model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, tmp_path / "out.zt", **more)
    assert refused.value.rule == "convert.budget"


def test_a_recipe_that_is_there_is_not_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.toml").write_text("mine")
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, tmp_path / "out.zt", target_bpw=6)
    assert refused.value.rule == "target.exists"
    assert [path.name for path in tmp_path.iterdir()] == ["out.toml"]


def test_a_type_that_nobody_knows_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, tmp_path / "out.zt", target_bpw=6, types="int4,q4_l")
    assert refused.value.rule == "recipe.unknown"
    with pytest.raises(IngotError) as refused_too:
        ingot.convert(model, tmp_path / "out.zt", target_bpw=6, types="no-such.toml")
    assert refused_too.value.rule == "recipe.unknown"


def test_a_tied_head_has_the_embeddings_type(tmp_path: Path) -> None:
    tied = folder_of(tmp_path / "tied", tied=True)
    report = planned(tied, tmp_path / "out", format="zt", target_bpw=4, types="int2,int4,int8")[1]
    assert [group.tensors for group in report.groups if "lm_head.weight" in group.tensors] == [
        ("lm_head.weight", "model.embed_tokens.weight")
    ]


def test_matrices_that_servers_fuse_have_one_type(model: Path, tmp_path: Path) -> None:
    ingot.save(tmp_path / "s.safetensors", statistics(UP), {"ingot.statistics": "1"})
    fused = planned(
        model, tmp_path / "out", format="compressed-tensors", target_bpw=9, calibration=tmp_path / "s.safetensors"
    )[1]
    together = {group.tensors for group in fused.groups}
    assert tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "kqv") in {
        tuple(sorted(names)) for names in together
    }
    alone = planned(model, tmp_path / "out.zt", target_bpw=9, types="int4,int8")[1]
    assert all(len(group.tensors) == 1 for group in alone.groups)


def test_experts_of_a_layer_have_one_type_and_one_pattern(tmp_path: Path) -> None:
    random, name = np.random.default_rng(5), "model.layers.{}.mlp.experts.{}.up_proj.weight"
    experts = {name.format(*each): random.normal(size=(64, 64)).astype(np.float16) for each in np.ndindex(2, 6)}
    ingot.save(tmp_path / "m.safetensors", experts)
    report = ingot.convert(tmp_path / "m.safetensors", tmp_path / "out.zt", target_bpw=8.5, types="int3,int8")
    assert report.budget is not None
    assert sorted(types_of(report.budget).values()) == ["int3"] * 6 + ["int8"] * 6
    rules = load_recipe(tmp_path / "out.toml").rules
    assert {pattern for rule in rules for pattern in rule.match} == {name.format(layer, "*") for layer in range(2)}


def statistics(heavy: str, *, factors: bool = True) -> dict[str, np.ndarray]:
    """Statistics of all matrices in which one matters a hundred times as much as the others."""
    random, arrays = np.random.default_rng(2), dict[str, np.ndarray]()
    for name, matrix in weights().items():
        if matrix.ndim < 2 or name == "model.embed_tokens.weight":
            continue
        rows, cols = matrix.shape
        inputs, outputs = (random.normal(size=(size, 200)).astype(np.float32) for size in (cols, rows))
        arrays[f"{name}:in_sum2"] = np.square(inputs).mean(1)
        arrays[f"{name}:count"] = np.array([200])
        if factors:
            arrays[f"{name}:inputs"] = inputs @ inputs.T / 200
            if name != "lm_head.weight":
                arrays[f"{name}:outputs"] = (100 if name == heavy else 1) * 1e-3 * (outputs @ outputs.T / 200)
    return arrays


def test_what_matters_more_gets_more_bits(model: Path, tmp_path: Path) -> None:
    ingot.save(tmp_path / "s.safetensors", statistics(UP), {"ingot.statistics": "1"})
    types = "trellis3-calibrated,trellis4-calibrated,int6-calibrated"
    out = tmp_path / "out.zt"
    report = ingot.convert(model, out, target_bpw=4.6, types=types, calibration=tmp_path / "s.safetensors")
    assert report.budget is not None
    assert report.budget.absolute
    found = types_of(report.budget)
    assert found[UP] == "int6-calibrated"
    assert list(found.values()).count("int6-calibrated") < 6
    assert any("rounded by the statistics" in note for note in report.notes)
    assert out.stat().st_size == report.size <= report.budget.target


def test_statistics_are_of_use_to_types_without_a_quantizer(model: Path, tmp_path: Path) -> None:
    """Such a recipe alone would be refused beside --calibration."""
    ingot.save(tmp_path / "s.safetensors", statistics(UP), {"ingot.statistics": "1"})
    report = ingot.convert(
        model, tmp_path / "out.zt", target_bpw=4.6, types="int3,int4,int6", calibration=tmp_path / "s.safetensors"
    )
    assert report.budget is not None
    assert types_of(report.budget)[UP] == "int6"


def test_names_of_the_source_and_of_the_result_are_in_the_recipe(model: Path, tmp_path: Path) -> None:
    """A quantizer works under the source's names, blocks are made under those of the result."""
    ingot.save(tmp_path / "s.safetensors", statistics(UP), {"ingot.statistics": "1"})
    out = tmp_path / "out.gguf"
    options = {"types": "q4_0-calibrated,q8_0", "calibration": tmp_path / "s.safetensors", "no_tokenizer": True}
    report = ingot.convert(model, out, target_bpw=6.2, **options)
    assert report.budget is not None
    found = types_of(report.budget)
    assert report.size <= report.budget.target
    with ingot.open(out) as made:
        for name, kind in found.items():
            assert made[name].params.get("type") == kind.removesuffix("-calibrated"), name
    assert "q4_0-calibrated" in found.values()
    assert "blk.1.ffn_up.weight" in found


def test_the_estimate_is_the_divergence_to_second_order(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    matrix = random.normal(size=(12, 64)).astype(np.float32)
    inputs, outputs = (random.normal(size=(size, 500)).astype(np.float32) for size in (64, 12))
    a, g = inputs @ inputs.T / 500, 1e-4 * outputs @ outputs.T / 500
    name = "model.layers.0.mlp.up_proj.weight"
    arrays = {f"{name}:inputs": a, f"{name}:outputs": g}
    arrays |= {f"{name}:in_sum2": np.ascontiguousarray(a.diagonal()), f"{name}:count": np.array([500])}
    choice = Choice("affine", {"bits": 3, "group": 32, "quantizer": "mse"})
    ingot.save(tmp_path / "m.safetensors", {name: matrix})
    with ingot.open(tmp_path / "m.safetensors") as checkpoint:
        tensor = checkpoint[name]
        (found,) = losses([tensor], matrix.size, Statistics.in_memory(arrays), [choice]).by_choice
        (plain,) = losses([tensor], matrix.size, None, [choice]).by_choice
        error = stored_rows(tensor, choice, matrix) - matrix
    damped = [each + 0.01 * each.diagonal().mean() * np.eye(len(each)) for each in (a, g)]
    assert found is not None
    assert found.divergence == pytest.approx(0.5 * np.trace(damped[1] @ error @ damped[0] @ error.T), rel=1e-4)
    assert plain == (pytest.approx(matrix.size * np.square(error).sum() / np.square(matrix).sum()), None, None)


@pytest.mark.parametrize("name", [*NAMES, "int2-hybrid", "lossless"])
def test_every_type_is_a_recipe(name: str) -> None:
    for _, recipe in recipes_of_type(name):
        assert all(isinstance(rule.choice, Choice) for rule in recipe.rules)


def test_a_model_without_statistics_is_calibrated_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Collected(Calibration):
        def collect(self) -> Statistics:
            return Statistics.in_memory(statistics(UP))

        def run_by_layers(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the budget's statistics serve the conversion")

    def take(path: Any, **_: Any) -> Calibration:
        calls.append(path)
        return Collected()

    monkeypatch.setattr("ingot.conversion.round_by_layers._CALIBRATIONS", {"model": take})
    types = "trellis3-calibrated,trellis4-calibrated,int6-calibrated"
    report = ingot.convert(model, tmp_path / "out.zt", target_bpw=4.6, types=types)
    assert report.budget is not None
    assert types_of(report.budget)[UP] == "int6-calibrated"
    assert len(calls) == 1
