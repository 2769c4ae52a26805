"""A layer of a transformers cache that stores keys and values in packed blocks (``spec/kv-cache.md``).

Importing this module needs torch and transformers (``core.border.require`` names the extra).
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
"""The attribute of keys and values with their ``View``."""


class View:
    """The keys and values of the tokens to which a pass attends: dense tokens and packed blocks.

    ``lead`` dense tokens come before the packed blocks, and all other dense tokens after them.

    If tokens of the prompt were evicted, ``positions`` are the positions of the remaining ones, [sequences, heads,
    tokens]; else None. ``prompt`` is the length of the prompt. ``waiting`` is the layer if the attention of this pass
    must call its ``evict``, else None.
    """

    __slots__ = ("_blocks", "heads", "keys", "lead", "positions", "prompt", "values", "waiting")

    def __init__(self, layer: PackedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self.heads = keys.shape[1]
        self._blocks = None if layer.blocks is None else tuple(block.snapshot() for block in layer.blocks)
        self.lead = min(layer.sinks, keys.shape[2])
        self.positions = layer.positions
        self.prompt = layer.prompt
        self.waiting: PackedLayer | None = layer if layer.waiting else None

    @property
    def packed(self) -> int:
        """The number of tokens whose keys and values are in packed blocks."""
        return 0 if self._blocks is None else self._blocks[0].count * self._blocks[0].shape[1]

    @property
    def length(self) -> int:
        """The number of all tokens, packed or not."""
        return int(self.keys.shape[2]) + self.packed

    @property
    def key_blocks(self) -> PackedBlocks:
        """The packed blocks of keys, each [channels, tokens]."""
        assert self._blocks is not None
        return self._blocks[0]

    @property
    def value_blocks(self) -> PackedBlocks:
        """The packed blocks of values, each [tokens, channels]."""
        assert self._blocks is not None
        return self._blocks[1]

    def decode(self, *, keys: bool) -> torch.Tensor:
        """Return all keys or values in order: [sequences, heads, tokens, width]."""
        dense = self.keys if keys else self.values
        if not self.packed:
            return dense
        blocks = from_numpy((self.key_blocks if keys else self.value_blocks).decode(TYPES[dense.dtype]))
        blocks = blocks.transpose(-1, -2) if keys else blocks
        middle = blocks.reshape(*dense.shape[:2], self.packed, dense.shape[-1])
        return torch.cat([dense[:, :, : self.lead], middle, dense[:, :, self.lead :]], dim=2)

    def lazy_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for attention as tensors that are decoded on use; their attribute ``VIEW`` is this
        view.

        If nothing is packed or evicted, they are the dense tensors without this attribute.
        """
        if not self.packed and self.waiting is None and self.positions is None:
            return self.keys, self.values
        states_pair = self._lazy(self.keys, keys=True), self._lazy(self.values, keys=False)
        for states in states_pair:
            setattr(states, VIEW, self)
        return states_pair

    def _lazy(self, dense: torch.Tensor, *, keys: bool) -> torch.Tensor:
        if not self.packed:
            return dense.view_as(dense)  # a new tensor: an attribute of the layer's tensor would persist
        shape = (*dense.shape[:2], self.length, dense.shape[-1])
        return DecodedOnUse(shape, dense.dtype, dense.device, lambda: self.decode(keys=keys))


class PackedLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """The keys and values of an attention layer; the first and the latest tokens are dense, all others in packed
    blocks.

    A block is packed as soon as ``window`` tokens follow it, and never again. A pass attends to the blocks that were
    packed before the pass. It attends to all other tokens, including those of the pass, in full precision.

    Parameters
    ----------
    settings : KvCache
    location : str
        The layer's name in errors.
    sliding : int, optional
        Width of the attention window; blocks before it are dropped.
    """

    keys: Any
    values: Any

    def __init__(self, settings: KvCache, location: str, sliding: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.settings = settings
        self.location = location
        self.sliding = sliding
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
        """Set shape, dtype and device from the first keys. Raises ``UnsupportedError`` ``kv.model``."""
        if key_states.device.type != "cpu" or key_states.dtype not in TYPES:
            self._refuse(f"keys in f32, f16 or bf16 on the CPU, found {key_states.dtype} on {key_states.device}")
        if key_states.shape[-1] > MAX_EXTENT or value_states.shape[-1] > MAX_EXTENT or value_states.shape[-1] % 8:
            width = f"{key_states.shape[-1]} and {value_states.shape[-1]}"
            self._refuse(f"heads of at most {MAX_EXTENT} channels, of values in eights, found {width}")
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def _refuse(self, expected: str) -> None:
        raise UnsupportedError(
            f"expected {expected}: run this model with the full cache", rule="kv.model", where=self.location
        )

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append keys and values [sequences, heads, tokens, width]; return the states that this pass attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.waiting:
            raise UnsupportedError(
                "the model's attention does not choose the tokens to evict: use a cache without evict",
                rule="kv.evict",
                where=self.location,
            )
        evict = self.settings.evict
        new = key_states.shape[-2]
        self.waiting = evict is not None and not self.is_sliding and self.seen == 0 and new > evict
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.seen += new
        view = View(self, keys, values)
        self.keys = keys
        self.values = values
        if not self.waiting:
            self.pack_ready_blocks()
        return view.lazy_states()

    def evict(self, tokens: torch.Tensor) -> None:
        """Remove all tokens of the prompt except ``tokens``, and pack the blocks that are ready.

        ``tokens`` are ascending positions, [sequences, heads, tokens].
        """
        self.positions = tokens
        self.prompt = self.seen
        self.waiting = False
        self.keys, self.values = (
            states.gather(2, tokens[..., None].expand(-1, -1, -1, states.shape[-1]))
            for states in (self.keys, self.values)
        )
        self.pack_ready_blocks()

    def pack_ready_blocks(self) -> None:
        """Pack the blocks that ``window`` tokens follow; drop blocks outside the sliding window."""
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
        """Append keys [heads, blocks, channels, tokens] and values [heads, blocks, tokens, channels] as blocks."""
        if self.blocks is None:
            bits = self.settings.bits
            heads = len(keys)
            size = self.settings.tokens
            self.blocks = (
                PackedBlocks(heads, (keys.shape[2], size), bits, size),
                PackedBlocks(heads, (size, values.shape[3]), bits, self.settings.group),
            )
        arrays = [to_numpy(states.contiguous()) for states in (keys, values)]
        try:
            packed = [blocks.pack(block) for blocks, block in zip(self.blocks, arrays, strict=True)]
        except CodecError as error:
            raise error.add_location(self.location) from None
        for blocks, block in zip(self.blocks, packed, strict=True):
            blocks.put(block)

    def get_seq_length(self) -> int:
        """Return the number of tokens that were added, including tokens that were evicted or dropped."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns of the mask for a pass over ``query_length`` tokens, and the first position."""
        return self.seen + query_length - self.dropped, self.dropped

    def reset(self) -> None:
        """Remove all tokens from the layer's cache."""
        self._empty()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: -n removes n tokens; n keeps the first n tokens, as in older versions of
        transformers.

        Raises
        ------
        UnsupportedError
            ``kv.crop``: some of these tokens are packed, or tokens that would be in the window again were dropped.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.seen - tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return None
        if count >= self.seen:
            return self._empty()
        dense = self.keys.shape[2] - (0 if self.blocks is None else self.sinks)
        remaining = self.seen - count
        is_lost = self.sliding is not None and self.dropped > max(0, remaining - self.sliding + 1)
        if self.waiting or count > dense or is_lost or (self.positions is not None and remaining < self.prompt):
            raise UnsupportedError(
                f"can remove at most {self.settings.latest} tokens, which are still in full precision, "
                f"found {count}: use a cache with a larger window",
                rule="kv.crop",
                where=self.location,
            )
        self.keys = self.keys[:, :, :-count]
        self.values = self.values[:, :, :-count]
        self.seen = remaining
        return None

    def reorder_cache(self, beam_idx: Any) -> None:
        """Keep the sequences with the indices ``beam_idx``, in the order of the indices."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        if self.is_initialized:
            self._select(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the sequences that ``indices`` (integers, or a mask) select."""
        if self.is_initialized:
            self._select(torch.arange(self.keys.shape[0])[indices])

    def _select(self, sequences: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        chosen = sequences.to("cpu")
        heads = (chosen[:, None] * self.keys.shape[1] + torch.arange(self.keys.shape[1])).reshape(-1)
        self.keys = self.keys.index_select(0, chosen)
        self.values = self.values.index_select(0, chosen)
        self.positions = None if self.positions is None else self.positions.index_select(0, chosen)
        for blocks in self.blocks or ():
            blocks.take(heads.numpy())

    def offload(self) -> None:
        """Do nothing: the cache is on the CPU."""

    def prefetch(self) -> None:
        """Do nothing: the cache is on the CPU."""

    @property
    def nbytes(self) -> int:
        """The number of bytes of the stored keys and values."""
        if not self.is_initialized:
            return 0
        dense = [self.keys, self.values, *([] if self.positions is None else [self.positions])]
        return sum(int(states.nbytes) for states in dense) + sum(blocks.nbytes for blocks in self.blocks or ())

    @property
    def full_nbytes(self) -> int:
        """The number of bytes of the same tokens in an unpacked cache."""
        if not self.is_initialized:
            return 0
        tokens = self.seen if self.sliding is None else min(self.seen, self.sliding - 1)
        sequences, heads, _, width = self.keys.shape
        return int(tokens * sequences * heads * (width + self.values.shape[-1]) * self.keys.element_size())
