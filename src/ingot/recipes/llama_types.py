"""Names of llama.cpp's file types (``llama-quantize``, ``--outtype``), and the presets that produce them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.recipes.load import ALL_PRESETS

MIXTURES = (
    *("Q1_0", "Q2_0", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M"),
    *("Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"),
    *("IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4"),
    *("F16", "BF16"),
)
"""File types of llama.cpp, as it spells them."""
_ALIASES = {"Q3_K": "q3_k_m", "Q4_K": "q4_k_m", "Q5_K": "q5_k_m", "FP16": "f16", "FLOAT16": "f16", "BFLOAT16": "bf16"}
_CALIBRATED = "-calibrated"
_BLOCKS = re.compile(r"(?:i?q|tq)[0-9]_|(?:mx|nv)fp4_")


def preset_of_type(name: str) -> tuple[str, str]:
    """Return the preset for a file type, and its calibrated variant; each is empty if it does not exist.

    ``name`` is llama.cpp's name, in upper or lower case, with hyphens or underscores.

    Raises ``UsageError`` ``quantize.type`` for an unknown type, or one without a preset.
    """
    upper = name.strip().upper().replace("-", "_")
    key = upper.lower()
    presets = {preset.lower(): preset for preset in reversed(ALL_PRESETS)}  # presets of other names before mixtures
    if upper in ALL_PRESETS:
        calibrated = f"{upper}{_CALIBRATED}"
        return upper, calibrated if calibrated in ALL_PRESETS else ""
    mixture = _ALIASES.get(upper, "").upper()
    if mixture in ALL_PRESETS:
        return preset_of_type(mixture)
    for candidate in (_ALIASES.get(upper, key), key):
        plain = presets.get(candidate, "")
        calibrated = presets.get(f"{candidate}{_CALIBRATED}", "")
        if plain or calibrated:
            return plain, calibrated
    if upper in MIXTURES or upper in _ALIASES:
        near = presets[nearest_preset(key, presets)]
        raise UsageError(
            f"llama.cpp has the type {upper}, but no preset of Ingot produces it yet; the nearest is {near}",
            rule="quantize.type",
        )
    names = {item.lower(): item for item in (*MIXTURES, *_ALIASES)}
    hint = did_you_mean(key, names).upper().replace("DID YOU MEAN", "did you mean")
    advice = "" if hint else f"; types that Ingot produces: {', '.join(available_types())}"
    raise UsageError(
        f"{name!r:.60} is no type of llama.cpp{hint}{advice}",
        rule="quantize.type",
    )


def available_types() -> list[str]:
    """Return the types that presets produce, as llama.cpp spells them."""
    presets = {preset.lower().removesuffix(_CALIBRATED) for preset in ALL_PRESETS}
    names = [*MIXTURES, *(name for name in _ALIASES if name.startswith("Q"))]
    return [name for name in names if name.lower() in presets]


def nearest_preset(key: str, presets: Iterable[str]) -> str:
    """Return the preset of ggml's blocks that is nearest to a type, by the number of bits and then by the name."""
    blocks = [name for name in presets if _BLOCKS.match(name)]
    return max(blocks, key=lambda name: (-abs(_bits(name) - _bits(key)), _common_length(name, key), -len(name)))


def _bits(name: str) -> int:
    match = re.search(r"[0-9]+", name)
    return int(match[0]) if match else 0


def _common_length(name: str, second: str) -> int:
    pairs = zip(name, second, strict=False)
    return next((index for index, (first, second) in enumerate(pairs) if first != second), min(len(name), len(second)))
