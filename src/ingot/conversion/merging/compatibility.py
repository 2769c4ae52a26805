"""Comparison of the configs and vocabularies of models before they are merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.artifacts.companions import companion_config
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.naming.config import MAX_CONFIG
from ingot.stores.location import Location

RULE = "merge.model"
_TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER = 8 * MAX_CONFIG
_ESSENTIAL = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rope_theta")
"""Settings that determine how the tensors are used. Models that differ in one of these settings cannot be merged."""
_IGNORED = (
    *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"),
    *("quantization_config", "quantization", "tie_word_embeddings", "_attn_implementation", "finetuning_task"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
)
_GGUF_TOKENS = "tokenizer.ggml.tokens"
_GGUF_ARCHITECTURE = "general.architecture"
_MAX_LISTED = 8


def require_same_model(base: Checkpoint, model: Checkpoint, location: str) -> list[str]:
    """Compare architecture, settings and vocabulary of a model with those of the base; return notes on differences.

    Raises ``UnsupportedError`` ``merge.model``: an essential setting or a token differs, so that the values of the two
    models cannot be combined.
    """
    first, second = (_settings(item) for item in (base, model))
    notes = []
    if first and second:
        for key in _ESSENTIAL:
            if key in first and key in second and first[key] != second[key]:
                raise _error(f"{key} {first[key]!r:.40} as in the base", f"{second[key]!r:.40}", location)
        keys = (first.keys() | second.keys()) - {*_ESSENTIAL, *_IGNORED}
        different = sorted(key[:60] for key in keys if first.get(key) != second.get(key))
        if different:
            listed = ", ".join(different[:_MAX_LISTED]) + (", ..." if len(different) > _MAX_LISTED else "")
            notes.append(f"the config of {location} differs from the base's, which is kept: {listed}")
    _require_same_tokens(base, model, location)
    return notes


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config = companion_config(checkpoint.companions, RULE)
    if config or _GGUF_ARCHITECTURE not in checkpoint.metadata:
        return config
    return {"model_type": checkpoint.metadata[_GGUF_ARCHITECTURE]}


def _require_same_tokens(base: Checkpoint, model: Checkpoint, location: str) -> None:
    """Raise ``UnsupportedError`` ``merge.model`` if a token id stands for different texts in the two vocabularies."""
    if _GGUF_TOKENS in base.metadata and _GGUF_TOKENS in model.metadata:
        first, second = (dict(enumerate(item.metadata[_GGUF_TOKENS])) for item in (base, model))
    elif _TOKENIZER in base.companions and _TOKENIZER in model.companions:
        files = [_read(item.companions[_TOKENIZER]) for item in (base, model)]
        if files[0] == files[1]:
            return
        first, second = (_tokens(strict_json(data, RULE, RULE, _TOKENIZER)) for data in files)
    else:
        return
    different = next((index for index in sorted(first.keys() & second.keys()) if first[index] != second[index]), None)
    if different is not None:
        raise _error(
            f"token {different} as in the base, {first[different]!r:.40}", f"{second[different]!r:.40}", location
        )


def _read(address: str) -> bytes:
    store, file = Location.parse(address).find(io="pread")
    return bytes(store.read(file, _MAX_TOKENIZER, RULE))


def _tokens(tokenizer: Mapping[str, Any]) -> dict[int, Any]:
    """Return the texts of a tokenizer, keyed by id; empty if ``tokenizer.json`` has no vocabulary in a known layout."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    tokens: dict[int, Any] = {}
    if isinstance(vocabulary, Mapping):
        tokens = {index: text for text, index in vocabulary.items() if type(index) is int}
    elif isinstance(vocabulary, list):
        tokens = {index: entry[0] for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, Mapping) and type(entry.get("id")) is int:
            tokens[entry["id"]] = entry.get("content")
    return tokens


def _error(expected: str, actual: str, location: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected {expected}, found {actual}; only models of one base can be merged", rule=RULE, where=location
    )
