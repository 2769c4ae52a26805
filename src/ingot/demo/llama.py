"""The forward pass of Llama in NumPy, which measures the effect of compression on a model.

The architecture is that of Touvron et al., "LLaMA: Open and Efficient
Foundation Language Models" (2023), with grouped-query attention (Ainslie et
al., 2023).  Parameter names, the configuration's keys and the "rotate half"
layout of rotary positions are those of Hugging Face's ``LlamaForCausalLM``.
There is no cache of keys and values: this code scores text, all positions of
a window at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import UsageError
from ingot.naming.config import LlamaConfig

Floats = NDArray[np.float32]

# Windows scored in one pass: enough rows to keep matrix products efficient,
# few enough for the attention scores to stay in a processor's cache.
_BATCH = 4


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return ``x`` divided by its root mean square over the last axis, multiplied by ``weight``.

    Parameters
    ----------
    x : float32 array ``[..., hidden]``
    weight : float32 array ``[hidden]``
    eps : float
        Added to the mean of squares (Zhang and Sennrich, 2019).
    """
    mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    out: Floats = x * (weight / np.sqrt(mean + np.float32(eps)))
    return out


def rope_tables(seq: int, head_dim: int, theta: float) -> tuple[Floats, Floats]:
    """Return cosines and sines of rotary positions (Su et al., 2021).

    Returns
    -------
    cos, sin : float32 arrays ``[seq, head_dim // 2]``
        Computed in float64, as angles of late positions are large.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = np.outer(np.arange(seq, dtype=np.float64), frequency)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Apply rotary positions in the "rotate half" layout.

    Channel ``i`` of the first half and channel ``i`` of the second half form the pair that is rotated by angle ``i``.

    Parameters
    ----------
    x : float32 array ``[..., seq, head_dim]``
    cos, sin : float32 arrays ``[seq, head_dim // 2]``
    """
    half = x.shape[-1] // 2
    first = x[..., :half]
    second = x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Return causal scaled dot-product attention; several query heads share a key head and a value head.

    Parameters
    ----------
    q : float32 array ``[batch, heads, seq, head_dim]``
    k, v : float32 arrays ``[batch, kv_heads, seq, head_dim]``
        Query head ``h`` reads key head ``h // (heads // kv_heads)``.

    Returns
    -------
    float32 array ``[batch, heads, seq, head_dim]``
    """
    batch, heads, seq, dim = q.shape
    kv_heads = k.shape[1]
    # Rows of all query heads that share a key head go through one product.
    rows = (q * np.float32(dim**-0.5)).reshape(batch, kv_heads, -1, dim)
    scores = (rows @ k.swapaxes(-1, -2)).reshape(batch, heads, seq, seq)
    future = np.triu(np.ones((seq, seq), dtype=np.bool_), 1)
    np.putmask(scores, np.broadcast_to(future, scores.shape), np.float32(-np.inf))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    mixed = scores.reshape(batch, kv_heads, -1, seq) @ v
    out: Floats = mixed.reshape(batch, heads, seq, dim) / total
    return out


def silu(x: Floats) -> Floats:
    """Return ``x * sigmoid(x)``, with no overflow for large negative ``x``."""
    # tanh never overflows: sigmoid(x) = (1 + tanh(x / 2)) / 2.
    half = x * np.float32(0.5)
    out: Floats = half + half * np.tanh(half)
    return out


class Llama:
    """A Llama model whose forward pass runs in float32 NumPy.

    Parameters
    ----------
    config : mapping
        A Hugging Face ``config.json`` as parsed (see `LlamaConfig`).
    weights : mapping of str to array
        Parameters under their Hugging Face names, of any floating-point
        dtype including ``ml_dtypes.bfloat16``; converted to float32 here.
        Other names are ignored.

    Raises
    ------
    UsageError, UnsupportedError
        If the configuration is invalid or not supported, or a parameter is missing or has the wrong shape.
    """

    def __init__(self, config: Mapping[str, object], weights: Mapping[str, NDArray[Any]]) -> None:
        self.config = LlamaConfig.from_mapping(config)
        self._weights: dict[str, Floats] = {}
        for name, shape in self.config.shapes().items():
            if name not in weights:
                raise UsageError(f"the weights lack {name}")
            if weights[name].shape != shape:
                raise UsageError(f"{name} has shape {weights[name].shape}, expected {shape}")
            self._weights[name] = np.ascontiguousarray(weights[name], dtype=np.float32)

    def logits(self, tokens: NDArray[np.integer[Any]]) -> Floats:
        """Return the logits of the next token at every position.

        Parameters
        ----------
        tokens : integer array ``[batch, seq]``
            Ids below ``vocab_size``; ``seq`` at most the model's context.

        Returns
        -------
        float32 array ``[batch, seq, vocab_size]``
            Row ``[b, t]`` depends on ``tokens[b, : t + 1]`` only.

        Raises
        ------
        UsageError
            If ``tokens`` has a wrong shape, dtype or value.
        """
        config = self.config
        weights = self._weights
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise UsageError("tokens must be a 2-D integer array")
        seq = tokens.shape[1]
        if not 0 < seq <= config.context:
            raise UsageError(f"{seq} positions are outside 1..{config.context}")
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < config.vocab_size):
            raise UsageError(f"token ids must be in 0..{config.vocab_size - 1}")
        cos, sin = rope_tables(seq, config.head_dim, config.rope_theta)
        x = weights["model.embed_tokens.weight"][tokens]
        for index in range(config.layers):
            layer = f"model.layers.{index}"
            normed = self._norm(x, f"{layer}.input_layernorm")
            x = x + self._attend(normed, f"{layer}.self_attn", cos, sin)
            normed = self._norm(x, f"{layer}.post_attention_layernorm")
            x = x + self._feed_forward(normed, f"{layer}.mlp")
        head = "model.embed_tokens" if config.tied_head else "lm_head"
        return self._linear(self._norm(x, "model.norm"), head)

    def _norm(self, x: Floats, name: str) -> Floats:
        """Apply the RMSNorm with the name ``name``."""
        return rms_norm(x, self._weights[f"{name}.weight"], self.config.eps)

    def _linear(self, x: Floats, name: str) -> Floats:
        """Multiply ``[batch, seq, in]`` by the ``[out, in]`` weight with the name ``name``."""
        weight = self._weights[f"{name}.weight"]
        # One product over all rows; with three axes NumPy would do one per batch entry.
        flat: Floats = x.reshape(-1, x.shape[-1]) @ weight.T
        return flat.reshape(*x.shape[:-1], weight.shape[0])

    def _attend(self, x: Floats, name: str, cos: Floats, sin: Floats) -> Floats:
        """Apply the attention layer with the name ``name`` to ``[batch, seq, hidden]``."""
        batch, seq, _ = x.shape
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").reshape(batch, seq, -1, self.config.head_dim).swapaxes(1, 2)
            for part in "qkv"
        )
        mixed = attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self._linear(mixed.swapaxes(1, 2).reshape(batch, seq, -1), f"{name}.o_proj")

    def _feed_forward(self, x: Floats, name: str) -> Floats:
        """Apply the SwiGLU layer (Shazeer, 2020) with the name ``name``."""
        gate = silu(self._linear(x, f"{name}.gate_proj"))
        gate *= self._linear(x, f"{name}.up_proj")
        return self._linear(gate, f"{name}.down_proj")


def select_windows(tokens: NDArray[np.integer[Any]], window: int, max_windows: int | None) -> NDArray[np.integer[Any]]:
    """Cut ``tokens`` into windows of inputs and their next tokens.

    Parameters
    ----------
    tokens : integer array ``[length]``
    window : int
        Predictions per window.
    max_windows : int or None
        The maximum number of windows; if the text has more, this number of windows is selected, spread evenly over the
        text.

    Returns
    -------
    integer array ``[windows, window + 1]``
        Row ``w`` starts where another row's predictions end, so that no
        token is predicted twice.

    Raises
    ------
    UsageError
        If ``tokens`` do not fill one window.
    """
    if tokens.ndim != 1:
        raise UsageError("tokens must be a 1-D array")
    if window < 1 or (max_windows is not None and max_windows < 1):
        raise UsageError("window and max_windows must be positive")
    count = (len(tokens) - 1) // window
    if count < 1:
        raise UsageError(f"{len(tokens)} tokens do not fill a window of {window}")
    selected = count if max_windows is None else min(count, max_windows)
    starts = np.arange(selected) * count // selected * window
    chosen: NDArray[np.integer[Any]] = tokens[starts[:, None] + np.arange(window + 1)]
    return chosen


def perplexity(
    model: Llama,
    tokens: NDArray[np.integer[Any]],
    window: int = 256,
    max_windows: int | None = 64,
) -> float:
    """Return ``exp`` of the mean next-token loss over windows of a text.

    Parameters
    ----------
    model : Llama
    tokens : integer array ``[length]``
        The encoded text.
    window : int
        Predictions per window; each window starts with no context.
    max_windows : int or None
        See `select_windows`.

    Returns
    -------
    float
        At least 1; infinity when the mean loss is too large for a float, and
        NaN when the model's logits are not finite.
    """
    rows = select_windows(tokens, window, max_windows)
    total = 0.0
    # Logits of broken weights may be infinite; the result says so, without warnings.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            total += _loss_sum(model.logits(part[:, :-1]), part[:, 1:])
    mean = total / (len(rows) * window)
    # The loss of damaged weights may be too large for math.exp, which raises an error then.
    return math.exp(mean) if not mean > 700 else math.inf


def _loss_sum(logits: Floats, targets: NDArray[np.integer[Any]]) -> float:
    """Return the summed cross-entropy of ``[batch, seq, vocab]`` logits, in nats."""
    target = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    peak = logits.max(axis=-1)
    total = np.exp(logits - peak[..., None]).sum(axis=-1)
    return float((np.log(total) + peak - target).sum(dtype=np.float64))
