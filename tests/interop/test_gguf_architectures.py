"""Tiny models of transformers' own classes: to GGUF and back, with the files that Ingot keeps there and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ingot
from ingot.errors import UnsupportedError
from tests.support.entries import stored_entries

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 64, "head_dim": 8, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4,
    "partial_rotary_factor": 0.75, "long_factor": [1.08, 2.5, 4.0], "short_factor": [1.0, 1.02, 1.3],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": {**SPARSE, "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "phi3": {"original_max_position_embeddings": 4, "rope_parameters": LONG},
    "starcoder2": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 16,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 24.0},
    },
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
}
PADDED = {
    "roberta": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"<s>": 0, "<pad>": 1, "</s>": 2, "a": 3, "b": 4}, "merges": []},
    },
    "xlm-roberta": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": 3,
            "vocab": [["<s>", 0.0], ["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0]],
        },
    },
}
STATED = {
    "mistral": ("sliding_window 16",),
    "deepseek_v2": ("topk_method group_limited_greedy",),
    "bert": ("no pooling type",),
}
"""What llama.cpp computes otherwise of these models, which a note names."""
TOKENS = torch.tensor([[5, 9, 2, 30, 11, 7, 40]])


def model_of(kind: str, path: Path, **more: Any) -> Path:
    """Save a random model in bf16, whose parameters are no numbers that a class begins with."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind], **more})
    torch.manual_seed(3)
    auto = transformers.AutoModel if "bert" in kind else transformers.AutoModelForCausalLM
    made = auto.from_config(config, dtype=torch.bfloat16)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(path)
    return path


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with ingot.open(path) as checkpoint:
        return {name: (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in checkpoint.items()}


def outputs(path: Path) -> Any:
    encodes = "bert" in (path / "config.json").read_text().lower()
    auto = transformers.AutoModel if encodes else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return loaded(TOKENS)[0]


def to_gguf(model: Path, target: Path, **options: Any) -> Any:
    """Convert a model that has no tokenizer."""
    return ingot.convert(model, target, no_tokenizer=True, **options)


def as_others_write(source: Path, target: Path) -> Path:
    """Leave out the files that Ingot keeps in a GGUF file's metadata."""
    with ingot.open(source) as checkpoint:
        kept = {key: value for key, value in checkpoint.metadata.items() if "companion" not in key}
        ingot.save(target, dict(checkpoint), kept)
    return target


@pytest.mark.parametrize("kind", sorted({*MODELS} - {*PADDED}))
def test_a_model_comes_back_from_gguf(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, tmp_path / "model")
    report = to_gguf(model, tmp_path / "x.gguf")
    poolers = {name for name in stored(model) if name.startswith("pooler.")}
    assert set(report.superseded) == poolers
    notes = [note for note in report.notes if "pooler.dense" not in note and "no tokenizer" not in note]
    assert "names of llama.cpp" in notes[0]
    assert [word for note in notes[1:] for word in STATED.get(kind, ()) if word in note] == [*STATED.get(kind, ())]
    assert len(notes) == 1 + len(STATED.get(kind, ())), notes
    wanted = {name: entry for name, entry in stored(model).items() if not name.startswith("pooler.")}
    config = json.loads((model / "config.json").read_text())

    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert stored(tmp_path / "back") == wanted
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config

    ingot.convert(as_others_write(tmp_path / "x.gguf", tmp_path / "y.gguf"), tmp_path / "own", format="safetensors")
    found = json.loads((tmp_path / "own" / "config.json").read_text())
    assert stored(tmp_path / "own") == wanted
    found |= {key: found["num_experts"] for key in ("num_local_experts",) if kind == "qwen3_moe"}
    if kind != "mistral":  # which llama.cpp takes for a llama
        carried = found.keys() & config.keys() - {"rope_parameters"}
        assert {key: found[key] for key in carried} == {key: config[key] for key in carried}
        assert torch.equal(outputs(tmp_path / "own"), outputs(model))


@pytest.mark.parametrize("kind", sorted(PADDED))
def test_positions_begin_behind_padding(kind: str, tmp_path: Path) -> None:
    """llama.cpp has no rows for those before, which no token but padding has: zeros come back."""
    model = model_of(kind, tmp_path / "model")
    (model / "tokenizer.json").write_text(json.dumps(PADDED[kind]))
    name = "embeddings.position_embeddings.weight"
    report = to_gguf(model, tmp_path / "x.gguf")
    assert any("first 2 rows of position_embd.weight" in note for note in report.notes)
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    wanted, config = stored(model), json.loads((model / "config.json").read_text())
    with ingot.open(model) as source:
        positions = source[name].numpy("f32")
    assert np.array_equal(read["position_embd.weight"], positions[2:])
    with ingot.open(tmp_path / "x.gguf") as made:
        assert made.metadata["bert.context_length"] == len(positions) - 2
        assert made.metadata["bert.attention.causal"] is False
    as_others_write(tmp_path / "x.gguf", tmp_path / "y.gguf")
    for source_name, target in (("x.gguf", "back"), ("y.gguf", "own")):
        ingot.convert(tmp_path / source_name, tmp_path / target, format="safetensors")
        found = stored(tmp_path / target)
        assert found.keys() == {entry for entry in wanted if not entry.startswith("pooler.")}
        assert [entry for entry in found if found[entry] != wanted[entry]] == [name]
        with ingot.open(tmp_path / target) as made:
            assert np.array_equal(made[name].numpy("f32")[2:], positions[2:])
            assert not made[name].numpy("f32")[:2].any()
        own = json.loads((tmp_path / target / "config.json").read_text())
        assert {key: own[key] for key in own.keys() & config.keys()} == {
            key: config[key] for key in own.keys() & config
        }
        assert torch.equal(outputs(tmp_path / target), outputs(model))


@pytest.mark.parametrize(("change", "rule"), [
    ({"pad_token_id": 63}, "architecture.config"), ({"pad_token_id": -1}, "architecture.config"),
    ({"pad_token_id": 1 << 31}, "architecture.config"),
    ({"pad_token_id": 63, "max_position_embeddings": 600}, "model.shape"),
])  # fmt: skip
def test_padding_that_leaves_no_positions_is_refused(change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    model = model_of("roberta", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError) as caught:
        to_gguf(model, tmp_path / "x.gguf")
    assert caught.value.rule == rule


def edited(source: Path, target: Path, changes: dict[str, Any], **tensors: Any) -> Path:
    """Write a GGUF file again with other metadata and tensors; None leaves one out."""
    with ingot.open(source) as checkpoint:
        given = {name.replace("__", "."): value for name, value in tensors.items()}
        found = {name: value for name, value in {**checkpoint, **given}.items() if value is not None}
        ingot.save(target, found, {**checkpoint.metadata, **changes})
    return target


def test_factors_of_longrope_are_tensors_there(tmp_path: Path) -> None:
    model = model_of("phi3", tmp_path / "model")
    to_gguf(model, tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    names = gguf.TENSOR_NAMES
    wanted = {
        f"{names[getattr(gguf.MODEL_TENSOR, f'ROPE_FACTORS_{kind.upper()}')]}.weight": LONG[f"{kind}_factor"]
        for kind in ("long", "short")
    }
    found = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope")}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], np.float32(wanted[name])) for name in wanted)
    said = {key: reader.get_field(key).contents() for key in reader.fields if key.startswith("phi3.rope")}
    assert said["phi3.rope.scaling.original_context_length"] == 4
    assert said["phi3.rope.scaling.attn_factor"] == pytest.approx((1 + np.log(64 / 4) / np.log(4)) ** 0.5)
    assert (said["phi3.rope.scaling.type"], said["phi3.rope.dimension_count"]) == ("longrope", 6)

    # what the file has by now counts
    factors = np.float32([3, 2, 1])
    edited(tmp_path / "x.gguf", tmp_path / "y.gguf", {}, rope_factors_long__weight=factors)
    report = ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert any("rope_parameters" in note for note in report.notes)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["rope_parameters"]["long_factor"] == [3.0, 2.0, 1.0]
    assert "rope_scaling" not in config


def test_longrope_as_its_first_files_spell_it(tmp_path: Path) -> None:
    model = model_of("phi3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    old = {**{key: LONG[key] for key in ("long_factor", "short_factor")}, "type": "su"}
    del config["rope_parameters"]
    config |= {"rope_scaling": old, "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    (model / "config.json").write_text(json.dumps(config))
    to_gguf(model, tmp_path / "x.gguf")
    report = ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert set(report.superseded) == {"rope_factors_long.weight", "rope_factors_short.weight"}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    with ingot.open(tmp_path / "x.gguf") as made:
        assert made["rope_factors_long.weight"].shape == (3,)


@pytest.mark.parametrize(
    "change", [{"long_factor": [1.0]}, {"short_factor": "x"}, {"long_factor": [1.0, 0.0, True]}, {"factor": "y"}]
)
def test_longrope_that_is_none_is_told(change: dict[str, Any], tmp_path: Path) -> None:
    model = model_of("phi3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_parameters": {**LONG, **change}}))
    report = to_gguf(model, tmp_path / "x.gguf")
    assert any("longrope" in note for note in report.notes)
    with ingot.open(tmp_path / "x.gguf") as made:
        assert "rope_factors_long.weight" not in made


def test_half_of_longrope_is_refused(tmp_path: Path) -> None:
    to_gguf(model_of("phi3", tmp_path / "model"), tmp_path / "x.gguf")
    edited(tmp_path / "x.gguf", tmp_path / "z.gguf", {}, rope_factors_long__weight=None)
    as_others_write(tmp_path / "z.gguf", tmp_path / "y.gguf")
    with pytest.raises(UnsupportedError, match=r"rope_factors_short\.weight") as caught:
        ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert caught.value.rule == "account.lost"
    report = ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors", drop=["rope_factors_*"])
    assert set(report.dropped) == {"rope_factors_short.weight"}


def packed_oss(path: Path) -> Path:
    """gpt-oss as it is published: experts in MXFP4, turned."""
    options = '{ table = "f4_e2m1fn", group = 32, scales = "f8_e8m0fnu", transposed = true }'
    rule = f'match = ["*experts.*_proj"]\ncodec = "scaled_codebook"\noptions = {options}'
    path.mkdir()
    (path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(model_of("gpt_oss", path / "plain"), path / "zt", path / "r.toml", format="zt")
    ingot.convert(path / "zt", path / "oss", format="mxfp4")
    return path / "oss"


def test_experts_of_gpt_oss_move_in_blocks_and_come_back_as_they_were(tmp_path: Path) -> None:
    model = packed_oss(tmp_path / "made")
    report = to_gguf(model, tmp_path / "x.gguf")
    assert report.actions["repacked"] == 6
    assert "decoded" not in report.actions
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    with ingot.open(model) as source:
        experts = source["model.layers.1.mlp.experts.gate_up_proj"].numpy("f32")
        bias = source["model.layers.1.mlp.experts.gate_up_proj_bias"].numpy("f32")
    for start, part in enumerate(("gate", "up")):
        stacked = read[f"blk.1.ffn_{part}_exps.weight"]
        assert stacked.tensor_type == gguf.GGMLQuantizationType.MXFP4
        found = gguf.quants.dequantize(stacked.data, stacked.tensor_type)
        assert np.array_equal(found.reshape(4, 64, 32), experts[..., start::2].swapaxes(1, 2))
        assert np.array_equal(read[f"blk.1.ffn_{part}_exps.bias"].data, bias[:, start::2])
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="mxfp4")
    assert stored_entries(tmp_path / "back") == stored_entries(model)


def test_experts_of_gpt_oss_are_what_mlx_lm_makes_of_them(tmp_path: Path) -> None:
    mx, gpt_oss = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.models.gpt_oss")
    model = packed_oss(tmp_path / "made")
    assert set(ingot.convert(model, tmp_path / "mlx", format="mlx").actions) == {"moved"}
    weights = {name: value for path in model.glob("*.safetensors") for name, value in mx.load(str(path)).items()}
    wanted = gpt_oss.Model.sanitize(None, weights)
    found = {
        name: value for path in (tmp_path / "mlx").glob("*.safetensors") for name, value in mx.load(str(path)).items()
    }
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)
    ingot.convert(tmp_path / "mlx", tmp_path / "back", format="mxfp4")
    assert stored_entries(tmp_path / "back") == stored_entries(model)


def test_experts_of_gpt_oss_are_matrices_of_their_own_for_compressed_tensors(tmp_path: Path) -> None:
    model = packed_oss(tmp_path / "made")
    assert set(ingot.convert(model, tmp_path / "ct", format="compressed-tensors").actions) == {"moved"}
    with ingot.open(model) as source, ingot.open(tmp_path / "ct") as made:
        experts = source["model.layers.0.mlp.experts.gate_up_proj"].numpy("f32")
        found = made["model.layers.0.mlp.experts.2.up_proj.weight"]
        assert found.codec == "scaled_codebook"
        assert np.array_equal(found.numpy("f32"), experts[2, :, 1::2].T)
    ingot.convert(tmp_path / "ct", tmp_path / "back", format="mxfp4")
    assert stored_entries(tmp_path / "back") == stored_entries(model)


def test_keys_and_values_of_deepseek_have_matrices_of_their_own_there(tmp_path: Path) -> None:
    model = model_of("deepseek_v3", tmp_path / "model")
    to_gguf(model, tmp_path / "x.gguf")
    heads, latent = 4, LATENT["kv_lora_rank"]
    with ingot.open(model) as source, ingot.open(tmp_path / "x.gguf") as made:
        rows = source["model.layers.0.self_attn.kv_b_proj.weight"].numpy("f32").reshape(heads, 16 + 12, latent)
        assert np.array_equal(made["blk.0.attn_k_b.weight"].numpy("f32"), rows[:, :16].swapaxes(1, 2))
        assert np.array_equal(made["blk.0.attn_v_b.weight"].numpy("f32"), rows[:, 16:])
        assert made["blk.1.exp_probs_b.bias"].dtype == "f32"
        said = {key.removeprefix("deepseek2."): value for key, value in made.metadata.items()}
    assert said["attention.head_count_kv"] == 1
    assert (said["attention.key_length"], said["attention.value_length"]) == (latent + 8, latent)
    assert (said["attention.key_length_mla"], said["attention.value_length_mla"]) == (16 + 8, 12)
    assert said["expert_gating_func"] == 2
    assert said["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)


def test_packed_keys_and_values_stay_whole(tmp_path: Path) -> None:
    """Keys have to be transposed to be split, which packed codes cannot be: llama.cpp's older layout holds them."""
    sizes = {
        "qk_rope_head_dim": 32,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "moe_intermediate_size": 32,
        "v_head_dim": 16,
    }
    model = model_of("deepseek_v3", tmp_path / "model", **sizes)
    options = 'codec = "affine"\noptions = { bits = 4, group = 32, signed = false, zero_point = 8, scales = "f16" }'
    rule = f'match = ["*_proj*.weight"]\n{options}'
    (tmp_path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    source = tmp_path / "zt"
    ingot.convert(model, source, tmp_path / "r.toml", format="zt")
    to_gguf(source, tmp_path / "x.gguf")
    ingot.convert(as_others_write(tmp_path / "x.gguf", tmp_path / "y.gguf"), tmp_path / "back", format="zt")
    with ingot.open(source) as packed, ingot.open(tmp_path / "back") as back, ingot.open(tmp_path / "x.gguf") as gguf:
        assert gguf.metadata["deepseek2.attention.head_count_kv"] == 4
        assert gguf.metadata["deepseek2.attention.key_length"] == 16 + 32
        assert gguf["blk.0.attn_kv_b.weight"].codec == "ggml_blocks"
        assert set(packed) == set(back)
        for name in packed:
            assert np.array_equal(packed[name].numpy("f32"), back[name].numpy("f32")), name


def test_an_incomplete_layer_that_predicts_further_tokens_has_to_be_dropped(tmp_path: Path) -> None:
    model = model_of("deepseek_v3", tmp_path / "model")
    with ingot.open(model) as source:
        more = {"model.layers.2.eh_proj.weight": np.zeros((4, 4), np.float32)}
        tensors = {**{name: tensor.numpy() for name, tensor in source.items()}, **more}
    ingot.save(model / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    with pytest.raises(UnsupportedError, match=r"lacks .*model\.layers\.2\.enorm\.weight") as caught:
        to_gguf(model, tmp_path / "x.gguf")
    assert caught.value.rule == "model.missing-tensor"
    report = to_gguf(model, tmp_path / "x.gguf", drop=["model.layers.2.*"])
    assert set(report.dropped) == {"model.layers.2.eh_proj.weight"}


def test_what_llama_cpp_takes_for_granted_is_told(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", tmp_path / "model", norm_topk_prob=False)
    report = to_gguf(model, tmp_path / "x.gguf")
    assert any("norm_topk_prob" in note for note in report.notes)


def test_experts_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    model = model_of("gpt_oss", tmp_path / "model")
    with ingot.open(model) as source:
        tensors = {name: tensor.numpy() for name, tensor in source.items()}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    ingot.save(model / "model.safetensors", {**tensors, name: tensors[name][..., :-1]}, overwrite=True)
    with pytest.raises(UnsupportedError) as caught:
        to_gguf(model, tmp_path / "x.gguf")
    assert caught.value.rule == "model.shape"
