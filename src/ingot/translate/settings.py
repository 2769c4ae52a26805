"""Settings of ``config.json`` that GGUF has no key for, or that llama.cpp's graph of a family does not use.

The effect of a setting follows from transformers' code of the family and llama.cpp's (``src/models`` in
llama-cpp-python 0.3.36). A conversion reports every setting that has an effect, is not converted, and differs from
llama.cpp's fixed value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.translate import config_numbers
from ingot.translate.families import Family
from ingot.translate.formulas import evaluate
from ingot.translate.keys import Typed

HEADS = ("lm_head.weight", "embed_out.weight")
"""Name endings of the heads of transformers' models."""
WINDOW = "sliding_window"
LAYERS = "layer_types"
PATTERN = "attention.sliding_window_pattern"
_SLIDING = "sliding_attention"
_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom")
_BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": (
        ".q_proj.bias",
        ".k_proj.bias",
        ".v_proj.bias",
        ".o_proj.bias",
        ".qkv_proj.bias",
        ".query_key_value.bias",
    ),
    "mlp_bias": (".gate_proj.bias", ".up_proj.bias", ".down_proj.bias"),
    "qkv_bias": (".q_proj.bias", ".k_proj.bias", ".v_proj.bias"),
    "use_bias": (".bias",),
    "lm_head_bias": ("lm_head.bias",),
}
"""Flags for the presence of bias tensors, with the endings of their names."""
_READ = frozenset(
    f"""
    model_type architectures tie_word_embeddings hidden_size vocab_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim qk_head_dim is_causal id2label label2id num_nextn_predict_layers n_group topk_group
    rope_theta rope_scaling rope_parameters rope_local_base_freq partial_rotary_factor original_max_position_embeddings
    initial_context_length experts_per_token num_experts num_local_experts n_routed_experts use_sliding_window
    max_window_layers sliding_window_pattern _sliding_window_pattern quantization_config compression_config quantization
    {WINDOW} {LAYERS} {" ".join(_BIASES)}
    """.split()
)
"""Keys of ``config.json`` that functions outside of ``hyper`` read, so that no note reports them."""
_IRRELEVANT = frozenset(
    f"""
    _name_or_path _commit_hash _attn_implementation_autoset _attn_implementation_internal _attn_implementation
    attn_implementation _flash_attn_2_enabled use_flash_attn use_flash_attention transformers_version torch_dtype dtype
    use_bfloat16 torchscript unsloth_version unsloth_fixed model_name name license language tokenizer_class prefix
    is_encoder_decoder tf_legacy_loss gradient_checkpointing cache_implementation use_cache pretraining_tp pruned_heads
    finetuning_task task_specific_params problem_type cross_attention_hidden_size tie_encoder_decoder return_dict
    output_attentions output_hidden_states chunk_size_feed_forward ep_size
    initializer_range initializer_factor router_aux_loss_coef output_router_logits aux_loss_alpha router_jitter_noise
    seq_aux classifier_dropout neftune_noise_alpha router_z_loss_coef
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens model_max_length max_sequence_length seq_length decoder_start_token_id
    {" ".join(f"{role}_token_id {role}_token" for role in _ROLES)}
    """.split()
)
"""Keys about files, programs, training and text generation, which do not change what a model computes for tokens.

``special_tokens`` reads the ids of special tokens.
"""
_IRRELEVANT_ENDINGS = ("_dropout", "_pdrop", "_dropout_prob", "_dropout_rate", "_drop")
_ALL: Mapping[str, tuple[object, ...]] = {
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "rope_interleaved": (False,),
}


def unsupported(
    config: Mapping[str, Any], family: Family, carried: Collection[str], names: Collection[str]
) -> list[str]:
    """Return a phrase for each setting of ``config.json`` that llama.cpp does not compute.

    Parameters
    ----------
    config : mapping
    family : Family
    carried : collection of str
        Keys that the metadata contain and llama.cpp reads.
    names : collection of str
        Transformers' names of the model's tensors.
    """
    phrases = [
        *_window(config, family),
        *_experts(config),
        *_biases(config, family, names),
        *_classes(config, family),
        *_head(config, family, names),
    ]
    fixed = _fixed_values(config, family)
    for key, value in config.items():
        if value is None or key in carried or key in _IRRELEVANT or key.endswith(_IRRELEVANT_ENDINGS):
            continue
        if key in fixed:
            if fixed[key] and not any(config_numbers.same_value(value, item) for item in fixed[key]):
                phrases.append(f"{key} {value!r:.40}, which llama.cpp replaces by {fixed[key][0]!r:.40}")
        elif key not in _READ and value not in ({}, [], False):
            phrases.append(f"{key} {value!r:.40}")
    return phrases


def attention_scalar(config: Mapping[str, Any], family: Family) -> Any:
    """Return the number by whose square root llama.cpp divides attention scores: the size of a head.

    For Gemma 2 27B and Gemma 3 27B, recognized by their number of layers, it is the hidden size divided by the number
    of heads.
    """
    layers = {"gemma2": 46, "gemma3": 62}.get(family.arch)
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if layers is not None and config.get("num_hidden_layers") == layers and hidden and heads:
        return hidden // heads
    return config.get("head_dim")


_MARKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layer types in ``hybrid_override_pattern``."""


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer; empty if the config does not declare types."""
    for key in (LAYERS, "layers_block_type"):
        if isinstance(config.get(key), list):
            return [str(layer) for layer in config[key]]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_MARKS.get(mark, mark) for mark in pattern]
    period, offset, count = (config.get(key) for key in ("attn_layer_period", "attn_layer_offset", "num_hidden_layers"))
    if type(period) is int and type(offset) is int and type(count) is int and period > 0 and 0 < count < 1 << 16:
        return ["attention" if index % period == offset else "mamba" for index in range(count)]
    return []


def window_metadata(config: Mapping[str, Any], family: Family) -> tuple[Typed, str]:
    """Return metadata of sliding windows (size, and layers that have one), and the key of the config that they
    replace.
    """
    window = config.get(WINDOW)
    pattern = _sliding_layers(config)
    if type(window) is not int or not 0 < window < 2**31 or not any(pattern):
        return {}, LAYERS
    start = f"{family.arch}.attention.{WINDOW}"
    return {start: ("u32", window), f"{start}_pattern": ("array:bool", pattern)}, LAYERS


def window_config(metadata: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the layer types for a file's pattern of sliding windows; empty if the pattern is not a list of
    booleans.
    """
    pattern = metadata.get(f"{family.arch}.{PATTERN}")
    if not family.window_pattern or not isinstance(pattern, list) or not all(type(item) is bool for item in pattern):
        return {}
    return {LAYERS: [_SLIDING if is_sliding else "full_attention" for is_sliding in pattern]}


def has_same_windows(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the same layers have a sliding window in two configs, which may express it by different keys."""
    return _sliding_layers(first) == _sliding_layers(second)


def require_computed(config: Mapping[str, Any], family: Family) -> None:
    """Raise an error for settings with which llama.cpp would refuse the file, or compute a different result.

    Raises ``UnsupportedError`` ``architecture.config``.
    """
    if family.window_layers and any(_sliding_layers(config)) != (
        config.get("num_hidden_layers") == family.window_layers
    ):
        raise UnsupportedError(
            f"llama.cpp's {family.arch} has layers with a {WINDOW} only in models of {family.window_layers} layers, "
            "and always in those; --keep-names writes the tensors under their present names, for other programs",
            rule=config_numbers.RULE,
        )
    for key, pattern in family.patterns.items():
        values = config.get(key)
        values = values if isinstance(values, list) else []
        unequal = [index for index, value in enumerate(values) if value != pattern[index % len(pattern)]]
        if unequal:
            raise UnsupportedError(
                f"expected {', '.join(map(str, pattern))} to repeat in {key}, which llama.cpp's {family.arch} assumes, "
                f"found {values[unequal[0]]!r:.40} for layer {unequal[0]}; --keep-names writes the tensors under their "
                "present names, for other programs",
                rule=config_numbers.RULE,
            )
    for key, accepted in family.requires.items():
        value = config_numbers.nested_value(config, key)
        if isinstance(accepted, tuple) and not accepted:
            continue
        allowed = [evaluate(accepted, config)] if isinstance(accepted, str) else accepted
        if value is not None and not any(config_numbers.same_value(value, item) for item in allowed):
            expected = " or ".join(f"{item!r:.40}" for item in allowed if item is not None)
            raise UnsupportedError(
                f"expected {expected} as {key}, which llama.cpp's {family.arch} assumes, found {value!r:.80}; "
                "--keep-names writes the tensors under their present names, for other programs",
                rule=config_numbers.RULE,
            )


def _fixed_values(config: Mapping[str, Any], family: Family) -> dict[str, tuple[object, ...]]:
    defaults = {key: (value,) for key, value in family.defaults.items() if value is not None and key not in _BIASES}
    fixed = {**_ALL, **defaults, **dict.fromkeys((*family.requires, *family.patterns), ()), **family.assumed}
    if family.scalar:
        scalar = attention_scalar(config, family)
        fixed["query_pre_attn_scalar"] = () if scalar is None else (scalar,)
    return fixed


def _window(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield a note if llama.cpp applies sliding windows to other layers than the config declares, or to none."""
    window, layers, max_positions = (config.get(key) for key in (WINDOW, LAYERS, "max_position_embeddings"))
    if type(window) is not int or window <= 0 or family.window_pattern:
        return
    if family.window:
        pattern = _sliding_layers(config)
        if pattern != [(index + 1) % family.window != 0 for index in range(len(pattern))]:
            yield (
                f"{LAYERS}: in llama.cpp's {family.arch} the last of each {family.window} layers alone sees all tokens"
            )
        return
    if isinstance(layers, list) and _SLIDING not in layers:
        return
    if family.model_type.startswith("qwen") and config.get("use_sliding_window") is not True:
        return
    if isinstance(max_positions, int) and window >= max_positions:
        return
    yield (
        f"{WINDOW} {window}: in llama.cpp's {family.arch} a token sees all before it, so that texts of more than "
        f"{window} tokens get other logits"
    )


def _sliding_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer has a sliding window; empty if the config does not declare it."""
    layers = config.get(LAYERS)
    count = config.get("num_hidden_layers")
    if isinstance(layers, list):
        return [layer == _SLIDING for layer in layers]
    step = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if type(step) is int and step > 0 and type(count) is int:
        return [(index + 1) % step != 0 for index in range(min(count, 1 << 16))]
    return []


def _experts(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("topk_method") == "group_limited_greedy":
        yield "topk_method group_limited_greedy: llama.cpp ranks groups by their best two experts, not by the best one"


def _biases(config: Mapping[str, Any], family: Family, names: Collection[str]) -> Iterator[str]:
    """Yield the config's flags for biases that contradict the tensors; llama.cpp follows the tensors."""
    for key, endings in _BIASES.items():
        flag = None if key in family.requires else config.get(key)
        exists = any(name.endswith(endings) for name in names)
        if flag is True and not exists:
            yield f"{key} true, but there are no such tensors"
        elif flag is False and exists:
            yield f"{key} false, but there are such tensors: llama.cpp adds them"


def _classes(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield class names of ``config.json`` that are not classes of the family, such as the model's own code."""
    classes = config.get("architectures")
    stem = family.model_class.removesuffix("ForCausalLM").removesuffix("Model")
    foreign = (
        [str(name)[:80] for name in classes if not _is_class(str(name), stem)] if isinstance(classes, list) else []
    )
    if foreign:
        yield f"the class {', '.join(foreign)}, which llama.cpp runs as {family.model_class}"


def _is_class(name: str, stem: str) -> bool:
    return name.startswith(stem) and name.removeprefix(stem).startswith(
        ("For", "Model", "TextModel", "LMHead", "PreTr")
    )


def _head(config: Mapping[str, Any], family: Family, names: Collection[str]) -> Iterator[str]:
    exists = any(name.endswith(HEADS) for name in names)
    if (
        any(f"{module}.weight" in HEADS for module in family.ends)
        and config.get("tie_word_embeddings") is False
        and not exists
    ):
        yield "tie_word_embeddings false, but there is no lm_head.weight: llama.cpp uses the embedding instead"
