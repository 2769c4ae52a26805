"""Names and shapes of tensors in mlx_lm's modules, and the views between them and transformers' tensors.

mlx_lm converts transformers' tensors when it loads them (``Model.sanitize``), but most modules convert only dense
tensors and ignore the scales of packed experts. A folder for mlx_lm therefore has the tensors of its modules, which
``sanitize`` does not change. The rules state for each family what ``sanitize`` does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.view import View
from ingot.translate import hyper
from ingot.views.dense import Change, change
from ingot.views.names import rename
from ingot.views.rows import stack, unstack
from ingot.views.transpose import transpose
from ingot.views.units import Units, UnitSelection, interleave, split_units

RULE = "architecture.rows"
_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"(.*?\b(?:layers|h)\.[0-9]{1,6}\.)(.+)")
_PARTS = ("gate_proj", "up_proj", "down_proj")
_UNTRANSPOSED = ".untransposed"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of experts: ``{prefix}.N.{part}`` for separate matrices, ``{stacked}.{part of mlx_lm}`` for stacks."""

    prefix: str = "mlp.experts"
    stacked: str = "mlp.switch_mlp"
    parts: Mapping[str, str] = field(default_factory=lambda: dict(zip(_PARTS, _PARTS, strict=True)))


@dataclass(frozen=True, slots=True)
class MlxRules:
    """The differences of one family's tensors in mlx_lm. Names are those of transformers, within a layer unless noted.

    Parameters
    ----------
    experts : ExpertNames, optional
    halves : mapping
        Tensors whose rows are split into two tensors in mlx_lm, and the names of the two.
    modules : mapping
        mlx_lm's names of modules or parameters.
    prefixes : sequence of (prefix, prefix in mlx_lm)
        Beginnings of full names; the first that matches is replaced.
    transposed : tuple of str
        Matrices that mlx_lm stores transposed.
    convolutions : tuple of str
        Endings of weights [channels, 1, width], in mlx_lm [channels, width, 1].
    shifted : tuple of str
        Endings of norms to which mlx_lm adds 1, if there is an unconverted convolution.
    scalars : tuple of str
        Endings of tensors of shape [1], which have shape [] in mlx_lm.
    latent : bool
        Whether mlx_lm splits ``kv_b_proj`` by heads.
    ignored : mapping
        Endings of tensors that mlx_lm drops although transformers uses them, and a description of each.
    packable : str
        Why the family's matrices cannot be packed; empty if they can.
    differs : str
        The difference between mlx_lm's and transformers' computation; empty if logits are equal.
    """

    experts: ExpertNames | None = None
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    shifted: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    latent: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)
    packable: str = ""
    differs: str = ""


_MLP = MlxRules(ExpertNames())
_LATENT = replace(_MLP, latent=True)
_IN_PLACE = MlxRules(ExpertNames(stacked="mlp.experts"))
_W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BLOCK_SPARSE = MlxRules(ExpertNames("block_sparse_moe.experts", "block_sparse_moe.switch_mlp", _W))
_CONVOLUTION = MlxRules(convolutions=("conv1d.weight",))
_SPLIT_EXPERTS = {
    "block_sparse_moe.input_linear.weight": (
        "block_sparse_moe.switch_mlp.gate_proj.weight",
        "block_sparse_moe.switch_mlp.up_proj.weight",
    )
}
_OUTPUT = {"block_sparse_moe.output_linear": "block_sparse_moe.switch_mlp.down_proj"}
_DENSE_SPLIT = {"shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}
_QWEN_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)
_QWEN_NEXT = replace(_MLP, convolutions=("conv1d.weight",), shifted=_QWEN_NORMS)
_WRAPPED = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_STACKED_PAIR = {"mlp.experts.gate_up_proj": ("mlp.switch_mlp.gate_proj.weight", "mlp.switch_mlp.up_proj.weight")}
_STACKED_DOWN = {"mlp.experts.down_proj": "mlp.switch_mlp.down_proj.weight"}
_GLU_PAIR = {"experts.gate_up_proj": ("experts.switch_glu.gate_proj.weight", "experts.switch_glu.up_proj.weight")}
_GLU_DOWN = {"experts.down_proj": "experts.switch_glu.down_proj.weight"}

RULES: Mapping[str, MlxRules] = {
    **dict.fromkeys(
        (
            *("bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4"),
            *("granite", "helium", "hunyuan_v1_dense", "internlm3", "llama", "llama4_text", "ministral3"),
            *("mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
            *("stablelm", "starcoder2", "gpt_bigcode", "gpt_oss"),
        ),
        MlxRules(),
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "mimo_v2_flash", "mellum"), _MLP),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"), _LATENT),
    "deepseek_v2": _MLP,
    "apertus": MlxRules(scalars=(".alpha_p", ".alpha_n")),
    **dict.fromkeys(("dots1", "afmoe"), _IN_PLACE),
    **dict.fromkeys(("mixtral", "phimoe", "minimax", "minimax_m2"), _BLOCK_SPARSE),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _CONVOLUTION),
    "exaone_moe": replace(_MLP, modules={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}),
    "laguna": replace(
        _MLP,
        modules={
            "mlp.gate.weight": "mlp.gate.proj.weight",
            "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        },
    ),
    "jamba": replace(
        _CONVOLUTION,
        experts=ExpertNames("feed_forward.experts", "feed_forward.switch_mlp"),
        differs="the weights of the chosen experts add up to 1",
    ),
    "nemotron_h": replace(
        _CONVOLUTION,
        experts=ExpertNames("mixer.experts", "mixer.switch_mlp", {"up_proj": "fc1", "down_proj": "fc2"}),
    ),
    "lfm2": MlxRules(convolutions=("conv.conv.weight",)),
    "lfm2_moe": MlxRules(
        ExpertNames("feed_forward.experts", "feed_forward.switch_mlp", _W),
        modules={f"feed_forward.{part}": f"feed_forward.{new}" for part, new in _W.items()},
        convolutions=("conv.conv.weight",),
    ),
    "granitemoe": MlxRules(halves=_SPLIT_EXPERTS, modules=_OUTPUT),
    "granitemoehybrid": replace(_CONVOLUTION, halves=_SPLIT_EXPERTS, modules=_OUTPUT),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5": replace(_QWEN_NEXT, experts=None, prefixes=_WRAPPED),
    "qwen3_5_moe": replace(_QWEN_NEXT, experts=None, prefixes=_WRAPPED, halves=_STACKED_PAIR, modules=_STACKED_DOWN),
    "gemma4_text": MlxRules(halves=_GLU_PAIR, modules=_GLU_DOWN),
    "gemma4": MlxRules(halves=_GLU_PAIR, modules=_GLU_DOWN, prefixes=_WRAPPED[:1]),
    "mistral3": MlxRules(prefixes=_WRAPPED),
    "gpt2": MlxRules(
        prefixes=(
            ("transformer.", "model."),
            ("h.", "model.h."),
            ("wte.", "model.wte."),
            ("wpe.", "model.wpe."),
            ("ln_f.", "model.ln_f."),
        ),
        transposed=tuple(f"{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ),
    "gpt_neox": MlxRules(
        prefixes=(("gpt_neox.layers.", "model.h."), ("embed_out.", "model.embed_out."), ("gpt_neox.", "model."))
    ),
    "gptj": MlxRules(prefixes=(("transformer.", "model."),)),
    "ernie4_5_moe": replace(_MLP, ignored={".e_score_correction_bias": "the correction of the choice of experts"}),
    "minicpm3": MlxRules(differs="logits differ from transformers'"),
    "falcon_h1": MlxRules(packable="mlx_lm multiplies matrices of falcon_h1 by constants when it loads dense ones"),
}
"""Rules by model type. They are empty for a family whose tensors do not differ."""


def rules_of(config: Mapping[str, Any]) -> MlxRules | None:
    """Return the rules of the family in ``config.json``; None if there are none.

    If ``num_local_experts`` is 0, the layers of Granite have one matrix of gate and up instead of experts.
    """
    rules = RULES.get(str(config.get("model_type")))
    if rules is not None and config.get("model_type") == "granitemoehybrid" and not config.get("num_local_experts"):
        return replace(rules, halves=_DENSE_SPLIT, modules={"shared_mlp.output_linear": "mlp.down_proj"})
    return rules


def why_unopened(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return why mlx_lm's module cannot load a model with this config and these tensors; empty if it can."""
    model_type = config.get("model_type")
    if model_type == "phimoe" and not (config.get("attention_bias") and config.get("lm_head_bias")):
        return "mlx_lm's phimoe has biases of attention and of the head, this model has none"
    if model_type == "gpt_neox" and config.get("intermediate_size") != 4 * int(config.get("hidden_size") or 0):
        return "mlx_lm's gpt_neox has an intermediate_size of 4 times the hidden_size, this model another"
    if model_type == "bitnet" and not any(name.endswith(".weight_scale") for name in names):
        return "mlx_lm's bitnet has packed ternary matrices, this model has none"
    if model_type == "llama4_text" and any(".experts." in name for name in names):
        return "mlx_lm's llama4_text has no experts; its module llama4 needs the config.json of the whole model"
    return ""


def why_unpackable(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return why mlx_lm's module requires these tensors dense; empty if they can be packed."""
    rules = rules_of(config)
    if rules is not None and rules.packable:
        return rules.packable
    if config.get("model_type") == "llama4_text" and config.get("tie_word_embeddings") and _EMBEDDING in names:
        return f"mlx_lm's llama4_text multiplies by {_EMBEDDING} itself, which has to be dense"
    return ""


def to_mlx(checkpoint: Checkpoint, config: Mapping[str, Any]) -> View:
    """Return transformers' tensors with the names and shapes of mlx_lm's module.

    Tensors without a rule are unchanged. Raises ``UnsupportedError`` ``architecture.rows``: a missing expert, or a
    tensor of another shape.
    """
    rules = rules_of(config)
    if rules is None:
        return View(checkpoint)
    names = _MlxNames(rules)
    view = _arranged(checkpoint, rules, names, config)
    count = sum(name not in checkpoint or view[name].shape != checkpoint[name].shape for name in view)
    convolutions = [name for name in view if _is_convolution(name, view[name].shape, rules)]
    renamed = {name: new for name in view if (new := names.to_mlx(name)) != name}
    changes = {name: _reshaped(view, name, last=True) for name in convolutions}
    changes |= {name: Change(view[name].dtype, shape=()) for name in _scalars(view, rules, (1,))}
    if convolutions:
        changes |= {name: Change(view[name].dtype, 1.0) for name in view if _is_shifted(view, name, rules)}
    rounded = [name for name, planned in changes.items() if planned.plus and not _is_reversible(view, name, planned)]
    view = change(view, changes) if changes else view
    view = rename(view, renamed) if renamed else view
    model_type = config.get("model_type")
    notes = [f"mlx_lm 0.32 computes {model_type} otherwise than transformers: {rules.differs}"] if rules.differs else []
    notes += [f"{count} tensors are stacked, split or transposed as mlx_lm has them"] if count else []
    if rounded:
        notes.append(f"not carried over: the last bits of {', '.join(rounded[:3])}, where 1 + w is rounded")
    return View(view, notes)


def _arranged(checkpoint: Checkpoint, rules: MlxRules, names: _MlxNames, config: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with tensors transposed, split and stacked as in mlx_lm, under transformers' names."""
    view = checkpoint
    if rules.transposed and (matrices := {name: name for name in view if names.is_transposed(name, view)}):
        view = transpose(view, matrices)
    if rules.latent and (latent := _latent_slices(view, config)):
        view = _split_latent(view, latent)
    if halves := {name: _two_halves(name, view, pair) for name in view if (pair := names.halves(name)) is not None}:
        view = split_units(view, halves)
    stacks = names.stacks(view)
    return stack(view, stacks) if stacks else view


def from_mlx(checkpoint: Checkpoint, config: Mapping[str, Any]) -> View:
    """Undo ``to_mlx``. Tensors that already have transformers' names are unchanged.

    Raises ``UnsupportedError`` ``architecture.rows``: a tensor of another shape, or a missing half of a pair.
    """
    rules = rules_of(config)
    if rules is None:
        return View(checkpoint)
    names = _MlxNames(rules)
    convolutions = [
        name for name in checkpoint if name.endswith(rules.convolutions) and _is_last_one(checkpoint[name].shape)
    ] if rules.convolutions else []  # fmt: skip
    changes = {name: _reshaped(checkpoint, name, last=False) for name in convolutions}
    changes |= {name: Change(checkpoint[name].dtype, shape=(1,)) for name in _scalars(checkpoint, rules, ())}
    if convolutions:
        shifted = (name for name in checkpoint if _is_shifted(checkpoint, name, rules))
        changes |= {name: Change(checkpoint[name].dtype, -1.0) for name in shifted}
    view = change(checkpoint, changes) if changes else checkpoint
    if stacks := {name: names.members(name, view[name].shape) for name in view if names.is_stack(name, view)}:
        view = unstack(view, stacks)
    renamed = {name: new for name in view if (new := names.to_model(name)) != name}
    view = rename(view, renamed) if renamed else view
    if pairs := dict(names.pairs(view)):
        view = interleave(view, pairs)
    if rules.latent and any(name.endswith(_EMBED_Q) for name in view):
        view = _join_latent(view, config)
    if rules.transposed and renamed:
        matrices = {name: name for name in view if names.is_transposed(name, view)}
        view = transpose(view, matrices)
    count = sum(name not in checkpoint for name in view)
    return View(view, [f"{count} tensors of mlx_lm's layout are as transformers has them"] if count else [])


class _MlxNames:
    """The tensor names of one family in transformers and in mlx_lm."""

    def __init__(self, rules: MlxRules) -> None:
        self._rules = rules
        self._back = {new: old for old, new in rules.modules.items()}
        self._prefixes_back = tuple((new, old) for old, new in rules.prefixes if old != new)
        experts = rules.experts
        self._expert: re.Pattern[str] | None = None
        self._stack: re.Pattern[str] | None = None
        if experts is not None:
            parts = "|".join(experts.parts)
            new_parts = "|".join(experts.parts.values())
            self._expert = re.compile(rf"{re.escape(experts.prefix)}\.([0-9]{{1,6}})\.({parts})\.(weight|bias)")
            self._stack = re.compile(rf"{re.escape(experts.stacked)}\.({new_parts})\.(weight|bias)")

    def is_transposed(self, name: str, view: Checkpoint) -> bool:
        return name.endswith(self._rules.transposed) and ".h." in f".{name}" and len(view[name].shape) == 2

    def to_mlx(self, name: str) -> str:
        """Return mlx_lm's name of a tensor that is neither stacked nor split."""
        return _with_prefix(self._in_layer(name, self._rules.modules), self._rules.prefixes)

    def to_model(self, name: str) -> str:
        """Return transformers' name of a tensor."""
        return self._in_layer(_with_prefix(name, self._prefixes_back), self._back)

    def halves(self, name: str) -> tuple[str, str] | None:
        """Return the names of a tensor's two halves, before ``to_mlx``; None if it is not split."""
        match = _LAYER.fullmatch(name)
        pair = None if match is None else self._rules.halves.get(match[2])
        return None if match is None or pair is None else (match[1] + pair[0], match[1] + pair[1])

    def pairs(self, view: Checkpoint) -> Iterator[tuple[str, tuple[tuple[int, ...], dict[str, Units]]]]:
        """Yield the name of each tensor that is joined from two halves, with its shape and the units of its halves."""
        for name in view:
            match = _LAYER.fullmatch(name)
            for joined, (first, second) in self._rules.halves.items():
                if match is not None and match[2] == first:
                    yield match[1] + joined, _joined(view, name, match[1] + second)

    def stacks(self, view: Checkpoint) -> dict[str, list[str]]:
        """Return the names of experts' matrices, keyed by the name of their stack before ``to_mlx``."""
        experts = self._rules.experts
        if experts is None or self._expert is None:
            return {}
        by_stack: dict[str, dict[int, str]] = {}
        for name in view:
            layer = _LAYER.fullmatch(name)
            expert = None if layer is None else self._expert.fullmatch(layer[2])
            if layer is not None and expert is not None:
                stacked = f"{layer[1]}{experts.stacked}.{experts.parts[expert[2]]}.{expert[3]}"
                by_stack.setdefault(stacked, {})[int(expert[1])] = name
        for stacked, members in by_stack.items():
            if sorted(members) != list(range(len(members))):
                raise UnsupportedError(f"expected each expert, found {sorted(members)[:8]}", rule=RULE, where=stacked)
        return {stacked: [members[index] for index in sorted(members)] for stacked, members in by_stack.items()}

    def is_stack(self, name: str, view: Checkpoint) -> bool:
        layer = _LAYER.fullmatch(name)
        matches = self._stack is not None and layer is not None and self._stack.fullmatch(layer[2]) is not None
        return matches and len(view[name].shape) in (2, 3) and 0 < view[name].shape[0] <= 1 << 16

    def members(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return the names of the experts in a stack."""
        layer = _LAYER.fullmatch(name)
        experts = self._rules.experts
        if layer is None or experts is None:
            return []
        part, _, parameter = layer[2].removeprefix(f"{experts.stacked}.").partition(".")
        old = next(old for old, new in experts.parts.items() if new == part)
        return [f"{layer[1]}{experts.prefix}.{index}.{old}.{parameter}" for index in range(shape[0])]

    @staticmethod
    def _in_layer(name: str, modules: Mapping[str, str]) -> str:
        match = _LAYER.fullmatch(name)
        if match is None:
            return name
        for old, new in modules.items():
            if match[2] == old or match[2].startswith(f"{old}."):
                return match[1] + new + match[2].removeprefix(old)
        return name


def _with_prefix(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


_KV = ".self_attn.kv_b_proj.weight"
_EMBED_Q = ".self_attn.embed_q.weight"
_UNEMBED = ".self_attn.unembed_out.weight"


def _latent_slices(view: Checkpoint, config: Mapping[str, Any]) -> dict[str, dict[str, UnitSelection]]:
    """Return the slices for keys and values of each dense ``kv_b_proj`` [heads * (key + value), latent].

    Packed matrices are left out, because mlx_lm splits them when it loads the model.
    """
    names = [name for name in view if name.endswith(_KV) and view[name].codec == DenseLayout.codec]
    if not names:
        return {}
    heads, key, value = hyper.latent_sizes(config)
    slices = {}
    for name in names:
        shape = view[name].shape
        if len(shape) != 2 or shape[0] != heads * (key + value):
            raise UnsupportedError(
                f"expected {heads} heads of {key} and {value} rows, found shape {list(shape)}", rule=RULE, where=name
            )
        start = name.removesuffix(_KV)
        slices[name] = {
            start + _EMBED_Q + _UNTRANSPOSED: UnitSelection((heads, key, shape[1]), Units(heads, key + value, 0, key)),
            start + _UNEMBED: UnitSelection((heads, value, shape[1]), Units(heads, key + value, key, value)),
        }
    return slices


def _split_latent(view: Checkpoint, slices: Mapping[str, Mapping[str, UnitSelection]]) -> Checkpoint:
    keys = [name for new in slices.values() for name in new if name.endswith(_UNTRANSPOSED)]
    return transpose(split_units(view, slices), {name: name.removesuffix(_UNTRANSPOSED) for name in keys})


def _join_latent(view: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    heads, key, value = hyper.latent_sizes(config)
    transposed = {}
    joined = {}
    for name in view:
        if not name.endswith(_EMBED_Q):
            continue
        start = name.removesuffix(_EMBED_Q)
        latent = view[name].shape[1] if len(view[name].shape) == 3 else 0
        shapes = [view[member].shape if member in view else () for member in (name, start + _UNEMBED)]
        if shapes != [(heads, latent, key), (heads, value, latent)]:
            raise UnsupportedError(
                f"expected keys [{heads}, latent, {key}] and values [{heads}, {value}, latent], found "
                f"{[list(shape) for shape in shapes]}",
                rule=RULE,
                where=name,
            )
        transposed[name] = name + _UNTRANSPOSED
        members = {
            name + _UNTRANSPOSED: Units(heads, key + value, 0, key),
            start + _UNEMBED: Units(heads, key + value, key, value),
        }
        joined[start + _KV] = ((heads * (key + value), latent), members)
    changes = {
        name: Change("f32")
        for _, members in joined.values()
        if len({view[name.removesuffix(_UNTRANSPOSED)].dtype for name in members}) > 1
        for name in (member.removesuffix(_UNTRANSPOSED) for member in members)
    }
    view = change(view, changes) if changes else view
    return interleave(transpose(view, transposed), joined)


def _two_halves(name: str, view: Checkpoint, names: tuple[str, str]) -> dict[str, UnitSelection]:
    shape = view[name].shape
    if len(shape) not in (2, 3) or shape[-2] % 2:
        raise UnsupportedError(
            f"expected an even number of rows of gate and up, found shape {list(shape)}", rule=RULE, where=name
        )
    count = shape[0] if len(shape) == 3 else 1
    rows = shape[-2]
    half = (*shape[:-2], rows // 2, shape[-1])
    return {
        new: UnitSelection(half, Units(count, rows, start * (rows // 2), rows // 2)) for start, new in enumerate(names)
    }


def _joined(view: Checkpoint, first: str, second: str) -> tuple[tuple[int, ...], dict[str, Units]]:
    shape = view[first].shape
    if second not in view or view[second].shape != shape or len(shape) not in (2, 3):
        raise UnsupportedError(f"expected {second} of shape {list(shape)} next to it", rule=RULE, where=first)
    count = shape[0] if len(shape) == 3 else 1
    half = shape[-2]
    units = {name: Units(count, 2 * half, start * half, half) for start, name in enumerate((first, second))}
    return (*shape[:-2], 2 * half, shape[-1]), units


def _is_convolution(name: str, shape: tuple[int, ...], rules: MlxRules) -> bool:
    return (
        bool(rules.convolutions) and name.endswith(rules.convolutions) and len(shape) == 3 and shape[1] == 1 != shape[2]
    )


def _is_last_one(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] == 1 != shape[1]


def _scalars(view: Checkpoint, rules: MlxRules, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the family's scalars whose shape is ``shape``."""
    return [name for name in view if rules.scalars and name.endswith(rules.scalars) and view[name].shape == shape]


def _is_shifted(view: Checkpoint, name: str, rules: MlxRules) -> bool:
    return bool(rules.shifted) and name.endswith(rules.shifted) and len(view[name].shape) == 1


def _reshaped(view: Checkpoint, name: str, *, last: bool) -> Change:
    """Return the change of a convolution's weight to the shape of transformers, or of mlx_lm if ``last`` is true.

    The shape is [channels, 1, width] in transformers and [channels, width, 1] in mlx_lm.
    """
    channels, *sizes = view[name].shape
    width = max(sizes)
    return Change(view[name].dtype, shape=(channels, width, 1) if last else (channels, 1, width))


def _is_reversible(view: Checkpoint, name: str, planned: Change) -> bool:
    """Return whether a change that adds a number to a tensor can be undone exactly by subtracting the number."""
    values = cast(planned.values(view[name]), "f32")
    return bool(np.array_equal(values - np.float32(planned.plus), view[name].numpy("f32")))
