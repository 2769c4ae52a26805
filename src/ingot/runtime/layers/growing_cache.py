"""Append keys and values to transformers' cache in place, without copying the tokens before.

Importing this module needs torch and transformers (``core.extras.require`` names the extra).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

SPARE_TOKENS = 256
"""Tokens to preallocate after the present ones, besides an eighth of these."""

_NAME = "ingot_preallocated"
_PLAIN: Any = DynamicLayer


class PreallocatedCache:
    """Keys and values [sequences, heads, capacity, width], of which the first ``used`` tokens are valid.

    The tensors of a layer are views of these. Valid tokens are never overwritten. If two layers share the memory, as
    copies of a cache do, the second to append finds its tokens followed by others and copies them.
    """

    __slots__ = ("keys", "used", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.used = int(keys.shape[2])
        self.keys, self.values = _preallocate(keys), _preallocate(values)

    def can_append(self, layer: Any, count: int) -> bool:
        """Return whether the layer's tokens are the valid ones and ``count`` more fit."""
        return (
            layer.keys.shape[2] == self.used <= self.keys.shape[2] - count
            and _is_prefix(self.keys, layer.keys)
            and _is_prefix(self.values, layer.values)
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
        )

    def append(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append keys and values [sequences, heads, tokens, width] to the layer."""
        count = keys.shape[2]
        self.keys[:, :, self.used : self.used + count] = keys
        self.values[:, :, self.used : self.used + count] = values
        self.extend(layer, count)

    def extend(self, layer: Any, count: int) -> None:
        """Add the next ``count`` tokens, which are already written, to the layer."""
        self.used += count
        layer.keys, layer.values = self.keys.narrow(2, 0, self.used), self.values.narrow(2, 0, self.used)


def append(cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append keys and values to layer ``index`` and return all of that layer, as ``cache.update`` does."""
    layer = layer_of(cache, index)
    preallocated = (
        preallocated_cache(layer, keys.shape, keys.dtype)
        if keys.shape == values.shape and keys.dtype == values.dtype
        else None
    )
    if preallocated is None:
        if layer is not None:
            vars(layer).pop(_NAME, None)  # frees memory that the layer stops using
        updated: tuple[torch.Tensor, torch.Tensor] = cache.update(keys, values, index)
        return updated
    preallocated.append(layer, keys, values)
    return layer.keys, layer.values


def layer_of(cache: Any, index: int) -> Any:
    """Return layer ``index`` of transformers' own cache; None for another cache, or if the layer does not exist yet."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or index >= len(cache.layers):
        return None
    return cache.layers[index]


def preallocated_cache(layer: Any, shape: Sequence[int], dtype: torch.dtype) -> PreallocatedCache | None:
    """Return the preallocated memory for appending keys and values [sequences, heads, tokens, width] to a layer.

    None if the layer is no plain layer with tokens of that shape and dtype, or if there are many new tokens.
    """
    if type(layer) is not _PLAIN or not layer.is_initialized or layer.keys.ndim != 4 or shape[2] > SPARE_TOKENS:
        return None
    expected = *shape[:2], layer.keys.shape[2], shape[3]
    if not all(old.shape == expected and old.dtype == dtype and old.is_cpu for old in (layer.keys, layer.values)):
        return None
    preallocated: PreallocatedCache | None = getattr(layer, _NAME, None)
    if preallocated is None or not preallocated.can_append(layer, shape[2]):
        preallocated = PreallocatedCache(layer.keys, layer.values)
        setattr(layer, _NAME, preallocated)
    return preallocated


def _preallocate(states: torch.Tensor) -> torch.Tensor:
    sequences, heads, tokens, width = states.shape
    wide = states.new_empty(sequences, heads, tokens + tokens // 8 + SPARE_TOKENS, width)
    wide[:, :, :tokens] = states
    return wide


def _is_prefix(wide: torch.Tensor, states: torch.Tensor) -> bool:
    same = wide.data_ptr() == states.data_ptr() and wide.stride() == states.stride()
    return same and wide.shape[:2] == states.shape[:2] and wide.shape[3] == states.shape[3]
