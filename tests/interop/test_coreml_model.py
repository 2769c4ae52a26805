"""Full models as ML programs: coremltools loads them, and what they compute is what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.coreml.model import extract_model
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from tests.support.mil import Array, Program

pytest.importorskip("coremltools")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = Path(__file__).parents[3] / "shared" / "models" / "base"
CONTEXT = 32
TOKENS = 20
HIDDEN = -60000.0  # what a caller adds to scores that are not visible
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "head_dim": 12,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
BOTH = {"fullAttentionMask", "slidingAttentionMask"}
FULL = {"fullAttentionMask"}
# By test: the family, settings that differ, and the masks of the program.
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": ("Llama", {}, FULL),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, FULL),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, FULL),
    "mistral": ("Mistral", {"sliding_window": 5}, {"slidingAttentionMask"}),
    "mistral-wide": ("Mistral", {"sliding_window": CONTEXT}, FULL),
    "qwen2": ("Qwen2", {"hidden_size": 48}, FULL),
    "qwen2-sliding": (
        "Qwen2", {"hidden_size": 48, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, BOTH,
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, FULL),
    "gemma": ("Gemma", {}, FULL),
    "gemma2": ("Gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}, BOTH),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 6, "query_pre_attn_scalar": 24, "rope_parameters": LINEAR, "layer_types": TYPES}, BOTH,
    ),
}  # fmt: skip


def network(family: str, settings: dict[str, Any]) -> Any:
    """Return a model of transformers with random weights, biases and norms included."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    config._attn_implementation = "eager"  # the one with soft-capping
    torch.manual_seed(11)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            spread = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
            value.copy_(torch.randn_like(value) * spread + ("norm" in name and "emma" not in family))
    return model


def masks(program: Program, past: int, new: int, sliding: int | None) -> dict[str, Array]:
    """Return the masks as swift-transformers makes them."""
    queries, keys = np.arange(past, past + new)[:, None], np.arange(past + new)[None, :]
    full = keys <= queries
    visible = {"fullAttentionMask": full}
    visible["slidingAttentionMask"] = full & (keys > queries - (sliding or 1 << 30))
    names = {item.name for item in program.description.input} - {"inputIds"}
    return {name: np.where(visible[name], 0, HIDDEN).astype(np.float16)[None, None] for name in names}


def logits(program: Program, tokens: Array, steps: list[int], sliding: int | None = None) -> Array:
    """Continue from an empty cache by so many tokens at a time; return the logits of all."""
    program.reset()
    past, results = 0, []
    for new in steps:
        ids = tokens[:, past : past + new].astype(np.int32)
        results.append(program(inputIds=ids, **masks(program, past, new, sliding))["logits"])
        past += new
    return np.concatenate(results, axis=1)


def expected(model: Any, tokens: Array) -> Array:
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(tokens)).logits)


def close(result: Array, reference: Array) -> None:
    """Logits in f16 against f32: noise of a hundredth of their spread, and nearly always the same best token."""
    error = np.sqrt(np.mean((result.astype(np.float64) - reference) ** 2) / np.var(reference))
    assert error < 0.01, error
    assert (result.argmax(-1) == reference.argmax(-1)).mean() > 0.9


@pytest.fixture(scope="module")
def tokens() -> Array:
    return np.random.default_rng(3).integers(0, SIZES["vocab_size"], (1, TOKENS))


@pytest.mark.parametrize("name", MODELS)
def test_a_program_computes_what_transformers_computes(tokens: Array, tmp_path: Path, name: str) -> None:
    """A prompt at once, then token by token; in parts; and all at once: the cache must not change the logits."""
    family, settings, mask_names = MODELS[name]
    model = network(family, settings)
    model.save_pretrained(tmp_path / "model")
    extract_model(tmp_path / "model", tmp_path / "m.mlpackage", context=CONTEXT)
    program = Program(tmp_path / "m.mlpackage")
    assert {item.name for item in program.description.input} == {"inputIds", *mask_names}
    assert [item.name for item in program.description.state] == ["keyCache", "valueCache"]
    window = settings.get("sliding_window")
    window_key = "co.huggingface.exporters.sliding_window"
    limited = "slidingAttentionMask" in mask_names
    assert dict(program.description.metadata.userDefined) == ({window_key: str(window)} if limited else {})
    reference = expected(model, tokens)
    for steps in ([9] + [1] * (TOKENS - 9), [4, 7, 9], [TOKENS]):
        close(logits(program, tokens, steps, window), reference)


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2"])
def test_passes_of_coremltools_keep_the_logits(tokens: Array, tmp_path: Path, name: str) -> None:
    """coremltools understands states and sizes of the program as Ingot does: it rewrites operations around them."""
    family, settings, _ = MODELS[name]
    model = network(family, settings)
    model.save_pretrained(tmp_path / "model")
    extract_model(tmp_path / "model", tmp_path / "m.mlpackage", context=CONTEXT)
    program = Program(tmp_path / "m.mlpackage", rewritten=True)
    assert "select" in {op.op_type for op in program.function.operations}
    close(logits(program, tokens, [9, 3, *[1] * 8], settings["sliding_window"]), expected(model, tokens))


RECIPES = {
    "palette": {"codec": "palette", "options": {"bits": 4}},
    "blocks": {
        "codec": "affine",
        "options": {"bits": 4, "group": 16, "symmetric": True, "scales": "source", "quantizer": "absmax"},
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_program_computes_with_the_values_that_ingot_reads(
    tokens: Array, tmp_path: Path, recipe: str
) -> None:
    """Every matrix in 4 bits, the embeddings that are gathered included."""
    model = network("Qwen3", {"tie_word_embeddings": True, "head_dim": 16, "intermediate_size": 64})
    model.save_pretrained(tmp_path / "model")
    extract_model(tmp_path / "model", tmp_path / "m.mlpackage", context=CONTEXT)
    settings = RECIPES[recipe]
    rules = (Rule(Choice(settings["codec"], settings["options"]), "4 bits", min_ndim=2, match=("model_*",)),)
    report = ingot.convert(tmp_path / "m.mlpackage", tmp_path / "q.mlpackage", Recipe("q", rules))
    assert report.actions["encoded"] == 1 + 3 * 7
    parameters = dict(model.named_parameters())
    with ingot.open(tmp_path / "q.mlpackage") as package, torch.no_grad():
        for name, value in parameters.items():
            value.copy_(torch.from_numpy(package[name.replace(".", "_")].numpy("f32")))
    close(logits(Program(tmp_path / "q.mlpackage"), tokens, [9, 3, *[1] * 8]), expected(model, tokens))


def test_a_full_cache_is_used_to_its_last_position(tmp_path: Path) -> None:
    model = network("Llama", {})
    model.save_pretrained(tmp_path / "model")
    extract_model(tmp_path / "model", tmp_path / "m.mlpackage", context=CONTEXT)
    program = Program(tmp_path / "m.mlpackage")
    tokens = np.random.default_rng(4).integers(0, SIZES["vocab_size"], (1, CONTEXT))
    close(logits(program, tokens, [CONTEXT - 1, 1]), expected(model, tokens))
    assert all(cache.any(axis=(1, 2, 4)).all() for cache in program.states.values())


def test_a_residual_stream_beyond_f16_is_computed(tokens: Array, tmp_path: Path) -> None:
    """Gemma's hidden states exceed 65504, which f16 cannot hold."""
    model = network("Gemma3Text", {"sliding_window": 64})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight += 60000
    with torch.no_grad():
        states = model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
    assert max(float(item.abs().max()) for item in states[:-1]) > 65504
    model.save_pretrained(tmp_path / "model")
    extract_model(tmp_path / "model", tmp_path / "m.mlpackage", context=CONTEXT)
    close(logits(Program(tmp_path / "m.mlpackage"), tokens, [9, 11]), expected(model, tokens))


@pytest.mark.models
@pytest.mark.slow
def test_a_trained_model_gives_its_logits(tmp_path: Path) -> None:
    report = extract_model(BASE, tmp_path / "m.mlpackage", context=CONTEXT)
    assert {item.codec for item in report.tensors} == {"dense"}
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    tokens = np.random.default_rng(3).integers(0, 4096, (1, TOKENS))
    close(logits(Program(tmp_path / "m.mlpackage"), tokens, [12, *[1] * 8]), expected(model, tokens))


@pytest.mark.models
@pytest.mark.slow
def test_a_compressed_model_keeps_its_layouts_and_their_values(tmp_path: Path) -> None:
    """Palettes of f16, made in the checkpoint before: the program has them as they are, and their values."""
    recipe = Recipe(
        "p8",
        (
            Rule(Choice("palette", {"bits": 8}), "p8", roles=("attention", "mlp")),
            Rule(Choice("dense", {"dtype": "f16"}), "f16"),
        ),
    )
    ingot.convert(BASE, tmp_path / "f16", "f16", format="safetensors")
    ingot.convert(tmp_path / "f16", tmp_path / "p8", recipe)
    report = extract_model(tmp_path / "p8", tmp_path / "m.mlpackage", context=CONTEXT)
    assert [item.codec for item in report.tensors].count("palette") == 42
    assert all(item.action == "moved" for item in report.tensors)
    program = Program(tmp_path / "m.mlpackage")
    with ingot.open(tmp_path / "p8") as source, ingot.open(tmp_path / "m.mlpackage") as package:
        assert set(package) - {name.replace(".", "_") for name in source} == {"rope_cos", "rope_sin"}
        for name in source:
            value = source[name].numpy()
            np.testing.assert_array_equal(package[name.replace(".", "_")].numpy(), value)
            np.testing.assert_array_equal(program.constants[name.replace(".", "_")], value)
