"""Recipes that turn a model or scale its channels before matrices are rounded, in any container."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import views
from ingot.artifacts.identity import content_id
from ingot.conversion.options import ConvertOptions
from ingot.conversion.planfile import plan_json
from ingot.conversion.run import prepare
from ingot.errors import IngotError
from ingot.model.statistics import Statistics
from ingot.recipes.load import parse_recipe
from ingot.recipes.recipe import Recipe

HIDDEN, MIDDLE, WORDS = 64, 96, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": WORDS,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LAYER = "model.layers.0"
MATRICES = {
    f"{LAYER}.self_attn.q_proj.weight": (64, HIDDEN),
    f"{LAYER}.self_attn.k_proj.weight": (32, HIDDEN),
    f"{LAYER}.self_attn.v_proj.weight": (32, HIDDEN),
    f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, 64),
    f"{LAYER}.mlp.gate_proj.weight": (MIDDLE, HIDDEN),
    f"{LAYER}.mlp.up_proj.weight": (MIDDLE, HIDDEN),
    f"{LAYER}.mlp.down_proj.weight": (HIDDEN, MIDDLE),
}
OTHERS = {
    "model.embed_tokens.weight": (WORDS, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
}
RECIPE = """
{rotate}
[[rules]]
roles = ["attention", "mlp"]
min_ndim = 2
codec = "{codec}"
options = {options}
quantizer = "{quantizer}"
"""
TURN = "[rotate]\nr1 = true\nr2 = true"
INT8 = ("affine", "{ bits = 8, group = 32 }")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random = np.random.default_rng(1)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in {**OTHERS, **MATRICES}.items()}
    ingot.save(folder / "f32.safetensors", arrays)
    ingot.convert(folder / "f32.safetensors", folder / "model.safetensors", "bf16")
    (folder / "f32.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def statistics(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, random = tmp_path_factory.mktemp("statistics") / "s.safetensors", np.random.default_rng(2)
    arrays = {}
    for name, (_, cols) in MATRICES.items():
        x = (random.normal(size=(cols, 300)) * np.exp(2 * random.normal(size=(cols, 1)))).astype(np.float32)
        arrays |= {f"{name}:inputs": x @ x.T / 300, f"{name}:in_sum2": np.square(x).mean(1)}
        arrays[f"{name}:count"] = np.array([300])
    with ingot.open(model) as checkpoint:
        ingot.save(path, arrays, {"ingot.statistics": "1", "model": content_id(checkpoint)})
    return path


def recipe(quantizer: str, rotate: str = "", codec: str = INT8[0], options: str = INT8[1]) -> Recipe:
    text = RECIPE.format(rotate=rotate, codec=codec, options=options, quantizer=quantizer)
    return parse_recipe(text, location="test")


def products(folder: Path) -> dict[str, np.ndarray]:
    """Return products of neighbours, which folding leaves as they are, in the original's terms."""
    with ingot.open(folder) as found:
        w = {name: found[name].numpy("f32").astype(np.float64) for name in found}
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"]) * w["model.norm.weight"]
    layer = {name.removeprefix(f"{LAYER}."): values for name, values in w.items()}
    normed = layer["self_attn.v_proj.weight"] * layer["input_layernorm.weight"]
    up = layer["mlp.up_proj.weight"] * layer["post_attention_layernorm.weight"]
    embedding = w["model.embed_tokens.weight"].T
    return {
        "first words": head @ embedding,
        "values": head @ layer["self_attn.o_proj.weight"][:, :32] @ normed @ embedding,
        "network": head @ layer["mlp.down_proj.weight"] @ up @ embedding,
        "queries": layer["self_attn.q_proj.weight"] * layer["input_layernorm.weight"] @ embedding,
    }


@pytest.mark.parametrize("rotate", ["", TURN], ids=["", "turned"])
@pytest.mark.parametrize("quantizer", ["awq", "awq+two-sided", "gptq"])
def test_what_is_stored_computes_the_same(
    model: Path, statistics: Path, tmp_path: Path, quantizer: str, rotate: str
) -> None:
    report = ingot.convert(model, tmp_path / "out", recipe(quantizer, rotate), calibration=statistics)
    assert any("channel scales" in note for note in report.notes) is quantizer.startswith("awq")
    assert any("residual stream rotated: Hadamard 64" in note for note in report.notes) is bool(rotate)
    found, wanted = products(tmp_path / "out"), products(model)
    for name, values in wanted.items():
        assert np.abs(found[name] - values).max() < 0.03 * np.abs(values).max(), name
    with ingot.open(tmp_path / "out") as out:
        assert {tensor.dtype for tensor in out.values()} == {"bf16"}
        assert all((tensor.codec == "affine") is (name in MATRICES) for name, tensor in out.items())
        assert ("lm_head.weight" in out) is bool(rotate)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is not bool(rotate)


@pytest.mark.parametrize("target", ["out.gguf", "mlx", "gptq", "compressed-tensors"])
def test_every_container_has_it(model: Path, statistics: Path, tmp_path: Path, target: str) -> None:
    pytest.importorskip("gguf")
    asked = recipe("awq", TURN, options="{ bits = 4, group = 32 }")
    place = tmp_path / target
    ingot.convert(model, tmp_path / "plain", asked, calibration=statistics)
    format = None if "." in target else target
    ingot.convert(model, place, asked, calibration=statistics, format=format, no_tokenizer=True)
    if "." in target:
        ingot.convert(place, tmp_path / "back", format="safetensors")
        place = tmp_path / "back"
        assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is False
    found, wanted = products(place), products(tmp_path / "plain")
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=0.02 * np.abs(values).max())


def test_scales_lower_the_error_that_they_are_chosen_by(model: Path, statistics: Path, tmp_path: Path) -> None:
    wide = "{ bits = 3, group = 64 }"
    error = {}
    for quantizer in ("importance", "awq"):
        ingot.convert(model, tmp_path / "out.zt", recipe(quantizer, "", "affine", wide), calibration=statistics)
        report = ingot.convert(
            model, tmp_path / quantizer, recipe(quantizer, "", "affine", wide), calibration=statistics
        )
        line = next(note for note in report.notes if "error under them" in note)
        error[quantizer] = float(line.partition("error under them ")[2].partition("%")[0])
        (tmp_path / "out.zt").unlink()
    assert error["awq"] < 0.95 * error["importance"]


def test_a_rotation_needs_no_rule_and_no_statistics(model: Path, tmp_path: Path) -> None:
    asked = parse_recipe("[rotate]\nr1 = true\nseed = 4", location="test")
    ingot.convert(model, tmp_path / "out", asked, format="safetensors")
    with ingot.open(model) as checkpoint, ingot.open(tmp_path / "out") as found:
        view = views.rotate(checkpoint, seed=4)
        assert sorted(view) == sorted(found)
        assert all(np.array_equal(view[name].numpy(), found[name].numpy()) for name in view)
    assert asked.fingerprint() != parse_recipe("[rotate]\nr1 = true", location="test").fingerprint()


def test_the_option_is_short_for_the_table(model: Path, tmp_path: Path) -> None:
    for out, asked, rotate in (("table", parse_recipe(TURN, location="test"), None), ("option", None, "r2, r1")):
        ingot.convert(model, tmp_path / out, asked, format="safetensors", rotate=rotate)
    names = sorted(path.name for path in (tmp_path / "table").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "option").iterdir())
    assert all((tmp_path / "table" / name).read_bytes() == (tmp_path / "option" / name).read_bytes() for name in names)
    for more in (
        {"rotate": "r3"},
        {"rotate": "r1,r1"},
        {"rotate": ""},
        {"rotate": "r1", "recipe": recipe("gptq", TURN)},
    ):
        with pytest.raises(IngotError) as refused:
            ingot.convert(model, tmp_path / "no.zt", **more)
        assert refused.value.rule == "recipe.rotate"
    with pytest.raises(IngotError) as refused:
        ingot.convert(model, tmp_path / "no.zt", rotate="r1", target_bpw=9.0)
    assert refused.value.rule == "convert.budget"


def test_without_statistics_of_a_group_it_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    known = Statistics.in_memory({f"{LAYER}.mlp.down_proj.weight:{key}": values for key, values in (
        ("in_sum2", np.ones(MIDDLE, np.float32)), ("count", np.array([3])),
    )})  # fmt: skip
    report = ingot.convert(model, tmp_path / "out.zt", recipe("awq"), calibration=known, keep_names=True)
    assert any("without statistics" in note for note in report.notes)
    name = f"{LAYER}.input_layernorm.weight"
    with ingot.open(tmp_path / "out.zt") as found, ingot.open(model) as checkpoint:
        assert np.array_equal(found[name].numpy("f32"), checkpoint[name].numpy("f32"))


def test_plans_and_budgets_refuse_it(model: Path, statistics: Path, tmp_path: Path) -> None:
    options = ConvertOptions(model, tmp_path / "out.zt", parse_recipe("[rotate]\nr2 = true", location="test"))
    with prepare(options) as prepared, pytest.raises(IngotError) as refused:
        plan_json(prepared, options)
    assert refused.value.rule == "plan.quantizer"
    (tmp_path / "own.toml").write_text("[rotate]\nr1 = true")
    with pytest.raises(IngotError) as refused:
        ingot.convert(model, tmp_path / "o.zt", target_bpw=9.0, types=[str(tmp_path / "own.toml")])
    assert refused.value.rule == "recipe.rotate"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[rotate]", "recipe.rotate"),
        ("[rotate]\nr1 = false", "recipe.rotate"),
        ("[rotate]\nr1 = 1", "recipe.type"),
        ("[rotate]\nr1 = true\nseed = -1", "recipe.type"),
        ("[rotate]\nr3 = true", "recipe.unknown-key"),
        ("rotate = true", "recipe.type"),
    ],
)
def test_recipes_are_read_strictly(text: str, rule: str) -> None:
    with pytest.raises(IngotError) as refused:
        parse_recipe(text, location="test")
    assert refused.value.rule == rule
