"""Tiny random models of every family that transformers saves and mlx_lm has: the folders load, with equal logits.

A folder must have the names and shapes of the module's parameters, before ``sanitize`` and without weights. Packed
folders are converted back, and transformers computes the logits of the decoded weights.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array
from tests.support import model_folder

mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mlx.utils import tree_flatten  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [5, 9, 2, 30, 11, 7, 40, 200, 256, 31, 77, 3, 150, 99, 8, 61]
SIZES: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "head_dim": 16, "bos_token_id": None,
    "eos_token_id": 259, "pad_token_id": 257, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "moe_num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
}  # fmt: skip
"""Set where the family's config has the key."""
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GROUPS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAST: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {},
    "gpt2": GPT,
    "deepseek_v3": LATENT,
    "qwen3_next": LINEAR,
}
"""Run without ``-m slow``: stacks of experts, transposed matrices, split keys and values, convolutions and norms."""
PLAIN = (
    *("apertus", "cohere", "gemma", "gemma2", "glm4", "granite", "granitemoe", "helium", "hunyuan_v1_dense"),
    *("llama", "minimax_m2", "ministral3", "mistral", "mixtral", "mellum", "nemotron", "olmo2", "olmoe", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "ernie4_5", "exaone_moe"),
    *("laguna", "internlm3"),
)
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **FAST,
    **{name: {} for name in PLAIN},
    "afmoe": {**WINDOW, "num_dense_layers": 1},
    "cohere2": WINDOW,
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v32": INDEXED,
    "dots1": {**GROUPS, "n_shared_experts": 1},
    "exaone4": {**WINDOW, "sliding_window_pattern": 2},
    "gemma3_text": WINDOW,
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": INDEXED,
    "gpt_bigcode": GPT,
    "gpt_neox": {"intermediate_size": 256},
    "gpt_oss": {},
    "gptj": {**GPT, "rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1, "num_hidden_layers": 3,
    },
    "olmo3": WINDOW,
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
}  # fmt: skip
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "bitnet": ({}, "ternary"),
    "ernie4_5_moe": ({}, "choice of experts"),
    "llama4_text": ({}, "has no experts"),
    "mimo_v2_flash": ({}, "swa_head_dim"),
    "phimoe": ({}, "biases of attention"),
    "olmo": ({}, "embedding_size"),
}
"""Models that mlx_lm's module does not load, or computes without one of their tensors."""


def write_model(path: Path, family: str, settings: Mapping[str, Any]) -> Array:
    """Save a random model with a tokenizer and return its logits."""
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    defaults = config_class()
    sizes = {key: value for key, value in SIZES.items() if hasattr(defaults, key)}
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**sizes, **settings}), dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "A_log" in name:
                values.copy_(torch.rand(values.shape, generator=generator) + 0.1)
            elif "inv_freq" not in name and values.is_floating_point() and values.ndim:
                is_norm = values.ndim == 1 and name.endswith("weight") and "gemma" not in family
                values.copy_(0.1 * torch.randn(values.shape, generator=generator) + float(is_norm))
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(model_folder.tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps(model_folder.SETTINGS))
    return logits_of(path)


def logits_of(path: Path) -> Array:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].numpy()


def logits_in_mlx(path: Path) -> Array:
    model, _ = mlx_utils.load_model(path)
    return np.array(model(mx.array([PROMPT])).astype(mx.float32))[0]


def require_parameters(path: Path) -> None:
    """Compare names and shapes with a model that mlx_lm builds without weights."""
    config = mlx_utils.load_config(path)
    model_class, args_class = mlx_utils._get_classes(config)
    expected = dict(tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    with ingot.open(path) as checkpoint:
        written = {name: checkpoint[name].shape for name in checkpoint}
    if "lm_head.weight" not in written:  # tied, which some modules decide by the tensors
        expected.pop("lm_head.weight", None)
    frozen = {name for name in expected if name.endswith("._freqs")}
    assert written == {name: value.shape for name, value in expected.items() if name not in frozen}


def families(named: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in named]


@pytest.mark.parametrize("family", families(FAMILIES))
def test_a_family_loads(family: str, tmp_path: Path) -> None:
    logits = write_model(tmp_path / "model", family, FAMILIES[family])
    ingot.convert(tmp_path / "model", tmp_path / "dense", format="mlx")
    require_parameters(tmp_path / "dense")
    # gpt-oss: mlx_lm rounds the two ends of yarn's range of frequencies, transformers does not
    bound = 0.02 if family == "gpt_oss" else 0.002
    assert np.abs(logits_in_mlx(tmp_path / "dense") - logits).max() <= bound
    ingot.convert(tmp_path / "dense", tmp_path / "same", format="safetensors")
    with ingot.open(tmp_path / "model") as source, ingot.open(tmp_path / "same") as same:
        assert set(source) == set(same)
        for name in source:
            atol = 1e-6 if "norm" in name else 0.0  # 1 + w is rounded
            assert np.allclose(source[name].numpy("f32"), same[name].numpy("f32"), rtol=0, atol=atol), name


@pytest.mark.parametrize("family", families(FAMILIES))
def test_a_packed_family_loads(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", family, FAMILIES[family])
    ingot.convert(tmp_path / "model", tmp_path / "packed", "mlx-4bit", format="mlx")
    with ingot.open(tmp_path / "packed") as checkpoint:
        experts = [checkpoint[name].codec for name in checkpoint if ".switch_" in name and name.endswith(".weight")]
    assert set(experts) <= {"affine"}
    ingot.convert(tmp_path / "packed", tmp_path / "decoded", "decompress", format="safetensors")
    decoded, packed = logits_of(tmp_path / "decoded"), logits_in_mlx(tmp_path / "packed")
    # an expert that is chosen by the last bits of a score changes its row, and later rows by attention
    rows = np.abs(decoded - packed).max(axis=-1) > 0.02 * np.abs(decoded).max()
    assert rows.sum() <= (len(PROMPT) // 2 if experts else 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_mlx_lm_does_not_load_is_refused(family: str, tmp_path: Path) -> None:
    settings, message = REFUSED[family]
    write_model(tmp_path / "model", family, settings)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "model", tmp_path / "out", format="mlx")
    assert message in caught.value.message


@pytest.mark.slow
def test_a_differing_computation_is_noted(tmp_path: Path) -> None:
    """mlx_lm's jamba lets the weights of the chosen experts add up to 1."""
    settings = {
        "mamba_d_state": 16, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 8,
    }  # fmt: skip
    write_model(tmp_path / "model", "jamba", settings)
    report = ingot.convert(tmp_path / "model", tmp_path / "out", format="mlx")
    require_parameters(tmp_path / "out")
    assert any("jamba otherwise than transformers" in note for note in report.notes)


@pytest.mark.slow
def test_matrices_that_mlx_lm_needs_dense_are_not_packed(tmp_path: Path) -> None:
    settings = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
    logits = write_model(tmp_path / "model", "falcon_h1", settings)
    with pytest.raises(UnsupportedError, match="multiplies matrices"):
        ingot.convert(tmp_path / "model", tmp_path / "packed", "mlx-4bit", format="mlx")
    ingot.convert(tmp_path / "model", tmp_path / "dense", format="mlx")
    assert np.abs(logits_in_mlx(tmp_path / "dense") - logits).max() <= 0.002


def test_the_table_of_modules_is_that_of_mlx_lm() -> None:
    path = Path(__file__).parents[2] / "tools" / "mlx_table.py"
    spec = importlib.util.spec_from_file_location("mlx_table", path)
    assert spec is not None
    assert spec.loader is not None
    mlx_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mlx_table)
    written = mlx_table.TABLE.read_text()
    if json.loads(written)["version"] != version("mlx-lm"):
        pytest.skip("another release of mlx_lm")
    assert written == mlx_table.text(mlx_table.table())


@pytest.mark.slow
def test_a_gguf_file_of_gpt_oss_becomes_a_folder_for_mlx_lm(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    logits = write_model(tmp_path / "model", "gpt_oss", FAMILIES["gpt_oss"])
    ingot.convert(tmp_path / "model", tmp_path / "x.gguf")
    ingot.convert(tmp_path / "x.gguf", tmp_path / "mlx", format="mlx")
    require_parameters(tmp_path / "mlx")
    assert np.abs(logits_in_mlx(tmp_path / "mlx") - logits).max() <= 0.02  # as for the folder
    ingot.convert(tmp_path / "model", tmp_path / "direct", format="mlx")
    with ingot.open(tmp_path / "direct") as expected, ingot.open(tmp_path / "mlx") as result:
        assert all(np.array_equal(result[name].numpy("f32"), expected[name].numpy("f32")) for name in expected)
