"""Calibration against a plain computation on a model of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import ingot
from ingot.errors import IngotError
from ingot.model.statistics import Statistics
from ingot.runtime.calibration import calibrate as module
from ingot.runtime.calibration import calibrate_plan
from ingot.runtime.calibration.calibrate_plan import MemoryPlan
from ingot.runtime.calibration.samples import HELD_OUT, SEEDS, seeded

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def taken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("statistics") / "s.safetensors"
    ingot.calibrate(model, out, samples=10, length=16)
    return out


def test_they_are_those_of_a_plain_computation(model: Path, taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    own = module.Passes

    def passes(model: Any, work: Any, tokens: torch.Tensor, *args: Any) -> Any:
        seen.append(tokens)
        return own(model, work, tokens, *args)

    monkeypatch.setattr(module, "Passes", passes)
    ingot.calibrate(model, taken.parent / "again.safetensors", samples=10, length=16, fisher=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    inputs: list[torch.Tensor] = []
    plain.get_submodule(NAME.removesuffix(".weight")).register_forward_hook(lambda _, a, out: inputs.append(a[0]))
    with torch.no_grad():
        plain(seen[0])
    x = inputs[0].flatten(0, 1).double().numpy()
    with Statistics.open(taken.parent / "again.safetensors") as found, Statistics.open(taken) as weighed:
        of, fisher = found.for_matrix(NAME), weighed.for_matrix(NAME)
        assert of is not None
        assert fisher is not None
        assert of.count == 160
        assert of.outputs is None
        np.testing.assert_allclose(of.inputs, x.T @ x / len(x), rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(of.diagonal, np.square(x).mean(0), rtol=1e-3)
        np.testing.assert_allclose(of.absmax, np.abs(x).max(0), rtol=1e-4)
        np.testing.assert_allclose(of.means, x.mean(0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(fisher.diagonal, of.diagonal, rtol=1e-5)  # the same samples
        assert fisher.outputs is not None
        assert fisher.outputs.shape == (96, 96)
        assert (np.linalg.eigvalsh(fisher.outputs) > -1e-6).all()


def test_a_head_has_no_factor_of_its_outputs(model: Path, tmp_path: Path) -> None:
    ingot.calibrate(model, tmp_path / "s.safetensors", samples=8, length=16)
    with Statistics.open(tmp_path / "s.safetensors") as found:
        head = found.for_matrix("lm_head.weight")
        assert head is not None
        assert head.outputs is None  # as large as the vocabulary
        assert head.inputs is not None
        assert np.linalg.eigvalsh(head.inputs).min() > 0


def test_groups_under_a_ceiling_sum_up_the_same(
    model: Path, taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryPlan, "moment_bytes", lambda *_: 80_000)
    report = ingot.calibrate(model, tmp_path / "s.safetensors", samples=10, length=16)
    assert report.passes > 2
    with ingot.open(tmp_path / "s.safetensors") as found, ingot.open(taken) as whole:
        assert set(found) == set(whole)
        for name in whole:
            np.testing.assert_allclose(found[name].numpy(), whole[name].numpy(), rtol=1e-4, atol=1e-7)


def test_no_room_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_plan, "available_ram", lambda: 0)
    with pytest.raises(IngotError) as refused:
        ingot.calibrate(model, tmp_path / "s.safetensors", samples=2, length=4)
    assert refused.value.rule == "calibrate.ram"


def test_more_tokens_than_positions_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(IngotError) as refused:
        ingot.calibrate(model, tmp_path / "s.safetensors", length=33)
    assert refused.value.rule == "calibrate.length"


def test_nobody_calibrates_on_what_budgets_are_measured_on(model: Path, tmp_path: Path) -> None:
    """torch takes the lower 32 bits of a seed: no seed that is allowed has those of the windows held out."""
    with pytest.raises(IngotError) as refused:
        ingot.calibrate(model, tmp_path / "s.safetensors", seed=SEEDS)
    assert refused.value.rule == "calibrate.seed"
    assert HELD_OUT >= SEEDS
    drawn = []
    for seed in (HELD_OUT, HELD_OUT - SEEDS, HELD_OUT + 2 * SEEDS):
        with seeded(torch, seed):
            drawn.append(torch.randint(1 << 30, (8,)).tolist())
    assert drawn[0] != drawn[1]
    assert drawn[0] == drawn[2]


def test_damaged_weights_are_refused(model: Path, tmp_path: Path) -> None:
    with ingot.open(model) as checkpoint:
        weights = {name: tensor.numpy().copy() for name, tensor in checkpoint.items()}
    weights[NAME][:] = np.nan
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    ingot.save(tmp_path / "model.safetensors", weights)
    with pytest.raises(IngotError) as refused:
        ingot.calibrate(tmp_path, tmp_path / "s.safetensors", samples=2, length=4)
    assert refused.value.rule == "calibrate.value"
    assert not (tmp_path / "s.safetensors").exists()


def test_a_recipe_calibrates_by_itself(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command: no text, no statistics."""
    monkeypatch.setattr(module, "SAMPLES", 2)
    report = ingot.convert(model, tmp_path / "out.gguf", "q4_0-calibrated", keep_names=True)
    assert any("samples of the model" in note for note in report.notes)
    with ingot.open(tmp_path / "out.gguf") as found:
        assert found["model.layers.0.self_attn.q_proj.weight"].shape == (64, 64)


def test_an_importance_matrix_is_written_and_read(model: Path, tmp_path: Path) -> None:
    ingot.calibrate(model, tmp_path / "s.safetensors", samples=2, length=8, imatrix=tmp_path / "i.gguf")
    with (
        ingot.open(model) as checkpoint,
        Statistics.open(tmp_path / "s.safetensors") as own,
        Statistics.open(tmp_path / "i.gguf", checkpoint) as found,
    ):
        here, there = own.for_matrix(NAME), found.for_matrix(NAME)
        assert here is not None
        assert there is not None
        np.testing.assert_allclose(there.diagonal, here.diagonal, rtol=1e-5)
