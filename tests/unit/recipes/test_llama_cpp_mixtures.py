"""Mixtures of llama.cpp: the type of each tensor, fallbacks, and what files and reports say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.errors import UsageError
from ingot.model.statistics import Statistics
from ingot.quantization.entries import round_entries
from ingot.quantization.factors import factors_of
from ingot.recipes.choice import Choice
from ingot.recipes.llama_cpp_mixtures import NAMES, PRESETS, category_of, expand, facts_of, preset_toml
from ingot.recipes.load import load_recipe, parse_recipe, preset_text
from ingot.recipes.recipe import Recipe, resolve
from ingot.recipes.types import recipes_of_type
from tests.support import model_folder

Shapes = dict[str, tuple[int, ...]]

LLAMA_2_7B: dict[str, Any] = {"hidden": 4096, "inner": 11008, "heads": 32, "key_heads": 32, "layers": 32}
LLAMA_3_8B: dict[str, Any] = {"hidden": 4096, "inner": 14336, "heads": 32, "key_heads": 8, "layers": 32}
LLAMA_3_70B: dict[str, Any] = {"hidden": 8192, "inner": 28672, "heads": 64, "key_heads": 8, "layers": 80}

GGUF = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def llama(hidden: int, inner: int, heads: int, key_heads: int, layers: int, *, tied: bool = False) -> Shapes:
    key = hidden // heads * key_heads
    shapes: Shapes = {"model.embed_tokens.weight": (32000, hidden), "model.norm.weight": (hidden,)}
    shapes |= {} if tied else {"lm_head.weight": (32000, hidden)}
    for layer in range(layers):
        matrices = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes


def mixtral() -> Shapes:
    """Mixtral 8x7B as GGUF files have it, experts stacked."""
    shapes = gguf_names(llama(4096, 14336, 32, 8, 32))
    return {
        (name.replace(".weight", "_exps.weight") if "ffn_" in name and "norm" not in name else name): (
            (8, *shape) if "ffn_" in name and "norm" not in name else shape
        )
        for name, shape in shapes.items()
    }


def gguf_names(shapes: Shapes) -> Shapes:
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

    def rename(name: str) -> str:
        stem = name.removesuffix(".weight")
        if stem in ends:
            return f"{ends[stem]}.weight"
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{GGUF[module]}.weight"

    return {rename(name): shape for name, shape in shapes.items()}


def types_of(name: str, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the type of each tensor; ``f32`` for those that stay."""
    facts = facts_of(shapes, config, {})
    recipe = expand(load_recipe(name), facts)
    types = {}
    for tensor, shape in shapes.items():
        choice = resolve(recipe, tensor, shape, "f32", facts.layers).choice
        assert choice is None or isinstance(choice, Choice)
        types[tensor] = "f32" if choice is None else type_of(choice)
    return types


def type_of(choice: Choice) -> str:
    if choice.codec == "scaled_codebook":
        return {16: "nvfp4", 32: "mxfp4"}[choice.options["group"]]
    return str(choice.options.get("type") or choice.options["dtype"])


def config_of(sizes: Mapping[str, int], **more: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": sizes["heads"], "num_key_value_heads": sizes["key_heads"]}
    return {"model_type": "llama", **heads, **more}


# The counts of types that llama.cpp's loader prints for published files of these models.
@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("Q4_K_M", LLAMA_3_8B, {"f32": 65, "q4_k": 193, "q6_k": 33}),
        ("Q4_K_M", LLAMA_2_7B, {"f32": 65, "q4_k": 193, "q6_k": 33}),
        ("Q4_K_S", LLAMA_3_8B, {"f32": 65, "q4_k": 217, "q5_k": 8, "q6_k": 1}),
        ("Q5_K_M", LLAMA_3_8B, {"f32": 65, "q5_k": 193, "q6_k": 33}),
        ("Q5_K_S", LLAMA_3_8B, {"f32": 65, "q5_k": 225, "q6_k": 1}),
        ("Q3_K_M", LLAMA_2_7B, {"f32": 65, "q3_k": 129, "q4_k": 92, "q5_k": 4, "q6_k": 1}),
        ("Q3_K_S", LLAMA_2_7B, {"f32": 65, "q3_k": 225, "q6_k": 1}),
        ("Q3_K_L", LLAMA_2_7B, {"f32": 65, "q3_k": 129, "q5_k": 96, "q6_k": 1}),
        ("Q2_K", LLAMA_3_8B, {"f32": 65, "q2_k": 129, "q3_k": 64, "q4_k": 32, "q6_k": 1}),
        ("Q6_K", LLAMA_3_8B, {"f32": 65, "q6_k": 226}),
        ("Q8_0", LLAMA_3_8B, {"f32": 65, "q8_0": 226}),
        ("IQ4_XS-calibrated", LLAMA_3_8B, {"f32": 65, "iq4_xs": 193, "q5_k": 32, "q6_k": 1}),
        ("IQ4_XS", LLAMA_3_8B, {"f32": 65, "iq4_xs": 189, "q5_k": 36, "q6_k": 1}),
        ("IQ3_S", LLAMA_3_8B, {"f32": 65, "iq3_s": 193, "q4_k": 32, "q6_k": 1}),
        ("IQ3_M", LLAMA_3_8B, {"f32": 65, "iq3_s": 157, "q4_k": 68, "q6_k": 1}),
        ("IQ3_XXS-calibrated", LLAMA_3_8B, {"f32": 65, "iq3_xxs": 96, "iq2_s": 64, "iq3_s": 33, "q4_k": 32, "q5_k": 1}),
        ("IQ2_XS", LLAMA_3_8B, {"f32": 65, "iq2_xs": 188, "q2_k": 5, "q4_k": 32, "q5_k": 1}),
        ("IQ2_M", LLAMA_2_7B, {"f32": 65, "iq2_s": 156, "iq3_s": 69, "q5_k": 1}),
        ("IQ1_M", LLAMA_3_8B, {"f32": 65, "iq1_m": 156, "iq2_xxs": 32, "q2_k": 5, "q4_k": 32, "q5_k": 1}),
        ("TQ1_0", LLAMA_2_7B, {"f32": 65, "tq1_0": 224, "q4_k": 1, "q6_k": 1}),
        ("Q2_0", LLAMA_2_7B, {"f32": 65, "q2_0": 224, "q4_k": 1, "q6_k": 1}),
        ("Q1_0", LLAMA_2_7B, {"f32": 65, "q1_0": 225, "q6_k": 1}),
        ("NVFP4-calibrated", LLAMA_3_8B, {"f32": 65, "nvfp4": 225, "q6_k": 1}),
        ("Q4_K_M", LLAMA_3_70B, {"f32": 161, "q4_k": 441, "q5_k": 40, "q6_k": 81}),
    ],
)  # fmt: skip
def test_counts_of_types_are_those_of_llama_cpp(name: str, sizes: dict[str, Any], expected: dict[str, int]) -> None:
    assert Counter(types_of(name, llama(**sizes), config_of(sizes)).values()) == expected


def test_layers_that_get_more_bits() -> None:
    types = types_of("Q4_K_M", llama(**LLAMA_3_8B), config_of(LLAMA_3_8B))
    values = [layer for layer in range(32) if types[f"model.layers.{layer}.self_attn.v_proj.weight"] == "q6_k"]
    assert values == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    first = types_of("Q4_K_S", llama(**LLAMA_3_8B), config_of(LLAMA_3_8B))
    downs = [layer for layer in range(32) if first[f"model.layers.{layer}.mlp.down_proj.weight"] == "q5_k"]
    assert downs == [0, 1, 2, 3]


@pytest.mark.parametrize("preset", PRESETS)
def test_names_of_gguf_and_of_transformers_get_the_same_types(preset: str) -> None:
    """A quantizer works on the source's names, and the plan on those of the file."""
    shapes = llama(512, 768, 8, 2, 9)
    config = {"num_attention_heads": 8, "num_key_value_heads": 2}
    ours = types_of(preset, shapes, config)
    theirs = types_of(preset, gguf_names(shapes), config)
    assert list(ours.values()) == list(theirs.values())


def test_heads_are_counted_by_shapes_if_no_config_states_them() -> None:
    shapes = llama(**LLAMA_3_8B)
    for names in (shapes, gguf_names(shapes)):
        assert facts_of(names, {}, {}).shared_heads == 4
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 32, "llama.attention.head_count_kv": 16}
    assert facts_of(gguf_names(shapes), {}, metadata).shared_heads == 2


def test_eight_experts() -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
    types = types_of("Q4_K_M", mixtral(), config)
    for part, expected in (("attn_k", "q8_0"), ("attn_v", "q8_0"), ("attn_output", "q5_k"), ("ffn_gate_exps", "q4_k")):
        assert {types[f"blk.{layer}.{part}.weight"] for layer in range(32)} == {expected}
    assert types["blk.0.ffn_down_exps.weight"] == "q6_k"
    assert types["blk.4.ffn_down_exps.weight"] == "q4_k"
    experts = types_of("MXFP4_MOE", mixtral(), config)
    assert experts["blk.0.ffn_up_exps.weight"] == "mxfp4"
    assert experts["blk.0.attn_q.weight"] == experts["token_embd.weight"] == experts["output.weight"] == "q8_0"


def test_a_tied_embedding_has_the_type_of_the_head() -> None:
    shapes = llama(512, 768, 8, 2, 4, tied=True)
    assert types_of("Q4_K_M", shapes, {})["model.embed_tokens.weight"] == "q6_k"
    assert types_of("IQ2_XS", shapes, {})["model.embed_tokens.weight"] == "q5_k"
    assert types_of("Q4_K_M", llama(512, 768, 8, 2, 4), {})["model.embed_tokens.weight"] == "q4_k"


def test_rows_without_full_blocks_get_the_fallback_type() -> None:
    shapes = llama(288, 768, 6, 2, 8)
    types = types_of("Q4_K_M", shapes, {})
    assert types["model.layers.4.self_attn.q_proj.weight"] == "q5_0"
    assert types["model.layers.0.self_attn.v_proj.weight"] == "q8_0"
    assert types["model.layers.4.mlp.down_proj.weight"] == "q4_k"
    assert types["lm_head.weight"] == "q8_0"
    assert types_of("IQ2_XS", shapes, {})["model.layers.1.mlp.up_proj.weight"] == "iq4_nl"
    assert types_of("Q2_K", shapes, {})["model.layers.1.mlp.up_proj.weight"] == "q4_0"
    odd = types_of("Q4_K_M", llama(120, 200, 4, 2, 4), {})
    assert set(odd.values()) == {"f16", "f32"}


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("model.layers.3.self_attn.qkv_proj.weight", "attn_v"), ("transformer.h.3.attn.c_attn.weight", "attn_v"),
        ("transformer.h.3.attn.c_proj.weight", "attn_output"), ("transformer.h.3.mlp.c_proj.weight", "ffn_down"),
        ("model.layers.0.block_sparse_moe.experts.1.w2.weight", "ffn_down"), ("blk.0.attn_q_norm.weight", None),
        ("encoder.layer.1.attention.output.dense.weight", "attn_output"), ("blk.1.attn_v.bias", None),
        ("encoder.layer.1.output.dense.weight", "ffn_down"), ("model.layers.0.mlp.up_proj.weight", None),
        ("model.layers.0.mlp.shared_expert.down_proj.weight", "ffn_down"), ("blk.0.attn_k_b.weight", None),
        ("encoder.layer.1.attention.self.key.weight", "attn_k"), ("blk.2.ffn_down_shexp.weight", "ffn_down"),
    ],
)  # fmt: skip
def test_categories_of_tensors(name: str, category: str | None) -> None:
    assert category_of(name) == category


def test_a_file_has_the_types_and_the_number_of_the_mixture(tmp_path: Path) -> None:
    report = ingot.convert(folder(tmp_path, 256, 512), tmp_path / "x.gguf", recipe="q4_k_m")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.metadata["general.file_type"] == 15
        types = {name: tensor.params.get("type", tensor.dtype) for name, tensor in checkpoint.items()}
    assert (types["blk.0.attn_v.weight"], types["blk.1.attn_v.weight"]) == ("q4_k", "q6_k")
    assert (types["output.weight"], types["token_embd.weight"]) == ("q6_k", "q4_k")
    (note,) = [note for note in report.notes if note.startswith("types of the tensors")]
    assert "Q4_K 7" in note
    assert "Q6_K 2" in note
    assert not any("instead of" in note for note in report.notes)


def test_each_fallback_is_in_the_report(tmp_path: Path) -> None:
    report = ingot.convert(folder(tmp_path, 96, 200), tmp_path / "x.gguf", recipe="IQ3_S")
    fallbacks = [note for note in report.notes if "instead of" in note]
    parts = ("ffn_gate", "ffn_up", "attn_k", "attn_output", "attn_q", "attn_v")
    narrow = ("token_embd.weight", *(f"blk.*.{part}.weight" for part in parts))
    assert sorted(fallbacks) == [
        "F16 instead of IQ3_S, because 256 does not divide 200 columns: 2 tensors, blk.*.ffn_down.weight",
        "IQ4_NL instead of IQ3_S, because 256 does not divide 96 columns: 13 tensors, " + ", ".join(narrow),
        "Q8_0 instead of Q6_K, because 256 does not divide 96 columns: 1 tensor, output.weight",
    ]
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.metadata["general.file_type"] == 26  # no tensor has IQ3_S: it is what was asked for


def test_rules_of_a_file_come_before_those_of_its_mixture(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('mixture = "Q2_K"\n[[rules]]\nmatch = "*attn_q*"\nkeep = true\n')
    ingot.convert(folder(tmp_path, 256, 512), tmp_path / "x.gguf", recipe=recipe)
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint["blk.0.attn_q.weight"].codec == "dense"
        assert checkpoint["blk.0.ffn_down.weight"].params["type"] == "q3_k"


@pytest.mark.parametrize(
    "text",
    [
        'mixture = "Q9"', "mixture = 4", 'mixture = "TQ1_0"\nquantizer = "two-sided"', 'quantizer = "two-sided"',
        'mixture = "Q4_K_M"\nquantizer = 3',
    ],
)  # fmt: skip
def test_wrong_mixtures_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_recipe(text, location="x.toml")
    assert caught.value.rule == "recipe.mixture"


def test_a_mixture_is_no_type_of_a_budget() -> None:
    with pytest.raises(UsageError) as caught:
        recipes_of_type("Q4_K_M")
    assert caught.value.rule == "recipe.mixture"


def test_presets_are_recipes_that_can_be_edited() -> None:
    assert len(PRESETS) == 2 * len(NAMES) - 5
    for preset in PRESETS:
        recipe = parse_recipe(preset_toml(preset), location=preset)
        assert recipe.name == preset
        assert recipe.mixture == load_recipe(preset).mixture
        assert preset_text(preset.lower() if preset.lower() not in ("q2_k", "q6_k", "q8_0") else preset)
    assert load_recipe("q4_k_m-calibrated").name == "Q4_K_M-calibrated"
    assert load_recipe("q6_k").mixture is None  # the preset of this name is older


def test_fingerprints_tell_mixtures_apart() -> None:
    recipes: list[Recipe] = [load_recipe(preset) for preset in PRESETS]
    assert len({recipe.fingerprint() for recipe in recipes}) == len(recipes)


def folder(path: Path, hidden: int, inner: int) -> Path:
    """A random model of two layers."""
    config = {
        **model_folder.CONFIG, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2,
        "head_dim": hidden // 4,
    }  # fmt: skip
    random = np.random.default_rng(2)
    shapes = {**llama(hidden, inner, 4, 2, 2)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (model_folder.ROWS, hidden)
    tensors = {
        name: (random.standard_normal(shape) * 0.05 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    return model_folder.write(path / "model", config, tensors)


def test_a_calibrated_mixture_rounds_by_statistics_and_keeps_the_types(tmp_path: Path) -> None:
    model = folder(tmp_path, 256, 512)
    name = "model.layers.0.mlp.up_proj.weight"
    random = np.random.default_rng(5)
    inputs = (random.standard_normal((256, 256)) @ random.standard_normal((256, 600))).astype(np.float32)
    with ingot.open(model) as source:
        arrays = {
            f"{name}:inputs": inputs @ inputs.T / 600,
            f"{name}:in_sum2": np.square(inputs).mean(1),
            f"{name}:count": np.array([600]),
        }
        ingot.save(tmp_path / "s.safetensors", arrays, {"ingot.statistics": "1", "model": content_id(source)})
        weights = source[name].numpy("f32")
        with Statistics.open(tmp_path / "s.safetensors", source) as statistics:
            entry = statistics.for_matrix(name)
            assert entry is not None
            expected = round_entries(weights, "iq2_xs", factors_of(entry)).values()
    for preset in ("IQ2_XS", "IQ2_XS-calibrated"):
        known = {"calibration": tmp_path / "s.safetensors"} if preset.endswith("calibrated") else {}
        report = ingot.convert(model, tmp_path / f"{preset}.gguf", recipe=preset, **known)
        assert any(note.startswith("types of the tensors, by bytes: IQ2_XS") for note in report.notes)
        lacking = [note for note in report.notes if "without statistics" in note]
        assert ["model.embed_tokens.weight" in note for note in lacking] == [True] * len(known)
    with (
        ingot.open(tmp_path / "IQ2_XS.gguf") as plain,
        ingot.open(tmp_path / "IQ2_XS-calibrated.gguf") as rounded,
    ):
        assert {n: t.params for n, t in plain.items()} == {n: t.params for n, t in rounded.items()}
        assert rounded.metadata["general.file_type"] == 20
        assert np.array_equal(rounded["blk.0.ffn_up.weight"].numpy("f32"), expected)
        assert np.array_equal(rounded["token_embd.weight"].numpy("f32"), plain["token_embd.weight"].numpy("f32"))


@pytest.mark.parametrize(
    ("quantizer", "expected"), [("two-sided", "gptq"), ("importance", "importance"), ("awq", "importance")]
)
def test_a_calibrated_mixture_rounds_embedding_and_head_by_statistics_of_their_columns(
    quantizer: str, expected: str
) -> None:
    recipe = parse_recipe(f'mixture = "Q4_K_M"\nquantizer = "{quantizer}"', location="test")
    expanded = expand(recipe, facts_of(llama(512, 768, 8, 2, 4), {}, {}))
    ends = [rule.choice for rule in expanded.rules if {"embedding", "head"} & set(rule.roles)]
    quantizers = {choice.quantizer for choice in ends if isinstance(choice, Choice) and choice.codec != "dense"}
    assert quantizers == {expected}


def test_an_embedding_is_rounded_by_the_moment_of_its_gradients(tmp_path: Path) -> None:
    model = folder(tmp_path, 256, 512)
    name = "model.embed_tokens.weight"
    random = np.random.default_rng(6)
    gradients = (random.standard_normal((256, 256)) @ random.standard_normal((256, 600))).astype(np.float32)
    moment = gradients @ gradients.T / 600
    with ingot.open(model) as source:
        arrays = {
            f"{name}:inputs": moment,
            f"{name}:in_sum2": moment.diagonal().copy(),
            f"{name}:count": np.array([600]),
        }
        ingot.save(tmp_path / "s.safetensors", arrays, {"ingot.statistics": "1", "model": content_id(source)})
        weights = source[name].numpy("f32")
    errors = {}
    for preset in ("Q4_K_M", "Q4_K_M-calibrated"):
        options = {"calibration": tmp_path / "s.safetensors"} if preset.endswith("calibrated") else {}
        ingot.convert(model, tmp_path / f"{preset}.gguf", recipe=preset, **options)
        with ingot.open(tmp_path / f"{preset}.gguf") as checkpoint:
            change = checkpoint["token_embd.weight"].numpy("f32") - weights
            errors[preset] = float(np.vdot(change, change @ moment))
    assert errors["Q4_K_M-calibrated"] < 0.8 * errors["Q4_K_M"]
