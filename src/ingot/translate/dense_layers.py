"""The number of dense layers before the layers with experts, which transformers may store as a list of layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.translate.config_numbers import RULE
from ingot.translate.families import Family

COUNT = "first_k_dense_replace"
LIST = "mlp_layer_types"
_DENSE = "dense"
_SPARSE = "sparse"
_MAX_LAYERS = 1 << 16


def with_count(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config with the number of dense layers, from the list of layers or transformers' default.

    Raises ``UnsupportedError`` ``architecture.config``: a dense layer follows a layer with experts.
    """
    result = dict(config)
    if not _has_count(family):
        return result
    layers = config.get(LIST)
    if isinstance(layers, list):
        count = next((index for index, layer in enumerate(layers) if layer != _DENSE), len(layers))
        _require_layers([index for index, layer in enumerate(layers) if layer == _SPARSE], count, len(layers), family)
        result[COUNT] = count
    elif config.get(COUNT) is None:
        result[COUNT] = family.dense_layers
    return result


def without_implied_count(config: Mapping[str, Any], family: Family, original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the number of dense layers, if the ``original`` config implies this number.

    If ``original`` is empty and the family's class reads only the list of layers, the list replaces the number.
    """
    count = config.get(COUNT)
    layers = config.get("num_hidden_layers")
    without_count = {key: value for key, value in config.items() if key != COUNT}
    if original:
        implied = COUNT not in original and with_count(original, family).get(COUNT) == count
        return without_count if implied else dict(config)
    if not family.lists_dense_layers or type(count) is not int or type(layers) is not int:
        return dict(config)
    layers = min(layers, _MAX_LAYERS)
    count = min(max(count, 0), layers)
    return {**without_count, LIST: [_DENSE] * count + [_SPARSE] * (layers - count)}


def require_count(config: Mapping[str, Any], family: Family, names: Iterable[str]) -> None:
    """Raise an error if other layers have experts than the config declares; llama.cpp would refuse the file.

    Raises ``UnsupportedError`` ``architecture.config``.
    """
    count = config.get(COUNT)
    layers = config.get("num_hidden_layers")
    if family.experts is None or not _has_count(family) or type(count) is not int or type(layers) is not int:
        return
    pattern = re.compile(rf"{re.escape(family.block)}\.(\d{{1,6}})\.{re.escape(family.experts.prefix)}\.")
    sparse = {int(match[1]) for name in names if (match := pattern.match(name))}
    _require_layers({index for index in sparse if index < layers}, count, min(layers, _MAX_LAYERS), family)


def _has_count(family: Family) -> bool:
    return any(key == COUNT for key, _, _ in family.keys)


def _require_layers(sparse: Collection[int], count: int, layers: int, family: Family) -> None:
    differing = [index for index in range(layers) if (index in sparse) != (index >= count)]
    if differing:
        state = "has experts" if differing[0] in sparse else "has no experts"
        raise UnsupportedError(
            f"layer {differing[0]} {state}, but llama.cpp's {family.arch} has {count} layers without experts, which "
            f"come first; check {COUNT} and {LIST} in config.json, or pass --keep-names, which writes the tensors "
            "under their present names, for other programs",
            rule=RULE,
        )
