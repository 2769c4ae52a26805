"""Decoder layers of transformers models that run in native code, one or two calls per layer.

This applies to layers whose packed matrices are multiplied by x in 8 bits (``spec/loading.md``, "Layers in native
calls"). Importing this module needs torch and transformers (``core.border.require`` names the extra).
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
from ingot.core.runtime.parallel import share_openmp
from ingot.runtime.layers.packed_linear import PackedLinear

SPARE_TOKENS = 256
"""Number of tokens to preallocate after the present tokens, besides an eighth of their number."""

_NAME = "ingot_preallocated"
_PLAIN: Any = DynamicLayer


class PreallocatedCache:
    """Memory for the keys and values of a cache layer, with room for more tokens.

    Keys and values are [sequences, heads, capacity, width]; the first ``used`` tokens are valid. The tensors of a cache
    layer are views of these arrays. Valid tokens are never overwritten. Two cache layers may share the memory, as
    copies of a cache do. The layer that appends first continues in it. In the memory, the tokens of the second layer
    are then followed by other tokens, so it copies them to new memory.
    """

    __slots__ = ("keys", "used", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.used = int(keys.shape[2])
        self.keys = _preallocate(keys)
        self.values = _preallocate(values)

    def can_append(self, layer: Any, count: int) -> bool:
        """Return whether the layer's tokens are exactly the valid tokens, and ``count`` more tokens fit."""
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
    """Append keys and values to layer ``index`` of ``cache``; return all keys and values of the layer.

    The result equals the result of ``cache.update``, but tokens are copied less often.
    """
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
    """Return layer ``index`` of a cache of transformers' class ``DynamicCache``.

    Returns None if the cache is of another class, or if the layer does not exist yet.
    """
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or index >= len(cache.layers):
        return None
    return cache.layers[index]


def preallocated_cache(layer: Any, shape: Sequence[int], dtype: torch.dtype) -> PreallocatedCache | None:
    """Return the preallocated memory for appending keys and values of ``shape`` to a cache layer.

    ``shape`` is [sequences, heads, new tokens, width]. Return None if the layer is not exactly a ``DynamicLayer``, is
    empty, is not on the CPU, or has another dtype or other dimensions. Also return None if there are more than
    ``SPARE_TOKENS`` new tokens.
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


SUPPORTED: Final = frozenset(("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"))
"""Classes of transformers that compute the same as ``DecoderLayer``; ``_agrees`` verifies it for each model."""
MAX_SINGLE_QUERIES: Final = 16
"""Maximum number of queries of a sequence that are computed one by one, each over the keys up to its position."""

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_address = torch.Tensor.data_ptr
_forward = attrgetter("forward")
_epsilon = attrgetter("variance_epsilon")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def put_layers(model: torch.nn.Module) -> int:
    """Make the supported decoder layers of a model compute in native calls; return their number.

    If the first supported layer does not agree with ``DecoderLayer``, all layers stay unchanged and the result is 0.
    """
    layers: list[Any] = [module for module in model.modules() if _is_supported(type(module))]
    for layer in layers:
        cls: Any = type(layer)
        layer.__class__ = _native_class(cls)
    ready = [layer for layer in layers if layer.built() is not None]
    if ready and _agrees(ready[0]):
        share_openmp()
        return len(ready)
    for layer in layers:
        layer.__class__ = type(layer).__mro__[2]
    return 0


def _is_supported(cls: type) -> bool:
    named = cls.__name__ in SUPPORTED and cls.__module__.startswith("transformers.models.")
    return named and not issubclass(cls, InNativeCalls)


@cache
def _native_class(base: type) -> type:
    """Return a subclass of the layer class ``base`` that computes in native calls and has the same name."""
    return type(
        base.__name__, (InNativeCalls, base), {"__module__": base.__module__, "__qualname__": base.__qualname__}
    )


def _blank(base: type) -> Any:
    cls: Any = _native_class(base)
    return cls.__new__(cls)


class _NativeState:
    """The native form of a decoder layer, and the parts of the layer from which it was built.

    ``layer`` computes the decoder layer in native code; None if that is not possible. Other code may replace a part of
    a model or its ``forward``, add hooks, or set ``data``; ``is_current`` detects all of these.
    """

    __slots__ = (
        "_addresses",
        "_children",
        "_epsilons",
        "_forwards",
        "_has_hooks",
        "_hooks",
        "_ids",
        "_linears",
        "_norms",
        "_original_cls",
        "_rounding",
        "_tables",
        "_values",
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
        self._children = [module for group in modules for module in group.values() if module is not None]
        self._original_cls: Any = type(layer).__mro__[2]
        self._forwards = self._methods()
        self._hooks = [getattr(module, name) for module in self._children for name in _HOOKS]
        self._has_hooks = any(self._hooks)
        # Buffers and parameters both: a name may move from one table to the other.
        values = [table for group in (*self._linears, *self._norms) for table in (group._buffers, group._parameters)]
        self._tables = modules + values
        self._values = [value for table in self._tables for value in table.values()]
        self._ids = [*map(id, self._values)]
        self._vectors = [value for table in values for value in table.values() if value is not None]
        self._addresses = [*map(_address, self._vectors)]
        self._rounding = [*map(_rounding, self._linears)]
        self._epsilons = [*map(_epsilon, self._norms)]
        plain = (
            not self._has_hooks
            and _defines_forward(self._original_cls)
            and all(map(_has_original_forward, self._children))
        )
        self.layer = _build(layer, self._linears, self._norms) if plain else None

    def is_current(self) -> bool:
        """Return whether the decoder layer still has the parts from which the native form was built.

        Every layer calls this for every token, when the processor's caches are full of weights, so most of it runs in
        C.
        """
        return (
            [*map(id, chain.from_iterable(map(dict.values, self._tables)))] == self._ids
            and [*map(_address, self._vectors)] == self._addresses
            and [*map(_rounding, self._linears)] == self._rounding
            and [*map(_epsilon, self._norms)] == self._epsilons
            and any(self._hooks) == self._has_hooks
            and self._methods() == self._forwards
        )

    def _methods(self) -> list[Any]:
        return [self._original_cls.forward, *map(_forward, self._children)]


class InNativeCalls:
    """A decoder layer whose native code computes the parts before and after attention, or all of it for one more token.

    The layer's original forward is used if gradients are recorded, if a part of the layer has a hook, or if a part was
    replaced.
    """

    _built: _NativeState | None = None
    listener: Callable[[torch.Tensor], object] | None = None
    """Called with the input of each call. It replaces hooks, because a layer with a hook would use the original
    forward.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in ("_built", "listener")}
        return _blank, (type(self).__mro__[2],), state

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output for x [sequences, tokens, hidden]."""
        if self.listener is not None:
            self.listener(hidden_states)
        built = self.built() if not args and self._plain(hidden_states, kwargs) else None
        if built is None:
            original: Any = super()
            return original.forward(hidden_states, *args, **kwargs)
        return self._compute(built, hidden_states, **kwargs)

    def built(self) -> DecoderLayer | None:
        """Return the native form of the layer, built again if a part of the layer changed; None if it cannot be
        built.
        """
        built = self._built
        if built is None or not built.is_current():
            built = self._built = _NativeState(self)
        return built.layer

    def _plain(self, x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether native code may compute a call: inference on the CPU, in the layer's dtype, with usual
        arguments.
        """
        layer: Any = self
        angles = kwargs.get("position_embeddings")
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
            and not kwargs.get("output_attentions")
            # For "eager", the attention is a function of each model's module.
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
        **options: Any,
    ) -> torch.Tensor:
        layer: Any = self
        sequences, tokens, hidden = x.shape
        rows, threads, attention = sequences * tokens, torch.get_num_threads(), layer.self_attn
        flat = x.reshape(rows, hidden)
        out = x.new_empty(sequences, tokens, hidden)
        cosines, sines = (_bits(angle.expand(sequences, tokens, -1).reshape(rows, -1)) for angle in position_embeddings)
        if tokens == 1 and attention_mask is None and built.steps and _uses_sdpa(attention):
            cache_layer = layer_of(past_key_values, attention.layer_idx)
            preallocated = preallocated_cache(cache_layer, (sequences, built.shared, 1, attention.head_dim), x.dtype)
            if preallocated is not None:
                cached = (_bits(preallocated.keys), _bits(preallocated.values))
                result = _bits(out.view(rows, hidden))
                built.step(_bits(flat), (cosines, sines), cached, preallocated.used, attention.scaling, result, threads)
                preallocated.extend(cache_layer, 1)
                return out
        states = [
            x.new_empty(rows, linear.out_features) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        queries, keys, values = map(_bits, states)
        built.project(_bits(flat), cosines, sines, queries, keys, values, threads)
        shape = sequences, tokens, -1, attention.head_dim
        query, key, value = (state.view(shape).transpose(1, 2) for state in states)
        if past_key_values is not None:
            key, value = append(past_key_values, key, value, attention.layer_idx)
        attended = self._attend(query, key, value, attention_mask, options)
        built.finish(_bits(attended.reshape(rows, -1)), _bits(flat), _bits(out.view(rows, hidden)), threads)
        return out

    def _attend(self, query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> torch.Tensor:
        layer: Any = self
        attention = layer.self_attn
        if _uses_sdpa(attention) and _same_types(query, key, value) and _is_causal_tail(query, key, mask):
            return attend_each(query, key, value, attention.scaling)
        interface: Any = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
        if (window := getattr(attention, "sliding_window", None)) is not None:
            options = {**options, "sliding_window": window}
        attended: torch.Tensor = interface(
            attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling, **options
        )[0]
        return attended


def attend_each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention of each of the last queries over the keys up to its position.

    Queries are [sequences, heads, queries, width]. Several heads share a head of keys [sequences, heads of keys,
    tokens, width]. The result is [sequences, queries, heads, width]; the result of a query does not depend on the other
    queries.
    """
    sequences, heads, queries, width = query.shape
    shared = key.shape[1]
    tokens = key.shape[2]
    name = _NAMES[query.dtype]
    threads = torch.get_num_threads()
    keys = _heads(key)
    values = _heads(value)
    out = query.new_empty(queries, sequences * shared, heads // shared, width)
    if queries == 1:
        query_bits = _bits(query.reshape(sequences * shared, heads // shared, width))
        attend(query_bits, keys, values, tokens, _bits(out[0]), name, scale, threads)
        return out.view(sequences, 1, heads, width)
    for index in range(queries):
        query_bits = _bits(query[:, :, index].reshape(sequences * shared, heads // shared, width))
        attend(query_bits, keys, values, tokens - queries + index + 1, _bits(out[index]), name, scale, threads)
    return out.view(queries, sequences, heads, width).transpose(0, 1)


def _heads(states: torch.Tensor) -> Any:
    """Return keys or values as an array [heads of all sequences, capacity in tokens, width].

    If the tensor is a view of preallocated memory, the array includes the memory after its tokens.
    """
    sequences, shared, tokens, width = states.shape
    capacity = states.stride(1) // width
    if states.stride() == (shared * capacity * width, capacity * width, width, 1) and capacity >= tokens:
        last = states.storage_offset() + sequences * shared * capacity * width
        if last * states.element_size() <= states.untyped_storage().nbytes():
            return _bits(states.as_strided((sequences * shared, capacity, width), (capacity * width, width, 1)))
    return _bits(states.reshape(sequences * shared, tokens, width))


def _uses_sdpa(attention: Any) -> bool:
    """Return whether attention uses torch's function and no other is registered under its name."""
    function: Any = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    return function is sdpa_attention_forward


def _same_types(query: Any, key: Any, value: Any) -> bool:
    """Return whether ``key`` and ``value`` are plain tensors of one shape, in the dtype of ``query``.

    Caches other than transformers' own may return other objects.
    """
    plain = type(key) is type(value) is torch.Tensor and key.dtype == value.dtype == query.dtype
    return plain and key.shape == value.shape


def _is_causal_tail(query: torch.Tensor, key: torch.Tensor, mask: Any) -> bool:
    """Return whether native attention supports a call.

    It supports at most ``MAX_SINGLE_QUERIES`` queries, which must be the last tokens. Each must see all keys up to its
    position, and no later keys. The width of heads must be a multiple of 16, at most ``LARGEST_HEAD``.
    """
    queries, width = query.shape[2:]
    if (
        queries > MAX_SINGLE_QUERIES
        or queries > key.shape[2]
        or width % 16
        or width > LARGEST_HEAD
        or query.shape[1] % key.shape[1]
    ):
        return False
    return queries == 1 if mask is None else _is_causal(mask, queries, key.shape[2])


def _is_causal(mask: Any, queries: int, tokens: int) -> bool:
    """Return whether ``mask`` lets each of the last ``queries`` tokens see all keys up to its position, and no later
    ones.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape[-2:] != (queries, tokens):
        return False
    return bool(torch.all(mask == mask.new_ones(queries, tokens).tril(tokens - queries)))


def _rounding(linear: Any) -> Any:
    return getattr(linear, "rounding", False)


def _has_original_forward(module: Any) -> bool:
    return "forward" not in vars(module) and _defines_forward(type(module))


def _defines_forward(cls: Any) -> bool:
    """Return whether the ``forward`` of a module class is defined in the class's own Python module.

    It is false if other code has replaced it.
    """
    is_own: bool = cls.forward.__module__ == cls.__module__
    return is_own


def _rounds(linear: Any) -> bool:
    """Return whether ``linear`` is a packed layer on the CPU that multiplies x in 8 bits with the affine kernels."""
    packed = isinstance(linear, PackedLinear) and linear.rounding and linear.packed.is_cpu
    return packed and isinstance(linear.matrix, PackedMatrix) and linear.matrix.rounds


def _build(layer: Any, linears: list[Any], norms: list[Any]) -> DecoderLayer | None:
    attention = layer.self_attn
    dtype = layer.input_layernorm.weight.dtype
    if not all(map(_rounds, linears)):
        return None
    vectors = [linear.bias for linear in linears] + [norm.weight for norm in norms]
    if dtype not in _NAMES or not all(vector is None or _is_plain(vector, dtype) for vector in vectors):
        return None
    silu = type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    if not silu or attention.head_dim > LARGEST_HEAD:
        return None
    biases = [None if linear.bias is None else _bits(linear.bias.detach()) for linear in linears]
    native_norms: list[Norm | None] = [
        Norm(_bits(norm.weight.detach()), float(norm.variance_epsilon)) for norm in norms
    ]
    native_norms += [None] * (4 - len(native_norms))
    return DecoderLayer([linear.matrix for linear in linears], biases, native_norms, attention.head_dim, _NAMES[dtype])


def _is_plain(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return values.dtype == dtype and values.is_cpu and values.is_contiguous()


def _agrees(layer: Any) -> bool:
    """Return whether native calls and the original forward change three random tokens in about the same way.

    The tokens are small, so that the layer's contribution to the residual stream is visible.
    """
    width = layer.self_attn.head_dim
    norm = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 3, norm.numel(), generator=generator, device="cpu") / 64).to(norm.dtype)
    angles = torch.randn(1, 3, width // 2, generator=generator, device="cpu").repeat(1, 1, 2)
    kwargs = {"position_embeddings": (angles.cos().to(norm.dtype), angles.sin().to(norm.dtype)), "attention_mask": None}
    original: Any = super(InNativeCalls, layer)
    with torch.inference_mode():
        expected, computed = original.forward(x, **kwargs).float() - x, layer.forward(x, **kwargs).float() - x
    return bool((expected - computed).abs().max() <= 0.05 * expected.abs().max())


def _bits(values: torch.Tensor) -> Any:
    """Return ``values`` as a NumPy array, f16 and bf16 as u16; a copy if they are not contiguous."""
    if not values.is_contiguous():
        values = values.contiguous()
    return values.numpy() if values.dtype == torch.float32 else values.view(torch.uint16).numpy()
