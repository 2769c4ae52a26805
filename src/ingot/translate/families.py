"""Supported architectures: transformers' model type, llama.cpp's name, and the differences between their tensors.

The records are TOML tables in ``family_data/*.toml``, one per model type (``docs/developing/family.md``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ingot.translate.config_numbers import same_value

UNSUPPORTED = "architecture.unknown"
"""The rule for models of families that Ingot does not translate."""

_INDEX = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.)")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "@ends": ("model.embed_tokens", "model.norm", "lm_head"),
    "@norms": _NORMS,
    "@qkv": _QKV,
    "@attention": _ATTENTION,
    "@head_norms": ("self_attn.q_norm", "self_attn.k_norm"),
    "@mlp": _MLP,
    "@dense": (*_NORMS, *_ATTENTION, *_MLP),
    "@feed_forward_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "@latent": tuple(
        f"self_attn.{part}"
        for part in (
            *("q_proj", "q_a_proj", "q_b_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
            *("kv_b_proj", "k_b_proj", "v_b_proj", "o_proj"),
        )
    ),
    "@shared_expert": tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    "@shared_experts": tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
    "@experts": tuple(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")),
}
"""Names for groups of modules in the records."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The names of separate experts: their prefix in a layer, and llama.cpp's name (gate, down or up) for each
    module.
    """

    prefix: str
    modules: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """An invertible transform of some tensors (``steps``).

    Parameters
    ----------
    transform : str
        ``reorder``, ``transpose``, ``split``, ``join``, ``squeeze``, ``unsqueeze``, ``fold``, ``flatten``, ``values``,
        ``stack`` or ``rename``.
    tensors : tuple of str
        Modules or parameters in a layer, or full names outside of layers.
    into : tuple of str
        Names of the results, if they differ.
    sizes : tuple of str or int
        Formulas (``formulas``): the shape that ``reorder`` and ``fold`` give to rows, or the parts of a split.
    axes : tuple of int
        The order of the dimensions that ``reorder`` gives to ``sizes``.
    axis : int
        The dimension that is split, joined, removed or added, or along which ``reorder`` works.
    groups : str or int
        A formula: the number of groups of rows. ``split`` and ``join`` work on each group separately.
    function : str
        The function of ``values`` (``views.computed.FUNCTIONS``).
    """

    transform: str
    tensors: tuple[str, ...]
    into: tuple[str, ...] = ()
    sizes: tuple[str | int, ...] = ()
    axes: tuple[int, ...] = ()
    axis: int = 0
    groups: str | int = 1
    function: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One model type.

    Parameters
    ----------
    model_type, model_class : str
        Values in ``config.json``.
    arch : str
        llama.cpp's name of the architecture.
    plain : str
        Set if transformers has no class with a head for ``model_type``: the model type of folders that are converted
        from GGUF. A model of this type computes the same results for text.
    layer : tuple of str
        Modules of a layer in transformers' names. ``ends`` are the modules outside of layers, ``block`` the name before
        a layer's index.
    heads : tuple of str
        Modules of ``ends`` that belong to a model's head. In such a model the names of all others begin with ``base``.
    biased : tuple of str, optional
        Modules that may have a bias in llama.cpp, which refuses a bias of any other module; None: all.
    tied : bool
        Whether llama.cpp always uses the embedding as the head.
    classifier : mapping
        Modules of a classifier over the first token, and the modules whose names llama.cpp uses for them.
    unused : tuple of str
        Name prefixes of tensors that llama.cpp's graph does not use.
    names : mapping
        llama.cpp's names of tensors that gguf-py's table lacks: in a layer without ``blk.N.``, otherwise in full.
    steps : tuple of Step
        Transforms before names are translated.
    permuted : bool
        Whether rows of q and k are reordered: rotary embedding pairs neighbours in llama.cpp, halves in transformers.
    shifted : bool
        Whether norms multiply by 1 + w in transformers (llama.cpp multiplies by w).
    interleaved : bool
        Whether transformers also stacks experts, transposed, with gate and up in alternate columns.
    predicts : bool
        Whether llama.cpp's graph has layers that predict further tokens, after the model's own.
    separate_predictor : bool
        Whether the names of these layers begin with ``mtp`` in transformers.
    latent : bool
        Whether keys and values come from a latent vector (DeepSeek's MLA).
    experts : Experts, optional
    expert_count : str
        Key of ``config.json`` for the count of experts.
    required : tuple of str
        Usual keys of ``config.json`` that have to be integers above 0.
    aliases : mapping
        Usual keys of ``config.json``, and the names that the family has for them.
    keys : tuple of (key of config.json, GGUF key without the architecture's name, type)
        Keys in addition to the common ones, or replacing them.
    fixed : mapping
        Further GGUF keys without the architecture's name, with their types and values.
    computed : mapping
        GGUF keys without the architecture's name whose u32 values are formulas (``formulas``) of ``config.json``.
    rows : mapping
        GGUF keys without the architecture's name that are the number of rows of a module in a layer.
    counted : mapping
        GGUF keys without the architecture's name whose value is the length of a list in a multimodal model's
        ``config.json``. Each has the key of the list, and the length if that key is missing.
    by_layer : mapping
        GGUF keys without the architecture's name that hold an array of u32, with the formula for each layer type.
    scalars : mapping
        Parameters of a layer that hold one number: the GGUF key for an array of f32 with the number of each layer, and
        the parameter's shape.
    optional : tuple of str
        Modules of a layer that a layer may lack although others of its type have them.
    patterns : mapping
        Lists of ``config.json`` with a value per layer, and the values that repeat in them; others are refused.
    defaults : mapping
        Keys of ``config.json`` that this family needs and GGUF metadata lack, with the values that llama.cpp assumes.
    assumed : mapping
        For each key of ``config.json``, the values that give the same result as llama.cpp's graph, which ignores the
        key. A note on any other value names the first of these. Empty: any value gives the same result.
    requires : mapping
        Values that keys of ``config.json`` need to have, as a list or a formula; other values are refused.
    scalar : bool
        Whether ``config.json`` has the divisor of attention scores (``query_pre_attn_scalar``), which GGUF lacks.
    rope : mapping
        Like ``defaults``, for the rotary embedding's parameters; None if the family has no rotary embedding.
    theta : float
        transformers' default of ``rope_theta``.
    partial_default : float
        transformers' default of ``partial_rotary_factor``.
    sections : tuple of int
        transformers' default of the rotary embedding's ``mrope_section``; empty if llama.cpp has no such key.
    alternates : bool
        Whether the sections' frequencies alternate; otherwise they follow each other.
    rope_factors : bool
        Whether llama.cpp's graph reads the divisors of Llama 3's scaling.
    log_unit : float
        Factor of YaRN's ``mscale_all_dim`` in llama.cpp's key.
    long_factors : bool
        Whether llama.cpp's graph reads LongRoPE's divisors.
    rope_by_layer : bool
        Whether layers with a sliding window have separate rotary parameters.
    partial : bool
        Whether ``partial_rotary_factor`` is used; otherwise the rotary embedding covers the whole head.
    window : int
        Period of llama.cpp's sliding-window layers: the last layer of each period sees all tokens. 0: every layer does.
    window_pattern : bool
        Whether the file states which layers have a sliding window.
    window_layers : int
        llama.cpp uses a sliding window only if the model has exactly this number of layers; 0: for any number.
    padded : bool
        Whether the first token of a text has the position after the padding token's id. llama.cpp's position embeddings
        lack the rows of earlier positions.
    tokenizer_model : str
        llama.cpp's name of the tokenizer, if it distinguishes the family from others.
    pretokenizers : tuple of str
        llama.cpp's names of pre-tokenizers that distinguish the family from others of its architecture.
    dense_layers : int
        transformers' default of ``first_k_dense_replace``.
    lists_dense_layers : bool
        Whether the class reads ``mlp_layer_types`` and ignores ``first_k_dense_replace``.
    from_metadata : bool
        Whether ``config.json`` can be built from GGUF metadata alone. If not, Ingot only reads files that contain their
        original ``config.json``.
    """

    model_type: str
    model_class: str
    arch: str
    plain: str = ""
    layer: tuple[str, ...] = _GROUPS["@dense"]
    ends: tuple[str, ...] = _GROUPS["@ends"]
    block: str = "model.layers"
    base: str = ""
    heads: tuple[str, ...] = ()
    biased: tuple[str, ...] | None = None
    tied: bool = False
    classifier: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    permuted: bool = False
    shifted: bool = False
    interleaved: bool = False
    predicts: bool = False
    separate_predictor: bool = False
    latent: bool = False
    experts: Experts | None = None
    expert_count: str = "num_experts"
    required: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    aliases: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[tuple[str, str, str], ...] = ()
    fixed: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    computed: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    counted: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    by_layer: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    patterns: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    assumed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    requires: Mapping[str, str | tuple[object, ...]] = field(default_factory=dict)
    scalar: bool = False
    rope: Mapping[str, object] | None = field(default_factory=dict)
    theta: float = 10000.0
    partial_default: float = 1.0
    sections: tuple[int, ...] = ()
    alternates: bool = False
    rope_factors: bool = False
    log_unit: float = 0.1
    long_factors: bool = False
    rope_by_layer: bool = False
    partial: bool = False
    window: int = 0
    window_pattern: bool = False
    window_layers: int = 0
    padded: bool = False
    tokenizer_model: str = ""
    pretokenizers: tuple[str, ...] = ()
    dense_layers: int = 0
    lists_dense_layers: bool = False
    from_metadata: bool = True


_LISTS = ("layer", "ends", "heads", "biased", "unused", "required", "sections", "optional", "pretokenizers")


def parse_families(text: str, earlier: Mapping[str, Mapping[str, Any]] = {}) -> dict[str, dict[str, Any]]:
    """Return the records of a TOML text by model type, each merged over the record that its key ``like`` names.

    ``earlier`` contains records of other files. A record whose name begins with ``_`` is only a base for others. In
    lists of modules, names that begin with ``@`` stand for groups.
    """
    records: dict[str, dict[str, Any]] = {}
    for model_type, table in tomllib.loads(text).items():
        like = table.pop("like", None)
        base = {} if like is None else {**earlier, **records}[like]
        record = {**base, **table, "model_type": model_type}
        for key in ("defaults", "assumed", "fixed", "names", "aliases", "computed", "requires"):
            if key in base and key in table:
                record[key] = {**base[key], **table[key]}
        records[model_type] = record
    return records


def make_family(record: Mapping[str, Any]) -> Family:
    """Return the family of a record. Raises ``TypeError`` for unknown keys."""
    values = dict(record)
    for key in _LISTS:
        if key in values:
            values[key] = tuple(item for name in values[key] for item in _GROUPS.get(name, (name,)))
    if "experts" in values:
        values["experts"] = Experts(**values["experts"])
    values["steps"] = tuple(make_step(step) for step in values.get("steps", ()))
    values["keys"] = tuple((key, name, gguf_type) for key, name, gguf_type in values.get("keys", ()))
    for key in ("fixed", "assumed", "counted"):
        values[key] = {name: tuple(value) for name, value in values.get(key, {}).items()}
    values["patterns"] = {name: tuple(value) for name, value in values.get("patterns", {}).items()}
    values["scalars"] = {name: (key, tuple(shape)) for name, (key, shape) in values.get("scalars", {}).items()}
    for key in ("defaults", "rope"):
        if key in values:
            values[key] = {name: None if value == "null" else value for name, value in values[key].items()}
    if "requires" in values:
        values["requires"] = {
            name: value if isinstance(value, str) else tuple(value) for name, value in values["requires"].items()
        }
    if values.pop("rotary", True) is False:
        values["rope"] = None
    return Family(**values)


def make_step(record: Mapping[str, Any]) -> Step:
    """Return the step of a record. Raises ``TypeError`` for unknown keys."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    return Step(**values)


_FOLDER = files("ingot.translate").joinpath("family_data")
_REASONS = "refused.toml"


def _read_families() -> dict[str, Family]:
    records: dict[str, dict[str, Any]] = {}
    names = sorted(entry.name for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))
    for name in names:
        if name != _REASONS:
            records |= parse_families(_FOLDER.joinpath(name).read_text("utf-8"), records)
    return {model_type: make_family(record) for model_type, record in records.items() if not model_type.startswith("_")}


FAMILIES: Mapping[str, Family] = _read_families()
"""All families by transformers' model type. A GGUF file is read as the first family that matches its architecture."""


def refusal_reasons() -> dict[str, str]:
    """Return the known reasons why Ingot does not translate a family for llama.cpp, by model type."""
    reasons: dict[str, str] = tomllib.loads(_FOLDER.joinpath(_REASONS).read_text("utf-8"))["reasons"]
    return reasons


def family_of(arch: str, metadata: Mapping[str, object]) -> Family | None:
    """Return the family that a GGUF file's architecture and metadata describe; None if it is unsupported."""
    candidates = [family for family in FAMILIES.values() if family.arch == arch]
    pretokenizer = metadata.get("tokenizer.ggml.pre")
    candidates.sort(key=lambda family: pretokenizer not in family.pretokenizers)
    experts = bool(metadata.get(f"{arch}.expert_count"))
    for family in candidates:
        matches = all(
            same_value(metadata.get(f"{arch}.{key}", value), value) for key, (_, value) in family.fixed.items()
        )
        matches = matches and family.tokenizer_model in ("", metadata.get("tokenizer.ggml.model"))
        if matches and (arch != "llama" or (family.experts is not None) == experts):
            return family
    return None


def has_step(family: Family, name: str) -> bool:
    """Return whether a step transforms a tensor. ``name`` is relative to its layer, or the full name outside of
    layers.
    """
    inner = _INDEX.sub("{}", name)
    module = inner.rpartition(".")[0]
    tensors = {tensor for step in family.steps for tensor in step.tensors}
    return inner in tensors or module in tensors


def has_classifier(family: Family, names: Container[str]) -> bool:
    """Return whether the names contain a weight of each module of the family's classifier."""
    modules = family.classifier
    return bool(modules) and all(
        f"{family.base}{module}.weight" in names or f"{module}.weight" in names for module in modules
    )
