"""Keys and values of transformers' own cache that grow in place: no token copies those before it.

This module needs torch and transformers to be imported (``core.extras.require`` names the extra).
"""

from __future__ import annotations

from collections.abc import Sequence
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
        count = keys.shape[2]
        self.keys[:, :, self.used : self.used + count] = keys
        self.values[:, :, self.used : self.used + count] = values
        self.take(layer, count)

    def take(self, layer: Any, count: int) -> None:
        """Make the next ``count`` tokens, which are written, the layer's."""
        self.used += count
        layer.keys, layer.values = self.keys.narrow(2, 0, self.used), self.values.narrow(2, 0, self.used)


def append(cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``cache.update`` does: append keys and values to layer ``index``, and return all of that layer."""
    layer = layer_of(cache, index)
    room = room_in(layer, keys.shape, keys.dtype) if keys.shape == values.shape and keys.dtype == values.dtype else None
    if room is None:
        if layer is not None:
            vars(layer).pop(_NAME, None)  # it would keep alive what the layer leaves
        found: tuple[torch.Tensor, torch.Tensor] = cache.update(keys, values, index)
        return found
    room.append(layer, keys, values)
    return layer.keys, layer.values


def layer_of(cache: Any, index: int) -> Any:
    """Return layer ``index`` of a cache of transformers' own; None of another cache, or where it has none yet."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or index >= len(cache.layers):
        return None
    return cache.layers[index]


def room_in(layer: Any, shape: Sequence[int], dtype: torch.dtype) -> Room | None:
    """Return where keys and values [sequences, heads, tokens, width] of a type are appended to a layer.

    None where it is no plain layer that has tokens of that shape and type, or the new ones are many.
    """
    if type(layer) is not _PLAIN or not layer.is_initialized or layer.keys.ndim != 4 or shape[2] > ROOM:
        return None
    wanted = *shape[:2], layer.keys.shape[2], shape[3]
    if not all(old.shape == wanted and old.dtype == dtype and old.is_cpu for old in (layer.keys, layer.values)):
        return None
    room: Room | None = getattr(layer, _NAME, None)
    if room is None or not room.holds(layer, shape[2]):
        room = Room(layer.keys, layer.values)
        setattr(layer, _NAME, room)
    return room


def _with_room(states: torch.Tensor) -> torch.Tensor:
    sequences, heads, tokens, width = states.shape
    wide = states.new_empty(sequences, heads, tokens + tokens // 8 + ROOM, width)
    wide[:, :, :tokens] = states
    return wide


def _begins(wide: torch.Tensor, states: torch.Tensor) -> bool:
    same = wide.data_ptr() == states.data_ptr() and wide.stride() == states.stride()
    return same and wide.shape[:2] == states.shape[:2] and wide.shape[3] == states.shape[3]
