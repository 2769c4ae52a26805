"""A decoder as an ML program that continues a text: any number of tokens at a time, and a cache in Core ML's states.

Names of inputs and states are those of swift-transformers. All weights are tensors (``spec/coreml.md``). No square is
computed, because it could overflow: the root mean square of x is the standard deviation of [x, -x], whose mean is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.conversion.coreml.decoder_config import Decoder
from ingot.formats.coreml.build import FP16, FP32, INT32, Builder, Feature, FlexibleShape, Interface
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.types import MilType
from ingot.model.tensor import Array

INPUT = "inputIds"
OUTPUT = "logits"
MASK = "fullAttentionMask"
SLIDING_MASK = "slidingAttentionMask"
KEYS, VALUES = STATES = ("keyCache", "valueCache")
OPSET = "iOS18"
"""The first opset with states."""
_WINDOW_KEY = "co.huggingface.exporters.sliding_window"
_BY_HEAD = (2, 1, 0, 3)
"""The permutation from [tokens, key heads, group, channels] to [group, key heads, tokens, channels], and back."""
_DTYPES = {FP16: np.float16, FP32: np.float32}


def constant_name(tensor: str) -> str:
    """Return the name of a tensor's constant, an identifier as converters create it."""
    return tensor.replace(".", "_")


def decoder_template(decoder: Decoder, context: int) -> Template:
    """Return the package of a decoder whose cache holds ``context`` tokens; its weights have undefined values."""
    return _Program(decoder, context).template()


class _Program:
    def __init__(self, decoder: Decoder, context: int) -> None:
        self._decoder = decoder
        self._context = context
        self._builder = Builder(OPSET)
        self._sizes = dict(decoder.shapes())
        self._values = dict[str, tuple[MilType, FlexibleShape]]()
        self._caches = dict[str, str]()  # the latest contents of each state
        self._wide = FP32 if decoder.norm_offset else FP16  # Gemma's residual stream exceeds the range of f16
        # A window that is not shorter than the cache has no effect.
        self._sliding = decoder.sliding if decoder.window < context else (False,) * decoder.layers
        self._masks = [SLIDING_MASK if item else MASK for item in sorted(set(self._sliding))]
        self._false = self._builder.flag("no", False)
        self._true = self._builder.flag("yes", True)
        self._two = self._integers("two", 2)
        self._zero = self._integers("axis_0", 0)
        self._last = self._integers("last_axis", -1)
        self._last_axes = self._integers("last_axes", [-1])
        self._types = {type: self._builder.text(type.name, type.name) for type in dict.fromkeys((FP16, self._wide))}
        self._eps = self._number("eps", decoder.eps, self._wide)
        self._minus = self._number("minus", -1, self._wide)
        self._unit = self._number("unit", 1, self._wide)

    def template(self) -> Template:
        """Return the package of the program."""
        decoder = self._decoder
        self._values |= dict.fromkeys(self._masks, (FP16, (1, 1, None, None)))
        self._values[INPUT] = INT32, (1, None)
        self._add_positions()
        self._tables = {item: self._rotary_tables(item) for item in sorted(set(decoder.sliding))}
        embedding = self._weight("model.embed_tokens.weight")
        inputs = {"x": embedding, "indices": INPUT, "axis": self._zero, "batch_dims": self._zero}
        inputs["validate_indices"] = self._false
        x = self._add("gather", "embedded", inputs, (1, None, decoder.hidden_size))
        x = self._cast(x, self._wide)
        if decoder.norm_offset:
            scale = self._number("embedding_scale", decoder.hidden_size**0.5, self._wide)
            x = self._like("mul", "embedded_scaled", x, y=scale)
        for layer in range(decoder.layers):
            x = self._layer(x, layer)
        x = self._cast(self._norm(x, "model.norm.weight"), FP16)
        head = embedding if decoder.tied_head else self._weight("lm_head.weight")
        logits = (1, None, decoder.vocab_size)
        name = OUTPUT if decoder.logit_cap is None else "head_out"
        x = self._add("linear", name, {"x": x, "weight": head}, logits)
        if decoder.logit_cap is not None:
            self._capped(x, decoder.logit_cap, OUTPUT)
        cache = (decoder.layers, 1, decoder.kv_heads, self._context, decoder.head_dim)
        interface = Interface(
            [Feature(item, *self._values[item], self._context) for item in (INPUT, *self._masks)],
            [Feature(OUTPUT, FP16, logits)],
            [Feature(item, FP16, cache) for item in STATES],
            {_WINDOW_KEY: str(decoder.window)} if SLIDING_MASK in self._masks else {},
        )
        return self._builder.template(interface)

    # Operations, which record types and shapes of their results

    def _add(
        self,
        operation: str,
        name: str,
        inputs: Mapping[str, str | Sequence[str]],
        shape: FlexibleShape,
        type: MilType = FP16,
    ) -> str:
        self._values[name] = type, shape
        return self._builder.add(operation, name, inputs, shape, type)

    def _like(self, operation: str, name: str, x: str, **inputs: str) -> str:
        """Add an operation whose result has the type and the shape of x."""
        type, shape = self._values[x]
        return self._add(operation, name, {"x": x, **inputs}, shape, type)

    def _cast(self, x: str, type: MilType) -> str:
        source, shape = self._values[x]
        if source == type:
            return x
        return self._add("cast", f"{x}_{type.name}", {"x": x, "dtype": self._types[type]}, shape, type)

    def _integers(self, name: str, values: int | Sequence[int]) -> str:
        array: Array = np.array(values, np.int32)
        return self._builder.constant(name, array)

    def _number(self, name: str, value: float, type: MilType = FP16) -> str:
        return self._builder.constant(name, np.asarray(value, _DTYPES[type]))

    def _weight(self, tensor: str) -> str:
        name = constant_name(tensor)
        shape = self._sizes[tensor]
        self._values[name] = FP16, shape
        return self._builder.weight(name, shape)

    def _linear(self, x: str, tensor: str) -> str:
        weight = self._weight(f"{tensor}.weight")
        inputs = {"x": x, "weight": weight}
        if f"{tensor}.bias" in self._sizes:
            inputs["bias"] = self._weight(f"{tensor}.bias")
        shape = (*self._values[x][1][:-1], self._sizes[f"{tensor}.weight"][0])
        return self._add("linear", f"{weight}_out", inputs, shape)

    def _concat(self, name: str, values: Sequence[str], axis: str, shape: FlexibleShape, type: MilType) -> str:
        return self._add("concat", name, {"values": values, "axis": axis, "interleave": self._false}, shape, type)

    def _vector(self, name: str, *items: str | list[int]) -> str:
        """Return an int32 vector of constants and of vectors with one element."""
        values = [
            item if isinstance(item, str) else self._integers(f"{name}_{index}", item)
            for index, item in enumerate(items)
        ]
        size = sum(1 if isinstance(item, str) else len(item) for item in items)
        return self._concat(name, values, self._zero, (size,), INT32)

    def _reshape(self, name: str, x: str, shape: tuple[int, ...]) -> str:
        """Return x in another shape, in which -1 is the number of tokens."""
        sizes = tuple(None if size == -1 else size for size in shape)
        return self._add("reshape", name, {"x": x, "shape": self._integers(f"{name}_shape", shape)}, sizes)

    def _transpose(self, name: str, x: str) -> str:
        shape = self._values[x][1]
        permuted = tuple(shape[axis] for axis in _BY_HEAD)
        return self._add("transpose", name, {"x": x, "perm": self._integers(f"{name}_perm", _BY_HEAD)}, permuted)

    def _halves(self, x: str, names: Sequence[str]) -> list[str]:
        """Return both halves of the last dimension."""
        type, shape = self._values[x]
        assert shape[-1] is not None
        half = (*shape[:-1], shape[-1] // 2)
        self._values |= dict.fromkeys(names, (type, half))
        inputs = {"x": x, "num_splits": self._two, "axis": self._last}
        return self._builder.several("split", names, inputs, [half, half], type)

    # Positions

    def _add_positions(self) -> None:
        """Add the numbers of tokens in the cache before and after this call."""
        self._total = self._size_of(self._masks[0], 3, "total")
        self._past = self._like("sub", "past", self._total, y=self._size_of(INPUT, 1, "tokens"))
        decoder = self._decoder
        self._cache_end = self._vector("cache_end", [1, decoder.kv_heads], self._total, [decoder.head_dim])

    def _size_of(self, x: str, axis: int, name: str) -> str:
        shape = self._add("shape", f"{name}_shape", {"x": x}, (len(self._values[x][1]),), INT32)
        inputs = {"x": shape, "indices": self._integers(f"{name}_axis", [axis]), "axis": self._zero}
        inputs |= {"batch_dims": self._zero, "validate_indices": self._false}
        return self._add("gather", name, inputs, (1,), INT32)

    def _rotary_tables(self, sliding: bool) -> tuple[str, str]:
        """Return cosines and sines of the new positions, [tokens, head_dim / 2]; angles are computed in f64."""
        decoder = self._decoder
        end = "_sliding" if sliding else ""
        frequencies = decoder.sliding_frequencies if sliding else decoder.frequencies
        half = len(frequencies)
        angle = np.outer(np.arange(self._context, dtype=np.float64), frequencies)
        inputs = {
            "begin": self._vector(f"rope_begin{end}", self._past, [0]),
            "end": self._vector(f"rope_end{end}", self._total, [half]),
            "begin_mask": self._builder.flags(f"rope_begin_mask{end}", [False, True]),
            "end_mask": self._builder.flags(f"rope_end_mask{end}", [False, True]),
        }
        cos = self._builder.constant(f"rope_cos{end}", np.cos(angle).astype(np.float16))
        sin = self._builder.constant(f"rope_sin{end}", np.sin(angle).astype(np.float16))
        return (
            self._add("slice_by_index", f"cos{end}", {"x": cos, **inputs}, (None, half)),
            self._add("slice_by_index", f"sin{end}", {"x": sin, **inputs}, (None, half)),
        )

    # Layers

    def _layer(self, x: str, layer: int) -> str:
        prefix = f"model.layers.{layer}."
        name = constant_name(prefix)
        sandwich = self._decoder.sandwich
        normed = self._cast(self._norm(x, f"{prefix}input_layernorm.weight"), FP16)
        mixed = self._cast(self._attention(normed, layer), self._wide)
        if sandwich:
            mixed = self._norm(mixed, f"{prefix}post_attention_layernorm.weight")
        x = self._like("add", f"{name}attended", x, y=mixed)
        before = "pre_feedforward" if sandwich else "post_attention"
        normed = self._cast(self._norm(x, f"{prefix}{before}_layernorm.weight"), FP16)
        mixed = self._cast(self._mlp(normed, prefix), self._wide)
        if sandwich:
            mixed = self._norm(mixed, f"{prefix}post_feedforward_layernorm.weight")
        return self._like("add", f"{name}output", x, y=mixed)

    def _mlp(self, x: str, prefix: str) -> str:
        name = constant_name(prefix)
        gate = self._linear(x, f"{prefix}mlp.gate_proj")
        if self._decoder.gelu:
            mode = self._builder.text(f"{name}mlp_mode", "TANH_APPROXIMATION")
            gate = self._like("gelu", f"{name}mlp_act", gate, mode=mode)
        else:
            gate = self._like("silu", f"{name}mlp_act", gate)
        up = self._linear(x, f"{prefix}mlp.up_proj")
        return self._linear(self._like("mul", f"{name}mlp_product", gate, y=up), f"{prefix}mlp.down_proj")

    def _norm(self, x: str, tensor: str) -> str:
        """Return x divided by the root mean square of its last dimension, times a weight."""
        name = constant_name(tensor)
        type, shape = self._values[x]
        size = shape[-1]
        assert size is not None
        negative = self._like("mul", f"{name}_negative", x, y=self._minus)
        both = self._concat(f"{name}_both", [x, negative], self._last, (*shape[:-1], 2 * size), type)
        both = self._like("layer_norm", f"{name}_normed", both, axes=self._last_axes, epsilon=self._eps)
        first, _ = self._halves(both, [f"{name}_first", f"{name}_second"])
        weight = self._cast(self._weight(tensor), type)
        if self._decoder.norm_offset:
            weight = self._like("add", f"{name}_plus_one", weight, y=self._unit)
        return self._like("mul", f"{name}_out", first, y=weight)

    def _attention(self, x: str, layer: int) -> str:
        """Return the output of attention over the cache.

        The query heads that share a key head are the first dimension of the intermediate results.
        """
        decoder = self._decoder
        prefix = f"model.layers.{layer}.self_attn."
        name = constant_name(prefix)
        keys = decoder.kv_heads
        group = decoder.heads // keys
        dim = decoder.head_dim
        query = self._rotated(self._heads(x, f"{prefix}q", group), f"{name}q", layer)
        query = self._like("mul", f"{name}q_scaled", query, y=self._number(f"{name}scale", decoder.score_scale))
        key = self._cached(self._rotated(self._heads(x, f"{prefix}k", 1), f"{name}k", layer), KEYS, layer)
        value = self._cached(self._heads(x, f"{prefix}v", 1), VALUES, layer)
        scores = self._matmul(f"{name}scores", query, key, (group, keys, None, None), transpose=True)
        if decoder.score_cap is not None:
            scores = self._capped(scores, decoder.score_cap, f"{name}scores_capped")
        mask = SLIDING_MASK if self._sliding[layer] else MASK
        scores = self._like("add", f"{name}masked", scores, y=mask)
        weights = self._like("softmax", f"{name}weights", scores, axis=self._last)
        mixed = self._matmul(f"{name}mixed", weights, value, (group, keys, None, dim), transpose=False)
        mixed = self._transpose(f"{name}mixed_by_token", mixed)
        return self._linear(self._reshape(f"{name}flat", mixed, (1, -1, decoder.heads * dim)), f"{prefix}o_proj")

    def _heads(self, x: str, prefix: str, group: int) -> str:
        """Return a projection as [group, key heads, tokens, channels], normed if the family does so."""
        decoder = self._decoder
        name = constant_name(prefix)
        x = self._linear(x, f"{prefix}_proj")
        x = self._reshape(f"{name}_heads", x, (-1, decoder.kv_heads, group, decoder.head_dim))
        norm = f"{prefix}_norm.weight"
        if norm in self._sizes:
            x = self._cast(self._norm(self._cast(x, self._wide), norm), FP16)
        return self._transpose(f"{name}_by_head", x)

    def _rotated(self, x: str, name: str, layer: int) -> str:
        """Return x with pairs of channels, one from each half, rotated by the angles of their positions."""
        low, high = self._halves(x, [f"{name}_low", f"{name}_high"])
        cos, sin = self._tables[self._decoder.sliding[layer]]
        low_cos = self._like("mul", f"{name}_low_cos", low, y=cos)
        high_sin = self._like("mul", f"{name}_high_sin", high, y=sin)
        high_cos = self._like("mul", f"{name}_high_cos", high, y=cos)
        low_sin = self._like("mul", f"{name}_low_sin", low, y=sin)
        low = self._like("sub", f"{name}_turned_low", low_cos, y=high_sin)
        high = self._like("add", f"{name}_turned_high", high_cos, y=low_sin)
        return self._concat(f"{name}_turned", [low, high], self._last, self._values[x][1], FP16)

    def _cached(self, x: str, state: str, layer: int) -> str:
        """Store a layer's new keys or values in a state; return all of them, [1, key heads, total, channels]."""
        decoder = self._decoder
        name = f"{state}_{layer}"
        sizes = (1, decoder.kv_heads, self._context, decoder.head_dim)
        full = (decoder.layers, *sizes)
        if state not in self._caches:
            self._caches[state] = self._add("read_state", f"{state}_before", {"input": state}, full)
        new = {"x": x, "axes": self._integers(f"{name}_axes", [0])}
        inputs = {
            "x": self._caches[state],
            "update": self._add("expand_dims", f"{name}_new", new, (1, *self._values[x][1])),
            "begin": self._vector(f"{name}_begin", [layer, 0, 0], self._past, [0]),
            "end": self._vector(f"{name}_end", [layer + 1, 1, decoder.kv_heads], self._total, [decoder.head_dim]),
            "stride": self._integers(f"{name}_stride", [1] * 5),
        }
        masks = ("begin_mask", "end_mask", "squeeze_mask")
        inputs |= {key: self._builder.flags(f"{name}_{key}", [False] * 5) for key in masks}
        updated = self._add("slice_update", f"{name}_updated", inputs, full)
        self._builder.write_state(f"{name}_write", state, updated)
        # Passes of coremltools assume one chain: no state is read that an earlier layer has not just written.
        self._caches[state] = self._add("read_state", f"{name}_after", {"input": state}, full)
        inputs = {
            "x": self._caches[state],
            "begin": self._integers(f"{name}_layer_begin", [layer, 0, 0, 0, 0]),
            "end": self._integers(f"{name}_layer_end", [layer + 1, *sizes]),
            "end_mask": self._builder.flags(f"{name}_layer_end_mask", [False, True, True, True, True]),
            "squeeze_mask": self._builder.flags(f"{name}_layer_squeeze_mask", [True, False, False, False, False]),
        }
        layer_cache = self._add("slice_by_index", f"{name}_layer", inputs, sizes)
        inputs = {
            "x": layer_cache,
            "begin": self._integers(f"{name}_used_begin", [0] * 4),
            "end": self._cache_end,
            "end_mask": self._builder.flags(f"{name}_used_end_mask", [True, True, False, True]),
        }
        return self._add("slice_by_index", f"{name}_used", inputs, (*sizes[:2], None, decoder.head_dim))

    def _capped(self, x: str, limit: float, name: str) -> str:
        """Return limit * tanh(x / limit)."""
        x = self._like("mul", f"{name}_ratio", x, y=self._number(f"{name}_inverse", 1 / limit))
        x = self._like("tanh", f"{name}_tanh", x)
        return self._like("mul", name, x, y=self._number(f"{name}_limit", limit))

    def _matmul(self, name: str, x: str, y: str, shape: FlexibleShape, *, transpose: bool) -> str:
        inputs = {"x": x, "y": y, "transpose_x": self._false, "transpose_y": self._true if transpose else self._false}
        return self._add("matmul", name, inputs, shape)
