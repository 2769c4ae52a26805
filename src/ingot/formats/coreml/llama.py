"""A Llama as an ML program that computes logits for every position of a window.

All weights are tensors (``spec/coreml.md``).

The arithmetic is that of ``ingot.demo.llama`` in fp16, without squares, which could overflow: the root mean square of x
is the standard deviation of [x, -x], whose mean is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.formats.coreml.build import FP16, INT32, Builder, Feature
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.types import BOOL
from ingot.naming.config import LlamaConfig

INPUT = "input_ids"
OUTPUT = "logits"
_MASKED = 30000.0  # below every score; in fp16, and exp(-30000) is 0


def constant_name(tensor: str) -> str:
    """Return the name of a tensor's constant, an identifier as converters create it."""
    return tensor.replace(".", "_")


def llama_template(config: LlamaConfig, context: int, opset: str) -> Template:
    """Return the package of a model that computes logits for ``context`` tokens; its weights have undefined values."""
    return _Llama(config, context, opset).template()


class _Llama:
    def __init__(self, config: LlamaConfig, context: int, opset: str) -> None:
        self._config = config
        self._context = context
        self._builder = Builder(opset)
        self._opset = opset
        self._shapes = config.shapes()
        self._axes = {index: self._builder.constant(f"axis_{index}", np.int32(index)) for index in range(4)}
        self._false, self._true = self._builder.flag("no", False), self._builder.flag("yes", True)
        self._eps = self._builder.constant("eps", np.float16(config.eps))
        self._last = self._builder.constant("last_axis", np.array([2], np.int32))
        self._two = self._builder.constant("two", np.int32(2))

    def template(self) -> Template:
        """Return the package of the program."""
        config = self._config
        builder = self._builder
        tokens = (1, self._context)
        embedding = self._weight("model.embed_tokens.weight")
        inputs = {"x": embedding, "indices": INPUT, "axis": self._axes[0], "batch_dims": self._axes[0]}
        if self._opset != "iOS16":
            inputs["validate_indices"] = self._false
        x = builder.add("gather", "embedded", inputs, (*tokens, config.hidden_size))
        self._cos, self._sin = self._turns()
        self._mask = self._future()
        for layer in range(config.layers):
            x = self._layer(x, f"model.layers.{layer}.")
        x = self._norm(x, "model.norm.weight")
        head = embedding if config.tied_head else self._weight("lm_head.weight")
        shape = (*tokens, config.vocab_size)
        builder.add("linear", OUTPUT, {"x": x, "weight": head}, shape)
        return builder.template([Feature(INPUT, INT32, tokens)], [Feature(OUTPUT, FP16, shape)])

    def _weight(self, tensor: str) -> str:
        return self._builder.weight(constant_name(tensor), self._shapes[tensor])

    def _shape(self, name: str, shape: Sequence[int]) -> str:
        return self._builder.constant(name, np.array(shape, np.int32))

    def _turns(self) -> tuple[str, str]:
        """Return cosines and sines of the rotary positions, [context, head_dim / 2]; angles are computed in f64."""
        config = self._config
        frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
        angle = np.outer(np.arange(self._context, dtype=np.float64), frequency)
        cos = np.cos(angle).astype(np.float16)
        sin = np.sin(angle).astype(np.float16)
        return self._builder.constant("rope_cos", cos), self._builder.constant("rope_sin", sin)

    def _future(self) -> str:
        """Return the attention mask, [context, context]: 0 for visible positions, else a large negative number."""
        builder = self._builder
        square = (self._context, self._context)
        positions = np.arange(self._context, dtype=np.int32)
        rows = builder.constant("rows", positions[:, None])
        cols = builder.constant("columns", positions[None, :])
        visible = builder.add("greater_equal", "seen", {"x": rows, "y": cols}, square, BOOL)
        one_constant = builder.constant("one", np.float16(1))
        visible = builder.add("cast", "seen_fp16", {"x": visible, "dtype": builder.text("fp16", "fp16")}, square)
        hidden = builder.add("sub", "hidden", {"x": visible, "y": one_constant}, square)
        far = builder.constant("far_below", np.float16(_MASKED))
        return builder.add("mul", "mask", {"x": hidden, "y": far}, square)

    def _layer(self, x: str, prefix: str) -> str:
        config = self._config
        flat = (1, self._context, self._config.hidden_size)
        name = constant_name(prefix)
        normed = self._norm(x, f"{prefix}input_layernorm.weight")
        mixed = self._attention(normed, f"{prefix}self_attn.")
        x = self._builder.add("add", f"{name}attended", {"x": x, "y": mixed}, flat)
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        inner = (*flat[:2], config.intermediate_size)
        gate = self._linear(normed, f"{prefix}mlp.gate_proj.weight")
        gate = self._builder.add("silu", f"{name}mlp_act", {"x": gate}, inner)
        up = self._linear(normed, f"{prefix}mlp.up_proj.weight")
        product = self._builder.add("mul", f"{name}mlp_product", {"x": gate, "y": up}, inner)
        down = self._linear(product, f"{prefix}mlp.down_proj.weight")
        return self._builder.add("add", f"{name}output", {"x": x, "y": down}, flat)

    def _linear(self, x: str, tensor: str) -> str:
        weight = self._weight(tensor)
        shape = (1, self._context, self._shapes[tensor][0])
        return self._builder.add("linear", f"{weight}_out", {"x": x, "weight": weight}, shape)

    def _norm(self, x: str, tensor: str) -> str:
        """Return x divided by its root mean square, times a weight."""
        builder = self._builder
        name = constant_name(tensor)
        flat = (1, self._context, self._config.hidden_size)
        double = (*flat[:2], 2 * flat[2])
        minus = builder.constant(f"{name}_minus", np.float16(-1))
        negative = builder.add("mul", f"{name}_negative", {"x": x, "y": minus}, flat)
        both = self._concat(f"{name}_both", [x, negative], self._axes[2], double)
        inputs = {"x": both, "axes": self._last, "epsilon": self._eps}
        both = builder.add("layer_norm", f"{name}_normed", inputs, double)
        halves = [f"{name}_first", f"{name}_second"]
        inputs = {"x": both, "num_splits": self._two, "axis": self._axes[2]}
        first = builder.several("split", halves, inputs, [flat, flat])[0]
        return builder.add("mul", f"{name}_out", {"x": first, "y": self._weight(tensor)}, flat)

    def _concat(self, name: str, values: Sequence[str], axis: str, shape: tuple[int, ...]) -> str:
        inputs: Mapping[str, str | Sequence[str]] = {"values": values, "axis": axis, "interleave": self._false}
        return self._builder.add("concat", name, inputs, shape)

    def _attention(self, x: str, prefix: str) -> str:
        """Return attention as ``demo.llama.attention`` does; query heads that share a key are multiplied together."""
        config = self._config
        builder = self._builder
        seq = self._context
        name = constant_name(prefix)
        heads = config.heads
        keys = config.kv_heads
        dim = config.head_dim
        scale = builder.constant(f"{name}scale", np.float16(dim**-0.5))
        q = self._rotated(
            self._split_heads(self._linear(x, f"{prefix}q_proj.weight"), f"{name}q", heads), f"{name}q", heads
        )
        q = builder.add("mul", f"{name}q_scaled", {"x": q, "y": scale}, (1, heads, seq, dim))
        k = self._rotated(
            self._split_heads(self._linear(x, f"{prefix}k_proj.weight"), f"{name}k", keys), f"{name}k", keys
        )
        v = self._split_heads(self._linear(x, f"{prefix}v_proj.weight"), f"{name}v", keys)
        rows = heads // keys * seq
        q = self._reshape(f"{name}q_rows", q, (1, keys, rows, dim))
        scores = self._matmul(f"{name}scores", q, k, (1, keys, rows, seq), turned=True)
        scores = self._reshape(f"{name}scores_heads", scores, (1, heads, seq, seq))
        scores = builder.add("add", f"{name}masked", {"x": scores, "y": self._mask}, (1, heads, seq, seq))
        weights = builder.add("softmax", f"{name}weights", {"x": scores, "axis": self._axes[3]}, (1, heads, seq, seq))
        weights = self._reshape(f"{name}weights_rows", weights, (1, keys, rows, seq))
        mixed = self._matmul(f"{name}mixed", weights, v, (1, keys, rows, dim), turned=False)
        mixed = self._reshape(f"{name}mixed_heads", mixed, (1, heads, seq, dim))
        mixed = self._transpose(f"{name}joined", mixed, (1, seq, heads, dim))
        return self._linear(self._reshape(f"{name}flat", mixed, (1, seq, heads * dim)), f"{prefix}o_proj.weight")

    def _split_heads(self, x: str, name: str, heads: int) -> str:
        dim = self._config.head_dim
        x = self._reshape(f"{name}_heads", x, (1, self._context, heads, dim))
        return self._transpose(f"{name}_by_head", x, (1, heads, self._context, dim))

    def _rotated(self, x: str, name: str, heads: int) -> str:
        """Rotate pairs of channels, one from each half, by the angles of their positions."""
        builder = self._builder
        half = (1, heads, self._context, self._config.head_dim // 2)
        inputs = {"x": x, "num_splits": self._two, "axis": self._axes[3]}
        first, second = builder.several("split", [f"{name}_low", f"{name}_high"], inputs, [half, half])
        products = {}
        for key, value, table in (
            ("low_cos", first, self._cos),
            ("high_sin", second, self._sin),
            ("high_cos", second, self._cos),
            ("low_sin", first, self._sin),
        ):
            products[key] = builder.add("mul", f"{name}_{key}", {"x": value, "y": table}, half)
        low = builder.add("sub", f"{name}_turned_low", {"x": products["low_cos"], "y": products["high_sin"]}, half)
        high = builder.add("add", f"{name}_turned_high", {"x": products["high_cos"], "y": products["low_sin"]}, half)
        return self._concat(f"{name}_turned", [low, high], self._axes[3], (*half[:3], self._config.head_dim))

    def _reshape(self, name: str, x: str, shape: tuple[int, ...]) -> str:
        return self._builder.add("reshape", name, {"x": x, "shape": self._shape(f"{name}_shape", shape)}, shape)

    def _transpose(self, name: str, x: str, shape: tuple[int, ...]) -> str:
        """Exchange heads and positions; ``shape`` is that of the result."""
        return self._builder.add("transpose", name, {"x": x, "perm": self._shape(f"{name}_perm", (0, 2, 1, 3))}, shape)

    def _matmul(self, name: str, x: str, y: str, shape: tuple[int, ...], *, turned: bool) -> str:
        inputs = {
            "x": x,
            "y": y,
            "transpose_x": self._false,
            "transpose_y": self._true if turned else self._false,
        }
        return self._builder.add("matmul", name, inputs, shape)
