"""KV caches in temporary files, so that many sequences can be sampled together in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from ingot.core.extras import require


def spilled_cache(model: Any, length: int, scratch: Callable[[], BinaryIO]) -> Callable[[int], Any]:
    """Return a function that creates a cache for ``count`` sequences of ``length`` tokens.

    Layers with attention to all tokens are stored in unnamed files that are deleted with the cache. Layers of other
    types (sliding windows, states) are small and stay in memory.
    """
    cache_utils = require("transformers.cache_utils", "transformers")
    torch = require("torch", "torch")

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = [_mapped(torch, scratch, states, length) for states in (key_states, value_states)]
        first = self.get_seq_length()
        last = first + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., first:last, :] = states
        self.keys, self.values = (room[..., :last, :] for room in self.room)
        return self.keys, self.values

    spilled = type("Spilled", (cache_utils.DynamicLayer,), {"update": update})

    def create_cache(count: int) -> Any:
        cache = cache_utils.DynamicCache(config=model.config)
        cache.layers = [spilled() if type(layer) is cache_utils.DynamicLayer else layer for layer in cache.layers]
        return cache

    return create_cache


def _mapped(torch: Any, scratch: Callable[[], BinaryIO], states: Any, length: int) -> Any:
    """Return an array for ``length`` tokens of these states, f32 [windows, heads, length, width], in a file."""
    shape = (*states.shape[:-2], length, states.shape[-1])
    with scratch() as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))
