"""A layer of a cache of transformers whose keys and values lie in packed blocks (``spec/kv-cache.md``).

This module needs torch and transformers to be imported (``core.extras.require`` names the extra).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ingot.codecs.affine.blocks import MAX_EXTENT, PackedBlocks
from ingot.errors import CodecError, UnsupportedError
from ingot.runtime.arrays.torch import from_numpy, to_numpy
from ingot.runtime.layers.decoded_on_use import DecodedOnUse
from ingot.runtime.loading.kv_options import KvCache

TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
VIEW = "ingot_view"
"""The attribute by which attention finds what lies behind keys and values."""


class View:
    """What one pass attends to: tokens in full precision, ``lead`` of them before those in blocks, the others behind.

    ``positions`` are those of the first tokens, [sequences, heads, tokens], where some of the prompt were evicted, else
    None; ``prompt`` is how many it had. ``waiting`` is the layer that is to be told which to evict, or None.
    """

    __slots__ = ("_blocks", "heads", "keys", "lead", "positions", "prompt", "values", "waiting")

    def __init__(self, layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values, self.heads = keys, values, keys.shape[1]
        self._blocks = None if layer.blocks is None else tuple(held.snapshot() for held in layer.blocks)
        self.lead = min(layer.sinks, keys.shape[2])
        self.positions, self.prompt = layer.positions, layer.prompt
        self.waiting: PackedLayer | None = layer if layer.waiting else None

    @property
    def packed(self) -> int:
        """Tokens in blocks."""
        return 0 if self._blocks is None else self._blocks[0].count * self._blocks[0].shape[1]

    @property
    def length(self) -> int:
        """Tokens of all."""
        return int(self.keys.shape[2]) + self.packed

    @property
    def key_blocks(self) -> PackedBlocks:
        """Blocks [channels, tokens]."""
        assert self._blocks is not None
        return self._blocks[0]

    @property
    def value_blocks(self) -> PackedBlocks:
        """Blocks [tokens, channels]."""
        assert self._blocks is not None
        return self._blocks[1]

    def decode(self, *, keys: bool) -> torch.Tensor:
        """Return all keys, or values, in their order: [sequences, heads, tokens, width]."""
        dense = self.keys if keys else self.values
        if not self.packed:
            return dense
        blocks = from_numpy((self.key_blocks if keys else self.value_blocks).decode(TYPES[dense.dtype]))
        blocks = blocks.transpose(-1, -2) if keys else blocks
        middle = blocks.reshape(*dense.shape[:2], self.packed, dense.shape[-1])
        return torch.cat([dense[:, :, : self.lead], middle, dense[:, :, self.lead :]], dim=2)

    def lazily(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as attention gets them: decoded by what looks at them, with this view behind them."""
        if not self.packed and self.waiting is None and self.positions is None:
            return self.keys, self.values
        found = self._lazy(self.keys, keys=True), self._lazy(self.values, keys=False)
        for states in found:
            setattr(states, VIEW, self)
        return found

    def _lazy(self, dense: torch.Tensor, *, keys: bool) -> torch.Tensor:
        if not self.packed:
            return dense.view_as(dense)  # the layer holds the other: what hangs on that would stay
        shape = (*dense.shape[:2], self.length, dense.shape[-1])
        return DecodedOnUse(shape, dense.dtype, dense.device, lambda: self.decode(keys=keys))


class PackedLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keys and values of one layer of attention: the first tokens and the latest dense, the others in packed blocks.

    A block is packed once, when ``window`` tokens have come behind it. What a pass attends to are the blocks that were
    packed before it, and all other tokens, its own among them, as they are.

    Parameters
    ----------
    settings : KvCache
    where : str
        What errors call the layer.
    sliding : int, optional
        A layer that attends to so many of the latest tokens; blocks behind them are dropped.
    """

    keys: Any
    values: Any

    def __init__(self, settings: KvCache, where: str, sliding: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.settings, self.where, self.sliding = settings, where, sliding
        self.is_sliding = sliding is not None
        self.sinks = 0 if self.is_sliding else settings.sinks
        self.waiting = False
        self._empty()

    def _empty(self) -> None:
        self.keys = self.values = None
        self.blocks: tuple[PackedBlocks, PackedBlocks] | None = None
        self.positions: torch.Tensor | None = None
        self.seen = self.dropped = self.prompt = 0
        self.waiting = self.is_initialized = False

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Take the first keys' shape, type and device; ``UnsupportedError`` ``kv.model``."""
        if key_states.device.type != "cpu" or key_states.dtype not in TYPES:
            self._refuse(f"keys in f32, f16 or bf16 on the CPU, found {key_states.dtype} on {key_states.device}")
        if key_states.shape[-1] > MAX_EXTENT or value_states.shape[-1] > MAX_EXTENT or value_states.shape[-1] % 8:
            width = f"{key_states.shape[-1]} and {value_states.shape[-1]}"
            self._refuse(f"heads of at most {MAX_EXTENT} channels, of values in eights, found {width}")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def _refuse(self, expected: str) -> None:
        raise UnsupportedError(
            f"expected {expected}: run this model with the full cache", rule="kv.model", where=self.where
        )

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append keys and values [sequences, heads, tokens, width]; return all that this pass attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.waiting:
            raise UnsupportedError(
                "expected attention that says which tokens to evict, found a model that computes it in a way of its "
                "own: use a cache without evict",
                rule="kv.evict",
                where=self.where,
            )
        kept, new = self.settings.evict, key_states.shape[-2]
        self.waiting = kept is not None and not self.is_sliding and self.seen == 0 and new > kept
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.seen += new
        view = View(self, keys, values)
        self.keys, self.values = keys, values
        if not self.waiting:
            self.settle()
        return view.lazily()

    def evict(self, kept: torch.Tensor) -> None:
        """Keep the tokens ``kept`` of the prompt, [sequences, heads, tokens] in their order, and pack what is to be."""
        self.positions, self.prompt, self.waiting = kept, self.seen, False
        self.keys, self.values = (
            states.gather(2, kept[..., None].expand(-1, -1, -1, states.shape[-1]))
            for states in (self.keys, self.values)
        )
        self.settle()

    def settle(self) -> None:
        """Pack the blocks that have ``window`` tokens behind them; drop those that slid out of sight."""
        size = self.settings.tokens
        ready = max(0, self.keys.shape[2] - self.sinks - self.settings.latest) // size
        if ready:
            stop = self.sinks + ready * size
            keys, values = (
                states.detach()[:, :, self.sinks : stop].reshape(-1, ready, size, states.shape[-1])
                for states in (self.keys, self.values)
            )
            self._pack(keys.transpose(-1, -2), values)
            self.keys, self.values = (
                torch.cat([states[:, :, : self.sinks], states[:, :, stop:]], dim=2)
                for states in (self.keys, self.values)
            )
        if self.sliding is not None and self.blocks is not None:
            unseen = (self.seen - self.sliding + 1 - self.dropped) // size
            if unseen > 0:
                for blocks in self.blocks:
                    blocks.drop(unseen)
                self.dropped += unseen * size

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys [heads, blocks, channels, tokens] and values [heads, blocks, tokens, channels] behind the others."""
        if self.blocks is None:
            bits, heads, size = self.settings.bits, len(keys), self.settings.tokens
            self.blocks = (
                PackedBlocks(heads, (keys.shape[2], size), bits, size),
                PackedBlocks(heads, (size, values.shape[3]), bits, self.settings.group),
            )
        given = [to_numpy(states.contiguous()) for states in (keys, values)]
        try:
            packed = [blocks.pack(some) for blocks, some in zip(self.blocks, given, strict=True)]
        except CodecError as error:
            raise error.at(self.where) from None
        for blocks, some in zip(self.blocks, packed, strict=True):
            blocks.put(some)

    def get_seq_length(self) -> int:
        """Return how many tokens came, whether they are still here or not."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens the mask of a pass over so many has columns for, and which is the first of them."""
        return self.seen + query_length - self.dropped, self.dropped

    def reset(self) -> None:
        """Forget all tokens."""
        self._empty()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: so many where negative; all behind so many where positive, as older callers ask.

        Raises
        ------
        UnsupportedError
            ``kv.crop``: some of them are packed, or what they hid is gone.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.seen - tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return None
        if count >= self.seen:
            return self._empty()
        dense = self.keys.shape[2] - (0 if self.blocks is None else self.sinks)
        kept = self.seen - count
        gone = self.sliding is not None and self.dropped > max(0, kept - self.sliding + 1)
        if self.waiting or count > dense or gone or (self.positions is not None and kept < self.prompt):
            raise UnsupportedError(
                f"expected at most {self.settings.latest} tokens to take back, which are still in full precision, "
                f"found {count}: use a cache with a larger window",
                rule="kv.crop",
                where=self.where,
            )
        self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]
        self.seen = kept
        return None

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences of these indices, in their order."""
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.is_initialized:
            self._take(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the sequences that ``indices`` (numbers, or a mask) picks."""
        if self.is_initialized:
            self._take(torch.arange(self.keys.shape[0])[indices])

    def _take(self, sequences: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        chosen = sequences.to("cpu")
        heads = (chosen[:, None] * self.keys.shape[1] + torch.arange(self.keys.shape[1])).reshape(-1)
        self.keys, self.values = self.keys.index_select(0, chosen), self.values.index_select(0, chosen)
        self.positions = None if self.positions is None else self.positions.index_select(0, chosen)
        for blocks in self.blocks or ():
            blocks.take(heads.numpy())

    def offload(self) -> None:
        """Nothing: what is on the CPU stays there."""

    def prefetch(self) -> None:
        """Nothing, as ``offload``."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        if not self.is_initialized:
            return 0
        dense = [self.keys, self.values, *([] if self.positions is None else [self.positions])]
        return sum(int(states.nbytes) for states in dense) + sum(held.nbytes for held in self.blocks or ())

    @property
    def full_nbytes(self) -> int:
        """Bytes that keys and values of the same tokens take in the full cache."""
        if not self.is_initialized:
            return 0
        tokens = self.seen if self.sliding is None else min(self.seen, self.sliding - 1)
        sequences, heads, _, width = self.keys.shape
        return int(tokens * sequences * heads * (width + self.values.shape[-1]) * self.keys.element_size())
