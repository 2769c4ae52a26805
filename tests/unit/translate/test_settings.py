"""Settings of a config.json that llama.cpp does not compute, and how an encoder makes one vector of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UnsupportedError
from ingot.translate import hyper, rotary, settings
from ingot.translate.families import FAMILIES
from tests.support import model_folder

pytest.importorskip("gguf")

FULL, SLIDING = "full_attention", "sliding_attention"
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def stated(path: Path, **config: Any) -> str:
    """Return what a conversion says is not carried over."""
    report = ingot.convert(model_folder.write(path, {**model_folder.CONFIG, **config}), path.with_suffix(".gguf"))
    notes = [note.removeprefix("not carried over: ") for note in report.notes if note.startswith("not carried over")]
    return "; ".join(notes)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**MISTRAL, "sliding_window": 32}, "sliding_window 32"),
        ({**MISTRAL, "sliding_window": None}, ""),
        ({**MISTRAL, "sliding_window": 256}, ""),  # as long as the longest text
        ({"sliding_window": 32}, "sliding_window 32"),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": False}, ""),
        ({**QWEN, "sliding_window": 32, "max_window_layers": 28}, ""),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": True}, "sliding_window 32"),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": True, "layer_types": [FULL]}, ""),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": True, "layer_types": [SLIDING]}, "sliding_window 32"),
        ({"attention_bias": True}, ""),  # the biases are there, and llama.cpp adds them
        ({"mlp_bias": True}, ""),
        ({"attention_bias": False, "mlp_bias": False}, ""),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', which llama.cpp replaces by 'silu'"),
        ({"attention_multiplier": 0.5, "logit_scale": 2, "embedding_multiplier": 12.0}, "logit_scale 2"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"unheard_of": {"a": 1}}, "unheard_of"),
        ({"unheard_of": None, "other": [], "third": False}, ""),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ""),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 1.0}, ""),
        ({"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel"),
        ({"architectures": ["LlamaModel"]}, ""),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"attention_dropout": 0.1, "resid_pdrop": 0.1, "use_cache": True, "initializer_range": 0.1}, ""),
        ({"temperature": 0.7, "id2label": {"0": "a"}, "transformers_version": "5"}, ""),
    ],
)
def test_what_llama_cpp_does_not_compute_is_stated(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = stated(tmp_path / "m", **config)
    assert (said in found) if said else not found, found


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_all_of_a_head_is_turned_unless_the_graph_turns_a_part(factor: float, tmp_path: Path) -> None:
    """llama.cpp's llama ends on another number of turned columns."""
    stated(tmp_path / "m", partial_rotary_factor=factor)
    with ingot.open(tmp_path / "m.gguf") as made:
        assert made.metadata["llama.rope.dimension_count"] == 16


def test_a_missing_base_of_rotary_positions_is_that_of_transformers(tmp_path: Path) -> None:
    config = {key: value for key, value in model_folder.CONFIG.items() if key != "rope_theta"}
    ingot.convert(model_folder.write(tmp_path / "m", config), tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as made:
        assert made.metadata["llama.rope.freq_base"] == 10000.0


def gemma(path: Path, kind: str, layers: int, **config: Any) -> Path:
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    weights = {name: value for name, value in model_folder.tensors().items() if name != "lm_head.weight"}
    weights["model.norm.weight"] = np.ones(64, np.float32)
    for number in range(layers):
        layer = {name: value for name, value in weights.items() if ".layers.0." in name and "norm" not in name}
        layer |= {f"model.layers.0.{name}.weight": np.ones(64, np.float32) for name in norms}
        weights |= {name.replace(".0.", f".{number}."): value for name, value in layer.items()}
    known = {"model_type": kind, "num_hidden_layers": layers, "sliding_window": 32, "hidden_act": None,
             "hidden_activation": "gelu_pytorch_tanh", "architectures": None,
             "tie_word_embeddings": True}  # fmt: skip
    return model_folder.write(path, {**model_folder.CONFIG, **known, **config}, weights)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layer_types": [SLIDING, FULL, SLIDING]}, ""),
        ({"layer_types": [SLIDING, SLIDING, FULL]}, "layer_types"),
        ({"layer_types": [FULL, FULL, FULL]}, "layer_types"),
        ({"sliding_window_pattern": 2}, ""),
        ({"sliding_window_pattern": 3}, "layer_types"),
        ({"query_pre_attn_scalar": 16}, ""),
        ({"query_pre_attn_scalar": 24}, "query_pre_attn_scalar 24"),
        ({"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, ""),
        ({"hidden_activation": "relu"}, "hidden_activation"),
    ],
)
def test_gemma_s_layers(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    report = ingot.convert(gemma(tmp_path / "m", "gemma2", 3, **config), tmp_path / "x.gguf")
    found = " ".join(note for note in report.notes if note.startswith("not carried over"))
    assert (said in found) if said else not found, found


def test_attention_in_both_directions(tmp_path: Path) -> None:
    """``is_causal`` is a key of GGUF's; Gemma's is another architecture."""
    assert not stated(tmp_path / "m", is_causal=False)
    with ingot.open(tmp_path / "m.gguf") as made:
        assert made.metadata["llama.attention.causal"] is False
    ingot.convert(tmp_path / "m.gguf", tmp_path / "back", format="safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["is_causal"] is False
    source = gemma(tmp_path / "g", "gemma2", 1, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "g.gguf")
    assert caught.value.rule == "architecture.unknown"


@pytest.mark.parametrize("key", ["max_position_embeddings", "rms_norm_eps"])
def test_numbers_that_llama_cpp_needs(key: str, tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", {**model_folder.CONFIG, key: None})
    with pytest.raises(UnsupportedError, match=key) as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.config"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(model_folder.ROWS - 5))]


def wordpiece() -> dict[str, Any]:
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, text in enumerate(WORDS[:5])
    ]  # fmt: skip
    steps = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
             {"SpecialToken": {"id": "[SEP]", "type_id": 0}}]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": steps, "pair": steps, "special_tokens": {}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {text: number for number, text in enumerate(WORDS)}},
    }  # fmt: skip


BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": model_folder.ROWS, "max_position_embeddings": 64,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip
NAMES = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "unk", "mask")}


def bert(path: Path, files: dict[str, Any], more: dict[str, Any] | None = None, **config: Any) -> Path:
    random, parts = np.random.default_rng(1), ("self.query", "self.key", "self.value", "output.dense")
    shapes = {
        "embeddings.word_embeddings": (model_folder.ROWS, 64), "embeddings.position_embeddings": (64, 64),
        "embeddings.token_type_embeddings": (2, 64), "pooler.dense": (64, 64),
        **{f"encoder.layer.0.attention.{part}": (64, 64) for part in parts},
        "encoder.layer.0.intermediate.dense": (128, 64), "encoder.layer.0.output.dense": (64, 128),
    }  # fmt: skip
    weights = {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {
        f"{name}.bias": np.zeros(shape[0], np.float32) for name, shape in shapes.items() if "embeddings" not in name
    }
    for name in ("embeddings.LayerNorm", *(f"encoder.layer.0.{part}output.LayerNorm" for part in ("attention.", ""))):
        weights |= {f"{name}.weight": np.ones(64, np.float32), f"{name}.bias": np.zeros(64, np.float32)}
    return model_folder.write(path, {**BERT, **config}, weights | (more or {}), wordpiece(), NAMES, files)


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": number, "name": str(number), "path": "" if not number else f"{number}_{kind}",
         "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(("Transformer", *kinds))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pooling", "number"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, 1),
        ({"pooling_mode_cls_token": True}, 2),
        ({"pooling_mode_lasttoken": True}, 3),
        ({"pooling_mode": "mean"}, 1),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": False}, 3),
    ],
)
def test_pooling(pooling: dict[str, Any], number: int, tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": pooling, "modules.json": modules("Pooling", "Normalize")}
    source = bert(tmp_path / "m", files)
    report = ingot.convert(source, tmp_path / "x.gguf")
    assert not any("pool" in note for note in report.notes if "pooler" not in note)
    with ingot.open(tmp_path / "x.gguf") as made:
        assert made.metadata["bert.pooling_type"] == number
        others = {key: value for key, value in made.metadata.items() if "companion" not in key}
        ingot.save(tmp_path / "y.gguf", dict(made), others)
    # the folder's own files come back, and files that say the same are made for a file of another program
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert all(json.loads((tmp_path / "back" / name).read_text()) == value for name, value in files.items())
    ingot.convert(tmp_path / "y.gguf", tmp_path / "own", format="safetensors")
    ingot.convert(tmp_path / "own", tmp_path / "again.gguf")
    with ingot.open(tmp_path / "again.gguf") as made:
        assert made.metadata["bert.pooling_type"] == number


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no pooling type"),
        ({"modules.json": modules()}, "no pooling type"),
        ({"1_Pooling/config.json": {"pooling_mode": "cls"}, "modules.json": modules("Pooling")}, "normalize"),
        ({"1_Pooling/config.json": {"pooling_mode": "cls"}}, ""),
    ],
)
def test_what_is_not_said_of_pooling_is_stated(files: dict[str, Any], said: str, tmp_path: Path) -> None:
    notes = [
        note for note in ingot.convert(bert(tmp_path / "m", files), tmp_path / "x.gguf").notes if "pooler" not in note
    ]
    assert (any(said in note for note in notes)) if said else not any("pool" in note for note in notes)


@pytest.mark.parametrize(
    "pooling",
    [{}, {"pooling_mode_max_tokens": True}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
     {"pooling_mode": "weightedmean"}],
)  # fmt: skip
def test_a_pooling_that_llama_cpp_has_not_is_refused(pooling: dict[str, Any], tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": pooling, "modules.json": modules("Pooling")}
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(bert(tmp_path / "m", files), tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.pooling"


@pytest.mark.parametrize("text", ["[", "{}", "5"])
def test_modules_that_are_none(text: str, tmp_path: Path) -> None:
    source = bert(tmp_path / "m", {"modules.json": text})
    if text == "[":
        with pytest.raises(IngotError) as caught:
            ingot.convert(source, tmp_path / "x.gguf")
        assert caught.value.rule == "architecture.companion"
    else:
        ingot.convert(source, tmp_path / "x.gguf")


def test_a_module_behind_pooling_is_lost(tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": {"pooling_mode": "mean"}, "modules.json": modules("Pooling", "Dense")}
    source = bert(tmp_path / "m", files)
    with pytest.raises(UnsupportedError, match="2_Dense") as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "account.lost"
    assert set(ingot.convert(source, tmp_path / "x.gguf", drop=["2_Dense"]).dropped) == {"2_Dense"}


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_ranks(labels: int, tmp_path: Path) -> None:
    """BERT's pooler is the first layer of the classifier then, and not left out."""
    head = {"classifier.weight": np.ones((labels, 64), np.float32), "classifier.bias": np.zeros(labels, np.float32)}
    names = {"id2label": {"0": "no"}} if labels == 1 else {}
    source = bert(tmp_path / "m", {}, head, architectures=["BertForSequenceClassification"], **names)
    report = ingot.convert(source, tmp_path / "x.gguf")
    assert not report.superseded
    with ingot.open(tmp_path / "x.gguf") as made:
        assert made["cls.weight"].shape == (64, 64)
        assert made["cls.output.weight"].shape == (labels, 64)
        assert made.metadata["bert.pooling_type"] == 4
        assert made.metadata["bert.classifier.output_labels"] == (
            ["no"] if labels == 1 else ["LABEL_0", "LABEL_1", "LABEL_2"]
        )
        others = {key: value for key, value in made.metadata.items() if "companion" not in key}
        ingot.save(tmp_path / "y.gguf", dict(made), others)
    ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    with ingot.open(source) as one, ingot.open(tmp_path / "back") as other:
        assert {name.removeprefix("bert.") for name in other} == set(one)


def test_heads_that_llama_cpp_has_not_are_lost(tmp_path: Path) -> None:
    for number, name in enumerate(("cls.predictions.bias", "classifier.weight")):
        more = {name: np.ones(model_folder.ROWS if number == 0 else (2, 64), np.float32)}
        source = bert(tmp_path / str(number), {}, more)
        if number:
            (source / "model.safetensors").unlink()
            with ingot.open(tmp_path / "0") as checkpoint:
                kept = {key: checkpoint[key].numpy() for key in checkpoint if not key.startswith(("pooler.", "cls."))}
            ingot.save(source / "model.safetensors", kept | more)
        with pytest.raises(UnsupportedError) as caught:
            ingot.convert(source, tmp_path / f"{number}.gguf")
        assert caught.value.rule == "account.lost"
        assert name in caught.value.message


@pytest.mark.parametrize(
    ("model_type", "config", "rotated", "theta"),
    [
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 50000}, 8, 50000.0),  # as Pythia states them
        ("gpt_neox", {}, 4, 10000.0),
        ("glm", {}, 8, 10000.0),
        ("stablelm", {}, 4, 10000.0),
        ("minimax_m2", {"rotary_dim": 12}, 12, 5000000.0),
        ("cohere", {}, 16, 500000.0),
    ],
)
def test_a_family_has_the_rotary_embedding_of_its_class(
    model_type: str, config: dict[str, Any], rotated: int, theta: float
) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    config = hyper.usual_keys({**sizes, "model_type": model_type, **config}, FAMILIES[model_type])
    metadata, dropped = rotary.to_metadata(config, FAMILIES[model_type])
    assert (rotary.rotated_size(config), dropped) == (rotated, [])
    assert metadata.get(f"{FAMILIES[model_type].arch}.rope.freq_base") == ("f32", theta)


def test_sections_of_positions_that_end_llama_cpp_are_refused() -> None:
    config = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(UnsupportedError, match="mrope_section") as caught:
        rotary.to_metadata(config, FAMILIES["qwen3_5_text"])
    assert caught.value.rule == "architecture.config"


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("llama4_text", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("llama4_text", {"use_qk_norm": False, "num_local_experts": 16}, "use_qk_norm"),
        ("llama4_text", {"use_qk_norm": True, "num_local_experts": 128}, "use_qk_norm"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ],
)
def test_layers_that_llama_cpp_arranges_otherwise_are_refused(
    model_type: str, config: dict[str, Any], key: str
) -> None:
    with pytest.raises(UnsupportedError, match=key) as caught:
        settings.require_computed(config, FAMILIES[model_type])
    assert caught.value.rule == "architecture.config"
