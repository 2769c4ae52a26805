"""Keys and values of many sequences in a file: memory that is not the process's own, for windows drawn together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from ingot.core.extras import require


def spilled_cache(model: Any, length: int, scratch: Callable[[], BinaryIO]) -> Callable[[int], Any]:
    """Return what makes a cache for ``count`` sequences of ``length`` tokens.

    Layers of attention to all tokens are kept in a file that nobody sees and that goes with the cache; those of another
    kind (sliding windows, states) stay small, and in memory.
    """
    known = require("transformers.cache_utils", "transformers")
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

    spilled = type("Spilled", (known.DynamicLayer,), {"update": update})

    def made(count: int) -> Any:
        cache = known.DynamicCache(config=model.config)
        cache.layers = [spilled() if type(layer) is known.DynamicLayer else layer for layer in cache.layers]
        return cache

    return made


def _mapped(torch: Any, scratch: Callable[[], BinaryIO], states: Any, length: int) -> Any:
    """Return room for ``length`` tokens of such states, f32 [windows, heads, length, width], in a file."""
    shape = (*states.shape[:-2], length, states.shape[-1])
    with scratch() as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))
