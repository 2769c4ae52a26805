"""Keys and values of transformers' own cache that grow in place: no token copies those before it.

This module needs torch and transformers to be imported (``core.extras.require`` names the extra).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 256
"""Tokens for which there is room behind those that are there, and an eighth of these."""

_NAME = "ingot_room"
_PLAIN: Any = DynamicLayer


class Room:
    """Keys and values [sequences, heads, capacity, width], the first ``used`` tokens of which are taken.

    A layer's own tensors are views of these. Nobody writes to what is taken: of two layers that share a room, as copies
    of a cache do, the second to append finds that it is used and moves.
    """

    __slots__ = ("keys", "used", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.used = int(keys.shape[2])
        self.keys, self.values = _with_room(keys), _with_room(values)

    def holds(self, layer: Any, count: int) -> bool:
        """Whether the layer's tokens are those taken, and there is room for ``count`` more."""
        return (
            layer.keys.shape[2] == self.used <= self.keys.shape[2] - count
            and _begins(self.keys, layer.keys)
            and _begins(self.values, layer.values)
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
        )

    def append(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take in keys and values [sequences, heads, tokens, width] of the layer."""
        first, self.used = self.used, self.used + keys.shape[2]
        self.keys[:, :, first : self.used] = keys
        self.values[:, :, first : self.used] = values
        layer.keys, layer.values = self.keys[:, :, : self.used], self.values[:, :, : self.used]


def append(cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``cache.update`` does: append keys and values to layer ``index``, and return all of that layer."""
    layers: list[Any] = cache.layers if type(cache) is DynamicCache and not getattr(cache, "offloading", False) else []
    layer: Any = layers[index] if index < len(layers) else None
    if not _fits(layer, keys, values):
        found: tuple[torch.Tensor, torch.Tensor] = cache.update(keys, values, index)
        return found
    room = getattr(layer, _NAME, None)
    if room is None or not room.holds(layer, keys.shape[2]):
        room = Room(layer.keys, layer.values)
        setattr(layer, _NAME, room)
    room.append(layer, keys, values)
    return layer.keys, layer.values


def _fits(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a layer is a plain one that has tokens of the shape and type of the new ones, which are few."""
    if type(layer) is not _PLAIN or not layer.is_initialized or layer.keys.ndim != 4 or keys.shape[2] > ROOM:
        return False
    return all(
        old.shape[:2] == new.shape[:2] and old.shape[3] == new.shape[3] and old.dtype == new.dtype and old.is_cpu
        for old, new in ((layer.keys, keys), (layer.values, values))
    )


def _with_room(states: torch.Tensor) -> torch.Tensor:
    sequences, heads, tokens, width = states.shape
    wide = states.new_empty(sequences, heads, tokens + tokens // 8 + ROOM, width)
    wide[:, :, :tokens] = states
    return wide


def _begins(wide: torch.Tensor, states: torch.Tensor) -> bool:
    same = wide.data_ptr() == states.data_ptr() and wide.stride() == states.stride()
    return same and wide.shape[:2] == states.shape[:2] and wide.shape[3] == states.shape[3]
