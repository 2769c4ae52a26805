"""Layers that predict further tokens (``num_nextn_predict_layers``), which llama.cpp stores after the model's
layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.account import list_names
from ingot.model.checkpoint import Checkpoint
from ingot.translate.families import Family
from ingot.translate.keys import Typed
from ingot.views.names import rename

KEY = "nextn_predict_layers"
"""GGUF key without the architecture's name."""
CONFIG_KEY = "num_nextn_predict_layers"
LAYERS = "num_hidden_layers"
MODULES: Mapping[str, str] = {
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""transformers' names within a layer, and llama.cpp's."""
_REQUIRED = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
_SEPARATE: Mapping[str, str] = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
"""Beginnings of Qwen's tensor names outside of ``mtp.layers``, and the beginnings that replace them in the layer.
"""
_SEPARATE_LAYER = "mtp.layers.0."
_SECOND_LAYER = re.compile(r"mtp\.layers\.[1-9]")


def with_layers(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> Checkpoint:
    """Return the checkpoint with Qwen's ``mtp.*`` as a layer after the model's own.

    The checkpoint is unchanged if it has several ``mtp`` layers, or if llama.cpp does not support them for the family.
    """
    layers = config.get(LAYERS)
    if not family.predicts or type(layers) is not int or any(map(_SECOND_LAYER.match, checkpoint)):
        return checkpoint
    prefixes = {_SEPARATE_LAYER: "", **_SEPARATE}
    start = f"{family.block}.{layers}."
    names = {
        name: start + inner + name.removeprefix(prefix)
        for name in checkpoint
        for prefix, inner in prefixes.items()
        if name.startswith(prefix)
    }
    return rename(checkpoint, names) if names else checkpoint


def without_layers(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> Checkpoint:
    """Undo ``with_layers``, for families whose class has ``mtp.*`` (``Family.separate_predictor``)."""
    layers = config.get(LAYERS)
    if not family.separate_predictor or type(layers) is not int:
        return checkpoint
    start = f"{family.block}.{layers}."
    outside = {inner: prefix for prefix, inner in _SEPARATE.items()}
    names = {}
    for name in checkpoint:
        inner = name.removeprefix(start)
        if inner != name:
            module = next((module for module in outside if inner.startswith(module)), None)
            names[name] = _SEPARATE_LAYER + inner if module is None else outside[module] + inner.removeprefix(module)
    return rename(checkpoint, names) if names else checkpoint


def count_layers(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> int:
    """Return the number of predicting layers in the GGUF file; 0 if llama.cpp supports none for the family.

    Raises ``UnsupportedError`` ``model.missing-tensor``: such a layer lacks a tensor.
    """
    layers = config.get(LAYERS)
    if not family.predicts or type(layers) is not int:
        return 0
    pattern = re.compile(rf"(?:{re.escape(family.base)})?{re.escape(family.block)}\.([0-9]{{1,6}})\.(.+)")
    tensors: dict[int, set[str]] = {}
    for name in checkpoint:
        match = pattern.fullmatch(name)
        if match is not None and int(match[1]) >= layers:
            tensors.setdefault(int(match[1]), set()).add(match[2])
    own_layers = _layer_contents(checkpoint, pattern, layers)
    absent = []
    for index in range(layers, max(tensors, default=layers - 1) + 1):
        present = tensors.get(index, set())
        lacking = min((content - present for content in own_layers), key=len, default=frozenset[str]())
        absent += [f"{family.block}.{index}.{name}" for name in sorted(lacking | {*_REQUIRED} - present)]
    if absent:
        names = "mtp.*" if family.separate_predictor else f"{family.block}.{layers}.*"
        raise UnsupportedError(
            f"the layer that predicts the next token lacks {list_names(absent)}; get the complete model, or pass "
            f"--drop '{names}' to go on without the layer",
            rule="model.missing-tensor",
            where=checkpoint.location,
        )
    return len(tensors)


def _layer_contents(checkpoint: Checkpoint, pattern: re.Pattern[str], layers: int) -> set[frozenset[str]]:
    """Return the distinct sets of tensor names within the model's own layers."""
    contents: dict[int, set[str]] = {}
    for name in checkpoint:
        match = pattern.fullmatch(name)
        if match is not None and int(match[1]) < layers:
            contents.setdefault(int(match[1]), set()).add(match[2])
    return {frozenset(content) for content in contents.values()}


def to_metadata(count: int, config: Mapping[str, Any], family: Family) -> Typed:
    """Return the GGUF metadata of a model with ``count`` such layers; empty for 0."""
    if not count:
        return {}
    return {
        f"{family.arch}.block_count": ("u32", config[LAYERS] + count),
        f"{family.arch}.{KEY}": ("u32", count),
    }


def to_config(metadata: Mapping[str, Any], family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the numbers of the model's own layers and of layers that predict further tokens."""
    count = metadata.get(f"{family.arch}.{KEY}")
    layers = config.get(LAYERS)
    if type(count) is not int or type(layers) is not int or not 0 < count < layers:
        return dict(config)
    declared = {} if family.separate_predictor else {CONFIG_KEY: count}
    return {**config, LAYERS: layers - count, **declared}
