"""llama.cpp's mixtures of block types, such as Q4_K_M: which tensor gets which type.

The rules are those of ``llama-quantize`` (llama.cpp 007dbbf, ``src/llama-quant.cpp``). They depend on the model's
numbers of layers and experts, on the number of query heads per key head, and on whether the head is the embedding.
``expand`` converts a mixture and these facts to ordinary rules of a recipe. Rules contain tensor names of GGUF and of
transformers, because quantizers work on the names of the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.errors import UsageError
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.naming.names import count_layers, layer_of, role_of
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Mixture, Patterns, Recipe, Rule

CALIBRATED = "-calibrated"
_IMPORTANCE = "importance"
_GPTQ = "gptq"
_AWQ = "awq"
_QUANTIZER = "two-sided"


# Mixture: general.file_type, base type, and whether matrices can be rounded by a quantizer.
_TABLE: Mapping[str, tuple[int, str, bool]] = {
    "Q8_0": (7, "q8_0", False),
    "Q6_K": (18, "q6_k", True),
    "Q5_K_M": (17, "q5_k", True),
    "Q5_K_S": (16, "q5_k", True),
    "Q4_K_M": (15, "q4_k", True),
    "Q4_K_S": (14, "q4_k", True),
    "IQ4_NL": (25, "iq4_nl", True),
    "NVFP4": (39, "nvfp4", True),
    "IQ4_XS": (30, "iq4_xs", True),
    "MXFP4_MOE": (38, "mxfp4", True),
    "Q3_K_L": (13, "q3_k", True),
    "Q3_K_M": (12, "q3_k", True),
    "Q3_K_S": (11, "q3_k", True),
    "IQ3_M": (27, "iq3_s", True),
    "IQ3_S": (26, "iq3_s", True),
    "IQ3_XXS": (23, "iq3_xxs", True),
    "Q2_K": (10, "q2_k", True),
    "IQ2_M": (29, "iq2_s", True),
    "IQ2_S": (28, "iq2_xs", True),
    "IQ2_XS": (20, "iq2_xs", True),
    "Q2_0": (41, "q2_0", False),
    "IQ2_XXS": (19, "iq2_xxs", True),
    "TQ2_0": (37, "tq2_0", False),
    "IQ1_M": (31, "iq1_m", True),
    "TQ1_0": (36, "tq1_0", False),
    "Q1_0": (40, "q1_0", False),
}
NAMES = tuple(_TABLE)
PRESETS = tuple(
    preset for name, (_, _, rounds) in _TABLE.items() for preset in ((name + CALIBRATED, name) if rounds else (name,))
)
"""Names of presets, from the most bits to the fewest."""

# The type that replaces another whose block does not divide the columns. llama.cpp has none for q1_0 and nvfp4.
_FALLBACKS: Mapping[str, str] = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q1_0", "q2_0", "q2_k", "q3_k", "tq1_0", "tq2_0"), "q4_0"),
    "nvfp4": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
_F16 = "f16"
_SMALL_FLOATS: Mapping[str, Mapping[str, Any]] = {
    "mxfp4": {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"},
    "nvfp4": {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn"},
}

_VALUE = "attn_v"
_KEY = "attn_k"
_QUERY = "attn_q"
_OUTPUT = "attn_output"
_DOWN = "ffn_down"
# category: role of its tensors, and patterns of their names
_CATEGORIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    _VALUE: (
        "attention",
        (
            *("*.attn_v.weight", "*.attn_qkv.weight", "*.attn_kv_b.weight", "*.v_proj.weight", "*.qkv_proj.weight"),
            *("*.query_key_value.weight", "*.c_attn.weight", "*.Wqkv.weight", "*.W_pack.weight", "*.wqkv.weight"),
            *("*.wv.weight", "*.value.weight", "*.v_lin.weight"),
        ),
    ),
    _KEY: ("attention", ("*.attn_k.weight", "*.k_proj.weight", "*.wk.weight", "*.key.weight", "*.k_lin.weight")),
    _QUERY: ("attention", ("*.attn_q.weight", "*.q_proj.weight", "*.wq.weight", "*.query.weight", "*.q_lin.weight")),
    _OUTPUT: (
        "attention",
        (
            *("*.attn_output.weight", "*.o_proj.weight", "*.out_proj.weight", "*.wo.weight", "*.out_lin.weight"),
            *("*.output.dense.weight", "*attention.dense.weight", "*.attn.c_proj.weight"),
        ),
    ),
    _DOWN: (
        "mlp",
        (
            *("*.ffn_down.weight", "*.ffn_down_exps.weight", "*.ffn_down_shexp.weight", "*.down_proj.weight"),
            *("*.experts.down_proj", "*.w2.weight", "*.fc2.weight", "*.c_proj.weight", "*.dense_4h_to_h.weight"),
            *("*.output.dense.weight", "*.fc_out.weight", "*.lin2.weight", "*.wo.weight"),
        ),
    ),
}
_MATCHERS = {category: (role, Patterns(patterns)) for category, (role, patterns) in _CATEGORIES.items()}
_HEAD = ("output.weight", "*lm_head.weight", "*embed_out.weight")
_NO_TOKENS = ("*position*", "*pos_emb*", "*token_type*", "*wpe.weight", "*relative_attention*")
_EXPERTS = ("*_exps.weight", "*.experts.*")
_LAYERS = ("attention", "mlp", "ssm")

_LOW = ("IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
LLAMA_LAYERS = 32
_FINER_LOW = ("IQ2_S", "IQ2_M")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model on which the types depend.

    Parameters
    ----------
    layers : int
    shared_heads : int
        The number of query heads for each key head.
    experts : int
        The number of experts per layer, or 0.
    tied : bool
        Whether the head is the embedding.
    architecture : str
        ``model_type`` of config.json or ``general.architecture``.
    value_layers : sequence of int
        The layer of each matrix that computes attention values.
    down_layers : sequence of int
        The layer of each last matrix of a feed-forward block; stacked experts count as one.
    """

    layers: int
    shared_heads: int = 1
    experts: int = 0
    tied: bool = False
    architecture: str = ""
    value_layers: Sequence[int] = ()
    down_layers: Sequence[int] = ()

    @property
    def is_falcon(self) -> bool:
        return self.architecture == "falcon"

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp applies its separate rules for models of 70 billion weights."""
        return self.architecture in ("llama", "qwen2") and self.layers == 80 and self.shared_heads > 1


def parse_mixture(name: object, quantizer: object = None) -> Mixture:
    """Return the mixture with a name; raise ``UsageError`` ``recipe.mixture`` if mixture or quantizer is unknown."""
    if not isinstance(name, str) or name not in _TABLE:
        raise UsageError(
            f"expected a mixture of llama.cpp ({', '.join(NAMES)}), found {name!r:.80}", rule="recipe.mixture"
        )
    file_type, base, rounds = _TABLE[name]
    if quantizer is not None and not (rounds and isinstance(quantizer, str)):
        raise UsageError(
            f"expected no quantizer with the mixture {name}: it rounds each block separately"
            if not rounds
            else f"expected the name of a quantizer, found {quantizer!r:.80}",
            rule="recipe.mixture",
        )
    return Mixture(name, file_type, base, quantizer if isinstance(quantizer, str) else None)


def preset_toml(preset: str) -> str:
    """Return a preset as TOML text."""
    name = preset.removesuffix(CALIBRATED)
    base = TYPES[_TABLE[name][1]]
    bits = base.nbytes * 8 / base.elements
    rounding = (
        "matrices rounded by what they multiply: statistics given by --calibration, else of samples of the model"
        if preset != name
        else "each block searched by itself"
    )
    quantizer = f'quantizer = "{_QUANTIZER}"\n' if preset != name else ""
    return (
        f'name = "{preset}"\ndescription = """\nThe mixture {name} of llama.cpp, mostly {_TABLE[name][1].upper()} '
        f'({bits:g} bits per weight): its choice of type for\neach tensor; {rounding}.\n"""\n'
        f'mixture = "{name}"\n{quantizer}'
    )


def facts_of(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], metadata: Mapping[str, Any]
) -> ModelFacts:
    """Return the facts of a model from its tensors, its ``config.json`` and its GGUF metadata.

    ``config`` and ``metadata`` may be empty.
    """
    nested = config.get("text_config")
    config = {**config, **nested} if isinstance(nested, Mapping) else config
    arch = metadata.get("general.architecture", config.get("model_type", ""))

    def number(keys: Sequence[str]) -> int:
        for value in [config.get(key) for key in keys] + [metadata.get(f"{arch}.{key}") for key in keys]:
            first = value[0] if isinstance(value, Sequence) and value and not isinstance(value, str) else value
            if type(first) is int and first > 0:
                return first
        return 0

    heads = number(("num_attention_heads", "n_head", "attention.head_count"))
    key_heads = number(("num_key_value_heads", "num_kv_heads", "n_head_kv", "attention.head_count_kv"))
    shared = heads // key_heads if heads and key_heads else _shared_by_shape(shapes)
    experts = number(("num_local_experts", "num_experts", "n_routed_experts", "expert_count"))
    is_head = Patterns(_HEAD)
    return ModelFacts(
        count_layers(shapes),
        max(shared, 1),
        experts,
        not any(is_head(name) for name in shapes),
        str(arch),
        _layers_with(shapes, _VALUE),
        _layers_with(shapes, _DOWN),
    )


def category_of(name: str) -> str | None:
    """Return the category of a layer's tensor, such as ``attn_v``; None for other tensors."""
    role = role_of(name)
    return next((category for category, (of_role, fits) in _MATCHERS.items() if role == of_role and fits(name)), None)


def _shared_by_shape(shapes: Mapping[str, tuple[int, ...]]) -> int:
    rows = {
        category: shape[0]
        for name, shape in reversed(list(shapes.items()))
        if len(shape) == 2 and (category := category_of(name)) in (_QUERY, _KEY)
    }
    return rows[_QUERY] // rows[_KEY] if rows.get(_KEY) and _QUERY in rows else 1


def _layers_with(shapes: Mapping[str, tuple[int, ...]], category: str) -> list[int]:
    """Return the layer of each matrix of a category, in order; experts of a layer count as one."""
    matrices = {
        (layer, _variant(name))
        for name, shape in shapes.items()
        if len(shape) > 1 and category_of(name) == category and (layer := layer_of(name)) is not None
    }
    return [layer for layer, _ in sorted(matrices)]


def _variant(name: str) -> str:
    return "shared" if "shared_expert" in name or "_shexp" in name else "experts" if "exp" in name else ""


def expand(recipe: Recipe, facts: ModelFacts) -> Recipe:
    """Return the recipe with the rules of its mixture for a model, after the recipe's rules."""
    if recipe.mixture is None:
        return recipe
    rules = list(recipe.rules)
    fallbacks: dict[str, tuple[str, str]] = {}
    for label, block_type, quantizer, conditions in _assignments(recipe.mixture, facts):
        fallback = _FALLBACKS.get(block_type)
        variants = [(block_type, TYPES[block_type].elements)]
        variants += [(fallback, TYPES[fallback].elements)] if fallback is not None else []
        for stored, multiple in (*variants, (_F16, 1)):
            text = f"{label}: {stored}"
            if stored != block_type:
                text += f" for {block_type}"
                fallbacks[text] = block_type, stored
            rules.append(Rule(_choice(stored, quantizer), text, cols_multiple_of=multiple, min_ndim=2, **conditions))
    return replace(recipe, rules=tuple(rules), fallbacks=fallbacks, general=True)


def _choice(block_type: str, quantizer: str | None) -> Choice:
    """Return the choice that stores a tensor in a block type, or in f16.

    NVFP4, and MXFP4 that a quantizer rounds, are encoded as small floats and become blocks when the file is written.
    """
    if block_type == _F16:
        return Choice(DenseLayout.codec, {"dtype": _F16})
    if block_type in _SMALL_FLOATS and (quantizer is not None or block_type == "nvfp4"):
        return Choice(ScaledCodebookLayout.codec, _SMALL_FLOATS[block_type], quantizer=quantizer)
    return Choice(GgmlBlocksLayout.codec, {"type": block_type}, quantizer=quantizer)


def expand_for_llama(recipe: Recipe) -> Recipe:
    """Return the recipe with the rules of its mixture for a Llama model of ``LLAMA_LAYERS`` layers.

    Lists and checks of presets use this, because they have no model.
    """
    layers = range(LLAMA_LAYERS)
    return expand(recipe, ModelFacts(LLAMA_LAYERS, architecture="llama", value_layers=layers, down_layers=layers))


_Assignment = tuple[str, str, str | None, dict[str, Any]]


def _assignments(mixture: Mixture, facts: ModelFacts) -> Iterator[_Assignment]:
    """Yield the rules of a mixture for a model: label, type, quantizer and conditions.

    The first rule whose conditions hold applies.
    """
    quantizer = _quantizer_of_ends(mixture)
    yield "head", _head_type(mixture), quantizer, {"match": _HEAD, "roles": ("head",)}
    embedding = _head_type(mixture) if facts.tied else _embedding_type(mixture)
    yield "embedding", embedding, quantizer, {"roles": ("embedding",), "exclude": _NO_TOKENS}
    if mixture.name == "MXFP4_MOE":
        yield "experts", "mxfp4", mixture.quantizer, {"match": _EXPERTS, "roles": ("mlp",)}
        yield "matrices", "q8_0", mixture.quantizer, {"roles": _LAYERS}
        yield "matrices", "q8_0", quantizer, {"roles": ("head",)}
        return
    for category, (role, patterns) in _CATEGORIES.items():
        by_type: dict[str, list[int]] = {}
        for layer in range(facts.layers):
            block_type = _type_in_layer(mixture, facts, category, layer)
            if block_type != mixture.base:
                by_type.setdefault(block_type, []).append(layer)
        for block_type, layers in by_type.items():
            conditions: dict[str, Any] = {"match": patterns, "roles": (role,), "layers": ",".join(map(str, layers))}
            yield category, block_type, mixture.quantizer, conditions
    yield "matrices", mixture.base, mixture.quantizer, {"roles": _LAYERS}
    yield "matrices", mixture.base, quantizer, {"roles": ("head",)}


def _quantizer_of_ends(mixture: Mixture) -> str | None:
    """Return the quantizer for embeddings and heads; None if the mixture has no quantizer.

    Their statistics contain no moments of output gradients, which some quantizers for layers need.
    """
    if mixture.quantizer is None:
        return None
    return _IMPORTANCE if mixture.quantizer in (_AWQ, f"{_AWQ}+{_IMPORTANCE}", _IMPORTANCE) else _GPTQ


def _head_type(mixture: Mixture) -> str:
    if mixture.name == "MXFP4_MOE" or mixture.base == "q8_0":
        return "q8_0"
    return "q5_k" if mixture.name in (*_LOW, "IQ3_XXS") else "q6_k"


def _embedding_type(mixture: Mixture) -> str:
    if mixture.name in ("IQ1_M", "IQ2_XXS", "IQ2_XS"):
        return "q2_k"
    if mixture.name in (*_FINER_LOW, "IQ3_XXS"):
        return "iq3_s"
    if mixture.name in ("TQ1_0", "TQ2_0", "Q2_0"):
        return "q4_k"
    return "q8_0" if mixture.name == "MXFP4_MOE" else mixture.base


def _type_in_layer(mixture: Mixture, facts: ModelFacts, category: str, layer: int) -> str:
    # llama.cpp counts the matrices of a category, in whatever layers; of two in a layer, the first decides here
    values = facts.value_layers
    value = values.index(layer) if layer in values else layer
    if mixture.name in _LOW:
        return _low_type(mixture, facts, category, layer)
    if category == _VALUE:
        return _value_type(mixture, facts, value)
    if category == _DOWN:
        return _down_type(mixture, facts, layer)
    if category == _OUTPUT:
        return _output_type(mixture, facts)
    if category == _KEY and facts.experts == 8:
        return "q8_0"
    return "iq2_s" if mixture.name == "IQ3_XXS" else mixture.base  # keys and queries


def _low_type(mixture: Mixture, facts: ModelFacts, category: str, layer: int) -> str:
    """Return the type of a matrix of ``category`` in ``layer``, for the mixtures below 3 bits."""
    better = "iq3_s" if mixture.name in _FINER_LOW else "q2_k"
    if category == _VALUE:
        return "q4_k" if facts.shared_heads >= 4 or facts.experts >= 4 else better
    if category == _KEY:
        return "q4_k" if facts.experts == 8 else mixture.base
    if category == _DOWN:
        downs = facts.down_layers
        index = downs.index(layer) if layer in downs else layer
        return better if index < facts.layers // 8 else mixture.base
    if category == _OUTPUT:
        if facts.experts == 8:
            return "q5_k"
        return "iq2_xxs" if mixture.name == "IQ1_M" else "iq3_s" if mixture.name in _FINER_LOW else mixture.base
    return mixture.base


def _needs_more_bits(index: int, count: int) -> bool:
    """Return whether llama.cpp assigns more bits to matrix ``index`` of ``count``.

    It does so for the first and the last eighth of the matrices, and for every third matrix between them.
    """
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def _value_type(mixture: Mixture, facts: ModelFacts, index: int) -> str:
    if facts.experts == 8:
        return "q8_0"
    shares = facts.shared_heads >= 4
    name = mixture.name
    result = mixture.base
    if name == "Q2_K":
        result = "q4_k" if shares else "q3_k"
    elif name == "IQ3_XXS":
        result = "q4_k" if shares else "iq3_xxs" if mixture.quantizer else "iq3_s"
    elif (name == "IQ3_S" and shares) or name == "IQ3_M":
        result = "q4_k"
    elif name == "Q3_K_M":
        result = "q5_k" if index < 2 else "q4_k"
    elif name == "Q3_K_L" or (name in ("IQ4_NL", "IQ4_XS") and shares) or (name == "Q4_K_S" and index < 4):
        result = "q5_k"
    elif name in ("Q4_K_M", "Q5_K_M") and _needs_more_bits(index, len(facts.value_layers) or facts.layers):
        result = "q6_k"
    return "q5_k" if facts.is_70b and result in ("q3_k", "q4_k") else result


def _down_type(mixture: Mixture, facts: ModelFacts, layer: int) -> str:
    name = mixture.name
    count = facts.layers
    result = mixture.base
    more = _needs_more_bits(layer, count)
    is_first = layer < count // 8
    if name == "Q2_K":
        result = "q3_k"
    elif name == "IQ3_XXS" and not mixture.quantizer:
        result = "q4_k" if is_first else "q3_k"
    elif name == "Q3_K_M":
        result = "q5_k" if layer < count // 16 else "q3_k" if facts.is_falcon and not more else "q4_k"
    elif name == "IQ3_M" and (is_first or (facts.experts == 8 and more)):
        result = "q4_k"
    elif name == "Q3_K_L":
        result = "q4_k" if facts.is_falcon else "q5_k"
    elif name == "Q4_K_M" and facts.is_falcon:
        result = "q6_k" if layer < count // 16 else "q5_k" if more else "q4_k"
    elif name in ("Q4_K_M", "Q5_K_M") and more:
        result = "q6_k"
    elif (is_first and name in ("IQ4_NL", "IQ4_XS") and not mixture.quantizer) or (
        is_first and name == "Q4_K_S" and not facts.is_falcon
    ):
        result = "q5_k"
    return result


_WITH_EIGHT_EXPERTS = (
    *("Q2_K", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS"),
)
_OUTPUT_TYPES = {"Q2_K": "q3_k", "IQ3_XXS": "iq3_s", "Q3_K_M": "q4_k", "Q3_K_L": "q5_k", "IQ3_M": "q4_k"}


def _output_type(mixture: Mixture, facts: ModelFacts) -> str:
    if facts.is_falcon:
        return "q4_k" if mixture.name == "Q3_K_L" else mixture.base
    if facts.experts == 8:
        return "q5_k" if mixture.name in _WITH_EIGHT_EXPERTS else mixture.base
    return _OUTPUT_TYPES.get(mixture.name, mixture.base)
