"""How layers quantize inputs and outputs, according to ``config_groups`` of compressed-tensors.

The package assigns layers to groups by module classes, regular expressions and names. Here a layer belongs to the group
that names it, else to the group with its settings of weights. If several groups with different activation settings are
possible, none applies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEYS = ("input_activations", "output_activations")
KV_CACHE = "kv_cache_scheme"

ActivationSettings = Mapping[str, Any]
"""The values of ``KEYS`` that exist and are not null."""

_NVFP4_INPUTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "block_structure": None,
    "dynamic": "local",
    "actorder": None,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
    "observer": "static_minmax",
    "observer_kwargs": {},
}
QUANTIZED_INPUTS: Mapping[str, ActivationSettings] = {
    "nvfp4": {KEYS[0]: _NVFP4_INPUTS},
    **{
        scheme: {
            KEYS[0]: {
                "num_bits": 8,
                "type": number_type,
                "symmetric": True,
                "strategy": "token",
                "group_size": None,
                "block_structure": None,
                "dynamic": True,
                "actorder": None,
                "observer": None,
                "observer_kwargs": {},
            }
        }
        for scheme, number_type in (("int8", "int"), ("fp8", "float"))
    },
}
"""The settings for each scheme of ``Recipe.activations``."""


def needs_input_scales(scheme: str) -> bool:
    """Return whether layers with inputs quantized by ``scheme`` store a static scale, ``X.input_global_scale``."""
    return QUANTIZED_INPUTS[scheme][KEYS[0]]["dynamic"] is not True


class Settings:
    """The activation settings in the groups of a ``quantization_config``, which may be any JSON value.

    Iteration yields each distinct setting once.
    """

    def __init__(self, quantization: Any) -> None:
        groups = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
        self._settings: dict[str, ActivationSettings] = {}
        self._by_name: dict[str, ActivationSettings] = {}
        self._by_weights: dict[str, ActivationSettings | None] = {}
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
                continue
            values = {key: group[key] for key in KEYS if group.get(key) is not None}
            settings = self._settings.setdefault(json.dumps(values, sort_keys=True), values)
            weights = str(weight_settings(group["weights"]))
            self._by_weights[weights] = settings if self._by_weights.get(weights, settings) is settings else None
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else ():
                if isinstance(target, str):
                    self._by_name.setdefault(target, settings)

    def __iter__(self) -> Iterator[ActivationSettings]:
        return iter(self._settings.values())

    def for_layer(self, layer: str, weights: tuple[Any, ...] | None) -> ActivationSettings | None:
        """Return the settings for a layer's name and the ``weight_settings`` of its group.

        Returns None if they are ambiguous.
        """
        if layer in self._by_name:
            return self._by_name[layer]
        only = next(iter(self._settings.values())) if len(self._settings) == 1 else None
        return only if weights is None else self._by_weights.get(str(weights), only)


def weight_settings(weights: ActivationSettings) -> tuple[Any, ...]:
    """Return the values for codes and scales in the ``weights`` of a group, with the package's defaults.

    Groups with equal results store weights in the same way.
    """
    group = weights.get("group_size")
    block = weights.get("block_structure")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    grouped = strategy in ("group", "tensor_group")
    return (
        weights.get("num_bits", 8),
        weights.get("type", "int"),
        weights.get("symmetric", True),
        strategy,
        group if grouped else None,
        list(block) if strategy == "block" and isinstance(block, list | tuple) else None,
    )


def summarize(setting: Any) -> str:
    """Return a setting as a short text."""
    if not isinstance(setting, Mapping):
        return str(setting)[:40]
    dynamic = setting.get("dynamic", False)
    mode = "static" if dynamic is False else "dynamic" if dynamic is True else f"dynamic {dynamic}"
    words = [f"{setting.get('num_bits', 8)} bits {setting.get('type', 'int')}", setting.get("strategy"), mode]
    return ", ".join(str(word)[:40] for word in words if word is not None)
