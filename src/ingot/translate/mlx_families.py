"""Families that mlx_lm 0.32 opens: the values of ``model_type`` that have a module, or that it maps to one.

``tests/interop/test_mlx_lm.py`` compares the list with the package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.translate import superseded
from ingot.translate.families import FAMILIES, UNSUPPORTED, Family, has_step
from ingot.views.names import omit

PROGRAM = "mlx_lm"
_MODULES = """
Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone
exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium
hunyuan hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl laguna
lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum
mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer
muse_spark nanbeige nanochat nemotron nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi
phi3 phi3small phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl
qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3
solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
"""
_REMAPPED = """
deepseek_v41_text falcon_mamba gemma4_unified iquestcoder joyai_llm_flash kimi_k2 llava minimax_m2 mistral
phi-msft qwen2_5_vl xverse
"""
MODULES = frozenset(_MODULES.split())
REMAPPED = frozenset(_REMAPPED.split())
"""Model types that mlx_lm maps to the module of another family."""


def for_mlx(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return a model folder's checkpoint without the tensors that mlx_lm has no module for and would refuse.

    The view drops tensors that no module of their family uses, if Ingot translates the family.

    Raises ``UnsupportedError`` ``architecture.unknown``.
    """
    require_mlx_family(config, checkpoint.location)
    family = FAMILIES.get(str(config.get("model_type")))
    omissions = {}
    for name in checkpoint:
        omission = superseded.activation_scale(checkpoint, name, PROGRAM, for_blocks=False)
        omission = omission or superseded.superseded(checkpoint, name, PROGRAM)
        if omission is None and family is not None and checkpoint.format != "mlx":
            omission = _omission_of(name, family, config)
        if omission is not None:
            omissions[name] = omission
    return omit(checkpoint, omissions)


def require_mlx_family(config: Mapping[str, Any], location: str) -> None:
    """Raise ``UnsupportedError`` ``architecture.unknown`` unless mlx_lm opens a model folder's family."""
    if not config:
        raise UnsupportedError(
            "there is no config.json, which mlx_lm needs to open a folder; convert the model's folder, or pass "
            "--keep-names for a folder that mlx_lm does not open",
            rule=UNSUPPORTED,
            where=location,
        )
    if not is_opened(config):
        model_type = config.get("model_type")
        message = (
            "config.json states no model_type" if model_type is None else f"the model_type is {str(model_type)[:80]!r}"
        )
        raise UnsupportedError(
            f"{message}, and mlx_lm 0.32 has no module for it; supported are {', '.join(sorted(MODULES | REMAPPED))}; "
            "--keep-names writes the folder nevertheless",
            rule=UNSUPPORTED,
            where=location,
        )


def is_opened(config: Mapping[str, Any]) -> bool:
    """Return whether mlx_lm has a module for the family in ``config.json``, or the model ships a ``model_file``."""
    model_type = config.get("model_type")
    return model_type in MODULES or model_type in REMAPPED or "model_file" in config


def _omission_of(name: str, family: Family, config: Mapping[str, Any]) -> Omission | None:
    layers = config.get("num_hidden_layers")
    layer = re.fullmatch(rf"{re.escape(family.block)}\.([0-9]{{1,6}})\.(.+)", name)
    if (
        layer is not None
        and type(layers) is int
        and int(layer[1]) >= layers
        and not _is_dropped_layer(layer[1], family)
    ):
        return Omission(f"config.json has {layers} layers; later ones predict further tokens")
    inner = name if layer is None else layer[2]
    module, _, parameter = inner.rpartition(".")
    modules = family.ends if layer is None else family.layer
    if inner in family.names or inner in modules or has_step(family, inner):
        return None
    if parameter in ("weight", "bias") and (
        module in modules or (layer is not None and _belongs_to_expert(module, family))
    ):
        return None
    return Omission(f"{PROGRAM}'s {family.model_type} has no such tensor")


def _is_dropped_layer(layer: str, family: Family) -> bool:
    """Return whether mlx_lm itself drops this layer, which predicts further tokens."""
    return family.model_type == "deepseek_v3" and layer == "61"


def _belongs_to_expert(module: str, family: Family) -> bool:
    experts = family.experts
    return (
        experts is not None and module.startswith(f"{experts.prefix}.") and module.rpartition(".")[2] in experts.modules
    )
