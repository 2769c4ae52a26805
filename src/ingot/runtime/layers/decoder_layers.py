"""Decoder layers of transformers' models whose packed layers take x in 8 bits, in one or two calls of native code each
(``spec/loading.md``, "Layers in native calls").

This module needs torch and transformers to be imported (``core.extras.require`` names the extra).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch.nn.modules import module as torch_module
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ingot.codecs.affine.layer import LARGEST_HEAD, DecoderLayer, Norm, attend
from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.runtime.parallel import share_team
from ingot.runtime.layers.packed_linear import PackedLinear

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


KNOWN: Final = frozenset(("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"))
"""Classes of transformers that compute what ``DecoderLayer`` does; each model is asked besides (``_agrees``)."""
FEW: Final = 16
"""Queries of a sequence that are computed one by one, each over the keys up to its own."""

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_address, _forward, _epsilon = torch.Tensor.data_ptr, attrgetter("forward"), attrgetter("variance_epsilon")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def put_layers(model: torch.nn.Module) -> int:
    """Have the decoder layers of a model that are known compute in native calls; return how many do.

    Where the first of them does not compute what ``DecoderLayer`` does, all are left as they are: 0.
    """
    layers: list[Any] = [module for module in model.modules() if _is_known(type(module))]
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _kind(kind)
    ready = [layer for layer in layers if layer.built() is not None]
    if ready and _agrees(ready[0]):
        share_team()
        return len(ready)
    for layer in layers:
        layer.__class__ = type(layer).__mro__[2]
    return 0


def _is_known(kind: type) -> bool:
    named = kind.__name__ in KNOWN and kind.__module__.startswith("transformers.models.")
    return named and not issubclass(kind, InNativeCalls)


@cache
def _kind(base: type) -> type:
    """Return the subclass of a class of layers that computes in native calls; it goes by its name."""
    return type(
        base.__name__, (InNativeCalls, base), {"__module__": base.__module__, "__qualname__": base.__qualname__}
    )


def _blank(base: type) -> Any:
    kind: Any = _kind(base)
    return kind.__new__(kind)


class _Built:
    """What computes for a layer (``layer``, or None where nothing can), and what that was made of.

    Others replace a part of a model or its ``forward``, listen to it, or set ``data``: what is compared tells of all of
    these.
    """

    __slots__ = (
        "_addresses",
        "_children",
        "_epsilons",
        "_forwards",
        "_heard",
        "_held",
        "_hooks",
        "_ids",
        "_kind",
        "_linears",
        "_norms",
        "_rounding",
        "_tables",
        "_vectors",
        "layer",
    )

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        self._linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        self._norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self._norms += [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
        modules = [part._modules for part in (layer, attention, mlp)]
        self._children = [module for some in modules for module in some.values() if module is not None]
        self._kind: Any = type(layer).__mro__[2]
        self._forwards = self._methods()
        self._hooks = [getattr(module, name) for module in self._children for name in _HOOKS]
        self._heard = any(self._hooks)
        # Both kinds of an attribute: what is registered under one name may move from one to the other.
        values = [table for some in (*self._linears, *self._norms) for table in (some._buffers, some._parameters)]
        self._tables = modules + values
        self._held = [value for table in self._tables for value in table.values()]
        self._ids = [*map(id, self._held)]
        self._vectors = [value for table in values for value in table.values() if value is not None]
        self._addresses = [*map(_address, self._vectors)]
        self._rounding = [*map(_rounding, self._linears)]
        self._epsilons = [*map(_epsilon, self._norms)]
        plain = not self._heard and _is_own(self._kind) and all(map(_computes_itself, self._children))
        self.layer = _build(layer, self._linears, self._norms) if plain else None

    def is_of_now(self) -> bool:
        """Whether all of it is as it was, and heard by somebody where it was.

        Every token asks this of every layer, after weights have filled the caches: little of it is Python's own code.
        """
        return (
            [*map(id, chain.from_iterable(map(dict.values, self._tables)))] == self._ids
            and [*map(_address, self._vectors)] == self._addresses
            and [*map(_rounding, self._linears)] == self._rounding
            and [*map(_epsilon, self._norms)] == self._epsilons
            and any(self._hooks) == self._heard
            and self._methods() == self._forwards
        )

    def _methods(self) -> list[Any]:
        return [self._kind.forward, *map(_forward, self._children)]


class InNativeCalls:
    """What a decoder layer becomes: native code computes before attention and behind it, or all for one more token.

    Where gradients are recorded, somebody listens to a part of the layer, or a part is not what it was, the layer's own
    forward computes.
    """

    _built: _Built | None = None
    listener: Callable[[torch.Tensor], object] | None = None
    """Gets the input of each call: a hook of torch or transformers would have the layer's own forward compute."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kept = {name: value for name, value in vars(self).items() if name not in ("_built", "listener")}
        return _blank, (type(self).__mro__[2],), kept

    def forward(self, hidden_states: torch.Tensor, *args: Any, **given: Any) -> Any:
        """Return what the layer returns for x [sequences, tokens, hidden]."""
        if self.listener is not None:
            self.listener(hidden_states)
        built = self.built() if not args and self._plain(hidden_states, given) else None
        if built is None:
            own: Any = super()
            return own.forward(hidden_states, *args, **given)
        return self._compute(built, hidden_states, **given)

    def built(self) -> DecoderLayer | None:
        """Return what computes, of the layer's parts as they are now; None where it cannot."""
        built = self._built
        if built is None or not built.is_of_now():
            built = self._built = _Built(self)
        return built.layer

    def _plain(self, x: torch.Tensor, given: dict[str, Any]) -> bool:
        """Whether a call is one of inference on the CPU, in the layer's type."""
        layer: Any = self
        angles = given.get("position_embeddings")
        return (
            not torch.is_grad_enabled()
            and not layer.training
            and x.is_cpu
            and x.dtype == layer.input_layernorm.weight.dtype
            and x.ndim == 3
            and x.numel() > 0
            and not torch.is_autocast_enabled("cpu")
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and not given.get("output_attentions")
            # "eager" is a function of each model's own module.
            and ALL_ATTENTION_FUNCTIONS.get(layer.self_attn.config._attn_implementation) is not None
            and angles is not None
            and angles[0].shape[-1] == layer.self_attn.head_dim
            and angles[0].dtype == x.dtype
        )

    def _compute(
        self,
        built: DecoderLayer,
        x: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> torch.Tensor:
        layer: Any = self
        sequences, tokens, hidden = x.shape
        rows, threads, attention = sequences * tokens, torch.get_num_threads(), layer.self_attn
        flat, out = x.reshape(rows, hidden), x.new_empty(sequences, tokens, hidden)
        cosines, sines = (_bits(angle.expand(sequences, tokens, -1).reshape(rows, -1)) for angle in position_embeddings)
        if tokens == 1 and attention_mask is None and built.steps and _is_torch_own(attention):
            held = layer_of(past_key_values, attention.layer_idx)
            room = room_in(held, (sequences, built.shared, 1, attention.head_dim), x.dtype)
            if room is not None:
                kept, result = (_bits(room.keys), _bits(room.values)), _bits(out.view(rows, hidden))
                built.step(_bits(flat), (cosines, sines), kept, room.used, attention.scaling, result, threads)
                room.take(held, 1)
                return out
        states = [
            x.new_empty(rows, linear.out_features) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        queries, keys, values = map(_bits, states)
        built.project(_bits(flat), cosines, sines, queries, keys, values, threads)
        shape = sequences, tokens, -1, attention.head_dim
        query, key, value = (some.view(shape).transpose(1, 2) for some in states)
        if past_key_values is not None:
            key, value = append(past_key_values, key, value, attention.layer_idx)
        attended = self._attend(query, key, value, attention_mask, more)
        built.finish(_bits(attended.reshape(rows, -1)), _bits(flat), _bits(out.view(rows, hidden)), threads)
        return out

    def _attend(self, query: Any, key: Any, value: Any, mask: Any, more: dict[str, Any]) -> torch.Tensor:
        layer: Any = self
        attention = layer.self_attn
        if _is_torch_own(attention) and _are_alike(query, key, value) and _in_order(query, key, mask):
            return attend_each(query, key, value, attention.scaling)
        interface: Any = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
        if (window := getattr(attention, "sliding_window", None)) is not None:
            more = {**more, "sliding_window": window}
        found: torch.Tensor = interface(
            attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling, **more
        )[0]
        return found


def attend_each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what a few last queries [sequences, heads, queries, width] attend to, each over the keys up to its own.

    Heads share keys [sequences, heads of keys, tokens, width], as many as there are more of them. The result is
    [sequences, queries, heads, width]; that of a query does not depend on the others.
    """
    sequences, heads, queries, width = query.shape
    shared, tokens = key.shape[1], key.shape[2]
    name, threads = _NAMES[query.dtype], torch.get_num_threads()
    keys, values = _heads(key), _heads(value)
    out = query.new_empty(queries, sequences * shared, heads // shared, width)
    if queries == 1:
        asked = _bits(query.reshape(sequences * shared, heads // shared, width))
        attend(asked, keys, values, tokens, _bits(out[0]), name, scale, threads)
        return out.view(sequences, 1, heads, width)
    for number in range(queries):
        asked = _bits(query[:, :, number].reshape(sequences * shared, heads // shared, width))
        attend(asked, keys, values, tokens - queries + number + 1, _bits(out[number]), name, scale, threads)
    return out.view(queries, sequences, heads, width).transpose(0, 1)


def _heads(states: torch.Tensor) -> Any:
    """Return an array [heads of all sequences, tokens and what room there is behind them, width]."""
    sequences, shared, tokens, width = states.shape
    room = states.stride(1) // width
    if states.stride() == (shared * room * width, room * width, width, 1) and room >= tokens:
        last = states.storage_offset() + sequences * shared * room * width
        if last * states.element_size() <= states.untyped_storage().nbytes():
            return _bits(states.as_strided((sequences * shared, room, width), (room * width, width, 1)))
    return _bits(states.reshape(sequences * shared, tokens, width))


def _is_torch_own(attention: Any) -> bool:
    """Whether a part computes attention by torch's function, and nobody registered another under its name."""
    found: Any = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    return found is sdpa_attention_forward


def _are_alike(query: Any, key: Any, value: Any) -> bool:
    """Whether a cache returned keys and values in the type of queries, as plain tensors."""
    plain = type(key) is type(value) is torch.Tensor and key.dtype == value.dtype == query.dtype
    return plain and key.shape == value.shape


def _in_order(query: torch.Tensor, key: torch.Tensor, mask: Any) -> bool:
    """Whether there are few queries, the last ones, and each sees all keys up to its own."""
    queries, width = query.shape[2:]
    if queries > FEW or queries > key.shape[2] or width % 16 or width > LARGEST_HEAD or query.shape[1] % key.shape[1]:
        return False
    return queries == 1 if mask is None else _is_causal(mask, queries, key.shape[2])


def _is_causal(mask: Any, queries: int, tokens: int) -> bool:
    """Whether a mask hides nothing but later tokens."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape[-2:] != (queries, tokens):
        return False
    return bool(torch.all(mask == mask.new_ones(queries, tokens).tril(tokens - queries)))


def _rounding(linear: Any) -> Any:
    return getattr(linear, "rounding", False)


def _computes_itself(module: Any) -> bool:
    return "forward" not in vars(module) and _is_own(type(module))


def _is_own(kind: Any) -> bool:
    """Whether a class of modules computes by the method that it was written with."""
    own: bool = kind.forward.__module__ == kind.__module__
    return own


def _rounds(linear: Any) -> bool:
    """Whether a layer multiplies x in 8 bits by the kernels of the affine family."""
    packed = isinstance(linear, PackedLinear) and linear.rounding and linear.packed.is_cpu
    return packed and isinstance(linear.matrix, PackedMatrix) and linear.matrix.rounds


def _build(layer: Any, linears: list[Any], norms: list[Any]) -> DecoderLayer | None:
    attention, dtype = layer.self_attn, layer.input_layernorm.weight.dtype
    if not all(map(_rounds, linears)):
        return None
    vectors = [linear.bias for linear in linears] + [norm.weight for norm in norms]
    if dtype not in _NAMES or not all(some is None or _is_plain(some, dtype) for some in vectors):
        return None
    silu = type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    if not silu or attention.head_dim > LARGEST_HEAD:
        return None
    biases = [None if linear.bias is None else _bits(linear.bias.detach()) for linear in linears]
    made: list[Norm | None] = [Norm(_bits(norm.weight.detach()), float(norm.variance_epsilon)) for norm in norms]
    made += [None] * (4 - len(made))
    return DecoderLayer([linear.matrix for linear in linears], biases, made, attention.head_dim, _NAMES[dtype])


def _is_plain(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return values.dtype == dtype and values.is_cpu and values.is_contiguous()


def _agrees(layer: Any) -> bool:
    """Whether a layer adds about the same to its input in native calls as by itself, for three random tokens.

    These are small, so that what is added to them shows.
    """
    width, norm = layer.self_attn.head_dim, layer.input_layernorm.weight
    numbers = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 3, norm.numel(), generator=numbers, device="cpu") / 64).to(norm.dtype)
    turns = torch.randn(1, 3, width // 2, generator=numbers, device="cpu").repeat(1, 1, 2)
    given = {"position_embeddings": (turns.cos().to(norm.dtype), turns.sin().to(norm.dtype)), "attention_mask": None}
    own: Any = super(InNativeCalls, layer)
    with torch.inference_mode():
        expected, found = own.forward(x, **given).float() - x, layer.forward(x, **given).float() - x
    return bool((expected - found).abs().max() <= 0.05 * expected.abs().max())


def _bits(values: torch.Tensor) -> Any:
    """Return an array over the same memory, f16 and bf16 as u16; a copy of what does not lie in order."""
    if not values.is_contiguous():
        values = values.contiguous()
    return values.numpy() if values.dtype == torch.float32 else values.view(torch.uint16).numpy()
