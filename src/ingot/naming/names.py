"""The layer and the role of a tensor, derived from its name.

The tables cover the names of common checkpoints: Llama, Mistral, Qwen, Gemma, Phi, GPT-2, GPT-J, GPT-NeoX, Falcon, OPT,
Bloom, MPT, BERT, MiniLM, DistilBERT, ALBERT, ViT (timm and transformers), CLIP, T5, Mixtral, Qwen-MoE, DeepSeek,
gpt-oss, Mamba, Jamba, RWKV, and the names of GGUF, Flax and Core ML programs. All other names have the role ``other``,
which recipes keep unchanged by default, so that unknown tensors are never quantized by accident.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from ingot.core.runtime import native

ROLES = ("embedding", "head", "norm", "bias", "attention", "mlp", "ssm", "router", "conv", "other")
"""All roles that ``role_of`` returns. ``ssm`` stands for the two large projections of a state-space (Mamba) block."""

# Segments that are followed by a layer number. `experts.3` and `classifier.0` are not layers, so the list is explicit.
_CONTAINERS = (
    "layers",
    "layer",
    "h",
    "blocks",
    "block",
    "blk",
    "resblocks",
    "transformer_blocks",
    "single_transformer_blocks",
    "double_blocks",
    "single_blocks",
    "encoder_layers",
    "decoder_layers",
    "albert_layers",
)
# `layers.3.` and Flax's `layer_3/`. At most six digits: a longer number is not a layer, and int() of it may be slow.
_LAYER = re.compile(
    rf"(?:^|[./])(?:(?:{'|'.join(_CONTAINERS)})[./]|(?:layers?|blocks?)_)([0-9]{{1,6}})(?=[./]|$)",
    re.IGNORECASE,
)

# The names of Core ML programs are identifiers: `model_layers_3_self_attn_q_proj_weight_to_fp16`. The second pattern
# matches words whose underscores are not separators.
_FLAT = re.compile(r"(?:[^./]+/)?([^./]+_(?:weight|bias))(?:_[0-9]+)?(?:_to_fp(?:16|32)[a-z0-9_]*)?")
_TOGETHER = re.compile(
    r"(?:^|(?<=_))(?:gate_up_proj|[a-z]+_(?:proj|lin)|lm_head|feed_forward|query_key_value|c_(?:fc|attn)|fc_(?:in|out)"
    r"|wi_[01]|ln_[a-z0-9]+|to_(?:[qkv]|out)|dense_h_to_4h|dense_4h_to_h|shared_expert_gate|[a-z]+_projection"
    r"|relative_(?:attention|position)_bias|qa_outputs)(?=_|$)"
)

# Names of the arrays of a module; the preceding segment is the module.
_PARAMETER = r"(?:weight|bias|scale|gamma|beta|kernel|running_mean|running_var|num_batches_tracked)"
_START = r"(?:^|\.)"
_END = r"(?=\.|$)"

# The leftmost word decides: `attention.output.dense` is attention, `output.dense` is mlp, `feed_forward.key` is mlp.
_BLOCK = (
    r"(?P<attention>attn|attention"
    rf"|{_START}att{_END}"
    rf"|{_START}(?:[qkvo]|qkv|out)_(?:proj|lin){_END}"
    rf"|{_START}(?:w[qkvo]|wqkv|qkv|to_[qkv]|to_out|query|key|value|query_key_value|in_proj_weight){_END})"
    r"|(?P<mlp>mlp|ffn|feed_?forward|densereludense|experts?"
    rf"|{_START}(?:ff|intermediate){_END}"
    rf"|{_START}output\.dense{_END}"
    rf"|{_START}(?:gate|up|down|gate_up)_proj{_END}"
    rf"|{_START}(?:w[123]|wi|wi_[01]|fc[12]|fc_in|fc_out|c_fc|lin[12]|dense_h_to_4h|dense_4h_to_h){_END})"
)

# Each row: the role (None if the pattern's group names it); the scope (in a layer, outside, or both); the pattern,
# which is matched with the part of the name after the layer number, in lower case. The first row that matches counts.
_ROWS: tuple[tuple[str | None, str, str], ...] = (
    # The bias of a norm is part of the norm. `norm1.linear` (adaptive norms) is a matrix: its module is `linear`.
    ("norm", "both", rf"{_START}(?:[^.]*norm[^.]*|ln(?:_[^.]*|[0-9]*)|bn[0-9]*)(?:\.{_PARAMETER})?$"),
    ("bias", "both", r"(?:^|[._])bias$"),
    # Arrays that describe another array's quantization, rotary tables, and state-space constants.
    ("other", "both", r"(?:^|[._])(?:q?scales?|scale_inv|q?zeros|biases|absmax|g_idx|zero_point|inv_freq|a_log)$"),
    ("head", "both", rf"{_START}(?:lm_head|shared_head|embed_out|unembed){_END}"),
    (
        "head",
        "outside",
        rf"{_START}(?:(?:[^.]*_)?heads?|classifier|score|pooler|qa_outputs|predictions|seq_relationship){_END}",
    ),
    ("head", "outside", rf"{_START}(?:vocab_projector|vocab_transform|text_projection|visual_projection){_END}"),
    ("head", "outside", r"^(?:model\.)?(?:output|fc)\.(?:weight|kernel)$"),
    ("embedding", "both", rf"embed|relative_attention_bias|relative_position_bias|{_START}(?:wte|wpe|emb){_END}"),
    (
        "embedding",
        "outside",
        rf"_embd{_END}|{_START}(?:cls_token|mask_token|dist_token|register_tokens){_END}|^shared\.",
    ),
    ("attention", "both", r"att(?:n|ention)?\.gate(?=\.|$)"),
    ("router", "both", rf"{_START}(?:[^.]*router[^.]*|gate|shared_expert_gate|ffn_gate_inp(?:_shexp)?){_END}"),
    ("conv", "both", r"conv"),
    ("ssm", "both", rf"{_START}(?:(?:mixer|mamba|ssm)\.(?:in|out)_proj|ssm_(?:in|out)){_END}"),
    (None, "both", _BLOCK),
)
_TABLES = {
    inside: tuple((role, re.compile(pattern)) for role, scope, pattern in _ROWS if scope in ("both", position))
    for inside, position in ((True, "inside"), (False, "outside"))
}
_MAX_NAME = 1024  # longer names are hostile, and are not matched with regular expressions


def layer_of(name: str) -> int | None:
    """Return the index of a tensor's layer within its stack of layers; None for a tensor outside the layers.

    The index is the first number after a word of ``_CONTAINERS``: 2 in ``encoder.block.2.layer.1.layer_norm.weight``
    (T5).
    """
    match = _LAYER.search(name) or _LAYER.search(_dotted(name))
    return int(match[1]) if match else None


def layer_path(name: str) -> str | None:
    """Return the part of a name up to the layer number: ``model.layers.3``; None outside the layers."""
    match = _LAYER.search(name)
    return name[: match.end()] if match else None


def count_layers(names: Iterable[str]) -> int:
    """Return one more than the highest layer index among the names of tensors; 0 without layers."""
    return 1 + max((layer for name in names if (layer := layer_of(name)) is not None), default=-1)


def role_of(name: str) -> str:
    """Return the role of a tensor, one of ``ROLES``.

    Only the part after the layer number is matched, so that a model named ``embedder`` does not turn every tensor into
    an embedding.
    """
    if len(name) > _MAX_NAME:
        return "other"
    dotted = _dotted(name)
    role = _role_in_layer(dotted) if dotted else "other"
    return _role_in_layer(name) if role == "other" else role


def _role_in_layer(name: str) -> str:
    match = _LAYER.search(name)
    return _role(name[match.end() + 1 :], True) if match else _role(name, False)


def _dotted(name: str) -> str:
    """Return the name of a Core ML program's weight or bias with dots between its words; empty for other names."""
    match = _FLAT.fullmatch(name) if len(name) <= _MAX_NAME else None
    if match is None:
        return ""
    parts = []
    end = 0
    for word in _TOGETHER.finditer(match[1]):
        parts += [match[1][end : word.start()].replace("_", "."), word[0]]
        end = word.end()
    return "".join(parts) + match[1][end:].replace("_", ".")


@lru_cache(maxsize=1 << 14)
def _role(suffix: str, inside: bool) -> str:
    text = suffix.lower().replace("/", ".")
    for role, pattern in _TABLES[inside]:
        match = pattern.search(text)
        if match:
            return role or match.lastgroup or "other"
    return "other"


_NUMBER = re.compile(r"(?<=[./])\d+(?=[./])")


def pattern_of(name: str) -> str:
    """Return a name with ``*`` for its numbers, which is the same for corresponding tensors of all layers."""
    return _NUMBER.sub("*", name)


def any_ends(names: Iterable[str], endings: Sequence[str]) -> bool:
    """Return whether any of the names ends with one of ``endings``."""
    return native.kernels.any_ends([*names], endings)


Item = TypeVar("Item")
Groups = list[tuple[str, list[Item]]]


def equal_layers(items: Iterable[Item], name: Callable[[Item], str], key: Callable[[Item], Any]) -> Groups[Item]:
    """Group items whose tensor names differ only in their numbers, such as ``model.layers.*.mlp.up_proj.weight``.

    Parameters
    ----------
    items : iterable
        Tensors, or objects that represent tensors.
    name : callable
        Returns the tensor name of an item.
    key : callable
        Returns a value that is equal for all items of a group.

    Returns
    -------
    list of (str, list)
        The pattern and the items of each group; for a group of one item its name instead of the pattern.
    """
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault((pattern_of(name(item)), key(item)), []).append(item)
    return [(name(group[0]) if len(group) == 1 else pattern, group) for (pattern, _), group in groups.items()]


INPUT_SCALE = ".input_global_scale"
"""The suffix of the scale for a layer's inputs, in folders of compressed-tensors."""

MERGED = re.compile(
    r"(?P<before>.*\.)(?:(?P<qkv>[qkv]_proj|query|key|value)|(?P<up>gate_proj|up_proj|w1|w3)|(?:down_proj|w2))\.weight"
)
"""A pattern for matrices that vLLM merges with others, and for ``down_proj``, which vLLM merges only among experts."""
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def without_expert(name: str) -> str:
    """Return a name with ``*`` in place of the number of an expert."""
    return _EXPERT.sub(".experts.*.", name)


def merged_matrix(name: str) -> str | None:
    """Return a name for the merged matrix that contains a matrix; None if vLLM does not merge it with others."""
    match = MERGED.fullmatch(name)
    if match is None:
        return None
    common = without_expert(match["before"])
    if common != match["before"]:
        return common
    return f"{common}qkv" if match["qkv"] else f"{common}up" if match["up"] else None
