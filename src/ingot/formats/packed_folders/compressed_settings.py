"""What ``config_groups`` of compressed-tensors say beside the form of weights: how inputs and outputs are quantized.

Which group a layer is in, the package tells by classes of modules, regular expressions and names. Here the layer itself
tells it: by its name, where a group has it, and else by the form of its weights. Where that leaves several groups which
differ in what they say, none is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEYS = ("input_activations", "output_activations")
KV_CACHE = "kv_cache_scheme"

Said = Mapping[str, Any]
"""Those of ``KEYS`` that are stated, and more than null."""


class Settings:
    """What the groups of a ``quantization_config`` say of activations; ``stated`` may be anything.

    Iterating yields what is said, each once: equal settings are one object.
    """

    def __init__(self, stated: Any) -> None:
        groups = stated.get("config_groups") if isinstance(stated, Mapping) else None
        self._said: dict[str, Said] = {}
        self._named: dict[str, Said] = {}
        self._formed: dict[str, Said | None] = {}
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
                continue
            own = {key: group[key] for key in KEYS if group.get(key) is not None}
            said = self._said.setdefault(json.dumps(own, sort_keys=True), own)
            form = str(form_of(group["weights"]))
            self._formed[form] = said if self._formed.get(form, said) is said else None
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else ():
                if isinstance(target, str):
                    self._named.setdefault(target, said)

    def __iter__(self) -> Iterator[Said]:
        return iter(self._said.values())

    def of(self, layer: str, form: tuple[Any, ...] | None) -> Said | None:
        """Return what is said of a layer by its name and the ``form_of`` its weights; None where that is not known."""
        if layer in self._named:
            return self._named[layer]
        only = next(iter(self._said.values())) if len(self._said) == 1 else None
        return only if form is None else self._formed.get(str(form), only)


def form_of(weights: Said) -> tuple[Any, ...]:
    """Return what ``weights`` of a group say of numbers and scales, as the package completes it."""
    group, block = weights.get("group_size"), weights.get("block_structure")
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


def brief(setting: Any) -> str:
    """Return a setting in a few words."""
    if not isinstance(setting, Mapping):
        return str(setting)[:40]
    dynamic = setting.get("dynamic", False)
    how = "static" if dynamic is False else "dynamic" if dynamic is True else f"dynamic {dynamic}"
    words = [f"{setting.get('num_bits', 8)} bits {setting.get('type', 'int')}", setting.get("strategy"), how]
    return ", ".join(str(word)[:40] for word in words if word is not None)
