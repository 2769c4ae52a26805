"""Tiny model folders for tests: tensors of a family with random values, a config, and a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ingot.artifacts.save import save
from ingot.model.tensor import Array
from ingot.translate import pretokenizers
from ingot.translate.expected import expected_tensors
from ingot.translate.pretokenizers import byte_characters

HIDDEN, ROWS = 64, 264
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": ROWS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The added tokens of ``tokenizer``, behind the bytes and one merged token: ids from 257 on."""
FIRST_SPECIAL = 257
SETTINGS: Mapping[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def tokenizer(more: Iterable[str] = (), processor: Any = None, pre: str = "qwen2") -> dict[str, Any]:
    """Return a ``tokenizer.json``: bytes, a merge, the tokens ``SPECIAL`` and ``more``; ``pre`` is llama.cpp's name."""
    steps = pretokenizers.STEPS[pre]
    added = [
        {"id": FIRST_SPECIAL + index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for index, text in enumerate((*SPECIAL, *more))
    ]  # fmt: skip
    vocabulary = {text: number for number, text in enumerate([*byte_characters(), "th"])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["t", "h"]], "ignore_merges": steps.ignore_merges}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pretokenizers.pre_tokenizer(steps),
        "post_processor": processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def tensors(seed: int = 0, *, norms: bool = False, rows: int = ROWS) -> dict[str, Array]:
    """Return the tensors of a model of one layer with the sizes of ``CONFIG``; with ``norms`` those of Qwen3."""
    random = np.random.default_rng(seed)

    def values(*shape: int) -> Array:
        return (random.standard_normal(shape) * 0.05 + (len(shape) == 1)).astype(np.float32)

    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (64, HIDDEN),
        "self_attn.k_proj": (32, HIDDEN), "self_attn.v_proj": (32, HIDDEN), "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (128, HIDDEN), "mlp.up_proj": (128, HIDDEN), "mlp.down_proj": (HIDDEN, 128),
        **({"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)} if norms else {}),
    }  # fmt: skip
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {
        "model.embed_tokens.weight": (rows, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (rows, HIDDEN),
    }
    return {name: values(*shape) for name, shape in shapes.items()}


def write(
    path: Path,
    config: Mapping[str, Any] | None = CONFIG,
    weights: Mapping[str, Array] | None = None,
    words: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = SETTINGS,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model folder and return it.

    Parameters
    ----------
    path : Path
    config : mapping, optional
        ``config.json``; None: there is none.
    weights : mapping, optional
        Tensors by name; by default ``tensors()`` and the biases that the config asks for, all ones.
    words, settings : mapping, optional
        ``tokenizer.json`` and ``tokenizer_config.json``; by default ``tokenizer()`` and ``SETTINGS``; empty: no file.
    files : mapping, optional
        Further files by name: text as it is, other values as JSON.
    """
    path.mkdir(parents=True)
    if weights is None:
        implied = expected_tensors(config or {}) or {}
        biases = {name: np.ones(shape, np.float32) for name, shape in implied.items() if name.endswith(".bias")}
        weights = {**biases, **tensors()}
    save(path / "model.safetensors", dict(weights), {"format": "pt"})
    named = {"config.json": config, "tokenizer.json": tokenizer() if words is None else words}
    named |= {"tokenizer_config.json": settings if named["tokenizer.json"] else {}, **(files or {})}
    for name, value in named.items():
        if value or name in (files or {}):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path
