"""Settings of ``config.json`` that GGUF has no key for, or that llama.cpp's graph of a family does not compute.

What a setting changes is compared with transformers' code of the family and llama.cpp's (``src/models`` in
llama-cpp-python 0.3.36). A conversion states every setting that is not carried, not as llama.cpp has it, and not
without effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ingot.translate import numbers
from ingot.translate.families import Family

WINDOW = "sliding_window"
LAYERS = "layer_types"
_SLIDING = "sliding_attention"
_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom")
_BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": (".q_proj.bias", ".k_proj.bias", ".v_proj.bias", ".o_proj.bias", ".qkv_proj.bias"),
    "mlp_bias": (".gate_proj.bias", ".up_proj.bias", ".down_proj.bias"),
    "qkv_bias": (".q_proj.bias", ".k_proj.bias", ".v_proj.bias"),
    "use_bias": (".bias",),
}
"""Flags that say which tensors there are."""
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
"""Keys that other functions read, beside those of ``hyper``."""
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
"""Keys of files, programs, training and text generation, which change nothing of what a model computes of tokens.

Ids of special tokens are read by ``special_tokens``.
"""
_IRRELEVANT_ENDINGS = ("_dropout", "_pdrop", "_dropout_prob", "_dropout_rate", "_drop")
_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_ALL: Mapping[str, tuple[object, ...]] = {
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "rope_interleaved": (False,),
}
_GEMMA = {"hidden_act": _GELU, "hidden_activation": _GELU}
_ENCODER = {"is_decoder": (False,), "hidden_act": ("gelu", *_GELU), "position_embedding_type": ("absolute",)}
_GRANTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "starcoder2": {"hidden_act": _GELU, "norm_type": ("layer_norm",), "mlp_type": ("default",)},
    "gpt_oss": {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    "deepseek_v2": {"scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy")},
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
}
"""Values that llama.cpp's graph takes for granted, by model type and key; notes name the first."""


def unsupported(
    config: Mapping[str, Any], family: Family, carried: Collection[str], names: Collection[str]
) -> list[str]:
    """Return what ``config.json`` states and llama.cpp does not compute, a phrase each.

    Parameters
    ----------
    config : mapping
    family : Family
    carried : collection of str
        Keys that metadata hold and llama.cpp reads.
    names : collection of str
        Transformers' names of the model's tensors.
    """
    phrases = [
        *_window(config, family),
        *_experts(config),
        *_biases(config, names),
        *_classes(config, family),
        *_head(config, family, names),
    ]
    granted = _granted(config, family)
    for key, value in config.items():
        if value is None or key in carried or key in _IRRELEVANT or key.endswith(_IRRELEVANT_ENDINGS):
            continue
        if key in granted:
            if granted[key] and not any(numbers.same(value, item) for item in granted[key]):
                phrases.append(f"{key} {value!r:.40}, which llama.cpp takes for {granted[key][0]!r:.40}")
        elif key not in _READ and value not in ({}, [], False):
            phrases.append(f"{key} {value!r:.40}")
    return phrases


def attention_scalar(config: Mapping[str, Any], family: Family) -> Any:
    """Return the number whose root llama.cpp divides the scores of attention by: the size of a head.

    In Gemma's two models of 27 billion parameters, which are recognized by their number of layers, it is an equal share
    of the hidden size.
    """
    layers = {"gemma2": 46, "gemma3": 62}.get(family.arch)
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if layers is not None and config.get("num_hidden_layers") == layers and hidden and heads:
        return hidden // heads
    return config.get("head_dim")


def _granted(config: Mapping[str, Any], family: Family) -> dict[str, tuple[object, ...]]:
    defaults = {key: (value,) for key, value in family.defaults.items() if value is not None and key not in _BIASES}
    granted = {**_ALL, **defaults, **_GRANTED.get(family.model_type, {})}
    if family.scalar:
        scalar = attention_scalar(config, family)
        granted["query_pre_attn_scalar"] = () if scalar is None else (scalar,)
    return granted


def _window(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield what llama.cpp does otherwise with layers in which a token sees only those shortly before it."""
    window, layers, longest = (config.get(key) for key in (WINDOW, LAYERS, "max_position_embeddings"))
    if type(window) is not int or window <= 0:
        return
    if family.window:
        pattern = _pattern(config)
        if pattern != [(number + 1) % family.window != 0 for number in range(len(pattern))]:
            yield (
                f"{LAYERS}: in llama.cpp's {family.arch} the last of each {family.window} layers alone sees all tokens"
            )
        return
    if isinstance(layers, list) and _SLIDING not in layers:
        return
    if family.model_type.startswith("qwen") and config.get("use_sliding_window") is not True:
        return
    if isinstance(longest, int) and window >= longest:
        return
    yield (
        f"{WINDOW} {window}: in llama.cpp's {family.arch} a token sees all before it, so that texts of more than "
        f"{window} tokens get other logits"
    )


def _pattern(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether its window is short; empty if the file does not say so."""
    layers, count = config.get(LAYERS), config.get("num_hidden_layers")
    if isinstance(layers, list):
        return [layer == _SLIDING for layer in layers]
    step = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if type(step) is int and step > 0 and type(count) is int:
        return [(number + 1) % step != 0 for number in range(min(count, 1 << 16))]
    return []


def _experts(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("topk_method") == "group_limited_greedy":
        yield "topk_method group_limited_greedy: llama.cpp takes the groups of the best two experts, not of the best"


def _biases(config: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """Yield flags of biases that the tensors contradict: llama.cpp goes by the tensors."""
    for key, endings in _BIASES.items():
        flag = config.get(key)
        there = any(name.endswith(endings) for name in names)
        if flag is True and not there:
            yield f"{key} true, of which there are no tensors"
        elif flag is False and there:
            yield f"{key} false, though there are such tensors: llama.cpp adds them"


def _classes(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield the classes of ``config.json`` that are of another family, such as code of the model's own."""
    classes = config.get("architectures")
    stem = family.model_class.removesuffix("ForCausalLM").removesuffix("Model")
    others = [str(name)[:80] for name in classes if not _is_class(str(name), stem)] if isinstance(classes, list) else []
    if others:
        yield f"the class {', '.join(others)}, which llama.cpp takes for {family.model_class}"


def _is_class(name: str, stem: str) -> bool:
    return name.startswith(stem) and name.removeprefix(stem).startswith(
        ("For", "Model", "TextModel", "LMHead", "PreTr")
    )


def _head(config: Mapping[str, Any], family: Family, names: Collection[str]) -> Iterator[str]:
    there = any(name.endswith("lm_head.weight") for name in names)
    if "lm_head" in family.ends and config.get("tie_word_embeddings") is False and not there:
        yield "tie_word_embeddings false, though there is no lm_head.weight: llama.cpp takes the embedding for it"
