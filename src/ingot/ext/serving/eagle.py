"""Run EAGLE-3 draft heads, which propose tokens for a larger model, the target.

A head has few decoder layers. Its features are the inputs of three layers of the target.

The computation is the same as in the published code (``SafeAILab/EAGLE``, ``model/cnets.py``) and in vLLM's
``llama_eagle3.py``. ``spec/attachments.md`` has the formulas.

Importing this module needs torch (``core.border.require`` names the extra); no module imports it at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ingot.artifacts.draft_head import DraftShape, check_draft
from ingot.core.border import require
from ingot.errors import FormatError
from ingot.model.draft_head_names import IN_DRAFT, TO_TARGET
from ingot.model.tensor import Tensor

_Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Settings of a draft head that cannot be derived from its tensors.

    Parameters
    ----------
    head_dim : int
    eps : float
        Epsilon of the norms.
    residual_after_norm : bool
        Whether the residual is taken after ``hidden_norm`` (vLLM's ``norm_before_residual``).
    features : three ints
        Indices of the target's layers whose inputs are the features; the first layer is 0.
    rotary : LlamaConfig
        A config of transformers with the rotary embedding.
    activation : callable
    """

    head_dim: int
    eps: float
    residual_after_norm: bool
    features: tuple[int, ...]
    rotary: Any
    activation: Callable[[torch.Tensor], torch.Tensor]


def head_config(shape: DraftShape, target: Any, head_values: Mapping[str, Any]) -> HeadConfig:
    """Return the settings of a head from its ``config.json``; if there is none, from the config of its target.

    Parameters
    ----------
    shape : DraftShape
    target : config of transformers
        The config of the model for which the head proposes tokens.
    head_values : mapping
        The head's ``config.json``; empty if there is none.

    Raises
    ------
    FormatError
        ``draft.heads``: widths are not a multiple of the head width; ``draft.config``: transformers refuses values.
    """
    values = dict(head_values) if head_values else target.to_dict()
    heads = values.get("num_attention_heads")
    head_dim = values.get("head_dim") or (
        (shape.attention // heads if head_values else values["hidden_size"] // heads)
        if isinstance(heads, int) and heads
        else 0
    )
    if not isinstance(head_dim, int) or head_dim < 2 or shape.attention % head_dim or shape.kv % head_dim:
        raise FormatError(
            "draft.heads",
            f"expected queries and keys in heads of {head_dim}, found widths {shape.attention} and {shape.kv}",
        )
    if (shape.attention // head_dim) % (shape.kv // head_dim):
        raise FormatError(
            "draft.heads",
            f"expected a multiple of the key heads, found {shape.attention // head_dim} query heads and "
            f"{shape.kv // head_dim} key heads",
        )
    transformers = require("transformers", "transformers")
    fields = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    rope = {key: values[key] for key in fields if values.get(key) is not None}
    try:
        rotary = transformers.LlamaConfig(hidden_size=shape.attention, num_attention_heads=1, head_dim=head_dim, **rope)
        eps = float(values.get("rms_norm_eps", 1e-6))
        activation = require("transformers.activations", "transformers").ACT2FN[values.get("hidden_act", "silu")]
    except Exception as error:  # validators of configs raise various errors
        raise FormatError("draft.config", f"transformers refuses it: {type(error).__name__}: {error}") from error
    feature_layers = (
        (head_values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") if head_values else None
    )
    return HeadConfig(
        head_dim,
        eps,
        bool(head_values.get("norm_before_residual")),
        _features(feature_layers, target.num_hidden_layers),
        rotary,
        activation,
    )


def _features(feature_layers: Any, layers: int) -> tuple[int, ...]:
    """Return the indices of the target's layers whose inputs are the features of a draft head.

    They are ``feature_layers`` if it is a list of three. By default they are 2, half the number of layers, and the
    number of layers minus 3.
    """
    chosen = tuple(feature_layers) if isinstance(feature_layers, list | tuple) else (2, layers // 2, layers - 3)
    if len(chosen) != 3 or any(type(layer) is not int for layer in chosen):
        raise FormatError("draft.config", f"expected three layers for features, found {chosen!r}")
    return tuple(min(max(layer, 0), layers - 1) for layer in chosen)


class DraftHead:
    """A draft head for a target model. It proposes the likeliest token, then the likeliest token after it, and so on.

    Parameters
    ----------
    tensors : mapping
        Tensors as ``check_draft`` accepts them.
    model : a causal language model of transformers
        The target; its embeddings are used if the head has none.
    head_values : mapping, optional
        The head's ``config.json``.

    Raises
    ------
    FormatError
        Errors of ``check_draft`` and ``head_config``; ``draft.target``: the sizes do not fit the target.
    """

    def __init__(self, tensors: Mapping[str, Tensor], model: Any, head_values: Mapping[str, Any] | None = None) -> None:
        self.shape = check_draft(tensors)
        target = model.config.get_text_config()
        self._require_target(target)
        self.config = head_config(self.shape, target, head_values or {})
        dtype = model.dtype
        device = model.device
        self.features = self.config.features
        self._weights = {
            name: tensor.torch(device=device) if name in (TO_TARGET, IN_DRAFT) else tensor.torch(dtype, device)
            for name, tensor in tensors.items()
        }
        table = self._weights.get("embed_tokens.weight")
        self._embed = model.get_input_embeddings() if table is None else lambda ids: functional.embedding(ids, table)
        llama = require("transformers.models.llama.modeling_llama", "transformers")
        self._rotary = llama.LlamaRotaryEmbedding(self.config.rotary).to(device)
        middle = any(name.startswith("midlayer.") for name in self._weights)
        self._layers = [
            _Layer(self._weights, "midlayer." if middle else f"layers.{index}.", self.config, first=not index)
            for index in range(self.shape.layers)
        ]
        self.length = 0
        self._hidden: torch.Tensor | None = None

    def extend(self, features: torch.Tensor, ids: Sequence[int]) -> None:
        """Append n positions: their features from the target, [1, n, 3 * target width], and the token after each
        position.
        """
        hidden = self._linear("fc", features)
        self._hidden = self._run(self._tokens(ids, features.device), hidden)[:, -1:]
        self.length += len(ids)

    def propose(self, count: int) -> list[int]:
        """Return ``count`` tokens; each is the likeliest token after the tokens before it."""
        assert self._hidden is not None
        proposed: list[int] = []
        hidden = self._hidden
        length = self.length
        for step in range(count):
            scores = self._linear("lm_head", _norm(hidden, self._weights["norm.weight"], self.config.eps))
            token = int(scores[0, -1].argmax())
            if self.shape.mapped:
                token += int(self._weights[TO_TARGET][token])
            proposed.append(token)
            if step + 1 < count:
                hidden = self._run(self._tokens([token], hidden.device), hidden)
                self.length += 1
        self._forget(self.length - length)
        return proposed

    def _forget(self, count: int) -> None:
        """Remove the ``count`` latest positions, because their features were computed by the head and not by the
        target.
        """
        self.length -= count
        for layer in self._layers:
            layer.crop(self.length)

    def _run(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        count = hidden.shape[1]
        positions = torch.arange(self.length, self.length + count, device=hidden.device)[None]
        rotation = self._rotary(hidden, positions)
        for layer in self._layers:
            hidden = layer(embedded, hidden, rotation)
        return hidden

    def _tokens(self, ids: Sequence[int], device: Any) -> torch.Tensor:
        embedded: torch.Tensor = self._embed(torch.tensor([list(ids)], device=device))
        return embedded

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _require_target(self, target: Any) -> None:
        shape = self.shape
        width = target.hidden_size if shape.embedded else shape.hidden
        sizes = (shape.target_hidden, shape.vocab, width)
        target_sizes = (target.hidden_size, target.vocab_size, target.hidden_size)
        if sizes != target_sizes:
            raise FormatError(
                "draft.target",
                f"expected a head for hidden size {target_sizes[0]}, vocabulary {target_sizes[1]} and "
                f"embeddings of {target_sizes[2]}, found {sizes[0]}, {sizes[1]} and {sizes[2]}",
            )


class _Layer:
    """A decoder layer of a draft head, and the keys and values of earlier positions."""

    def __init__(self, weights: _Values, start: str, config: HeadConfig, *, first: bool) -> None:
        self._weights = weights
        self._start = start
        self._config = config
        hidden = weights[f"{start}self_attn.o_proj.weight"].shape[0]
        self._both = first or weights[f"{start}self_attn.q_proj.weight"].shape[1] == 2 * hidden
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def crop(self, length: int) -> None:
        if self._keys is not None and self._values is not None:
            self._keys = self._keys[:, :, :length]
            self._values = self._values[:, :, :length]

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor, rotation: Any) -> torch.Tensor:
        normed = self._norm("hidden_norm" if self._both else "input_layernorm", hidden)
        residual = normed if self._both and self._config.residual_after_norm else hidden
        inputs = torch.cat((self._norm("input_layernorm", embedded), normed), -1) if self._both else normed
        hidden = residual + self._attend(inputs, rotation)
        normed = self._norm("post_attention_layernorm", hidden)
        gate = self._config.activation(self._linear("mlp.gate_proj", normed))
        return hidden + self._linear("mlp.down_proj", gate * self._linear("mlp.up_proj", normed))

    def _attend(self, inputs: torch.Tensor, rotation: Any) -> torch.Tensor:
        query, key, value = (self._heads(self._linear(f"self_attn.{name}_proj", inputs)) for name in "qkv")
        query = _rotated(query, *rotation)
        key = _rotated(key, *rotation)
        past = 0
        if self._keys is not None and self._values is not None:
            past = self._keys.shape[2]
            key = torch.cat((self._keys, key), 2)
            value = torch.cat((self._values, value), 2)
        self._keys = key
        self._values = value
        count = query.shape[2]
        mask = torch.ones(count, past + count, dtype=torch.bool, device=query.device).tril(past) if count > 1 else None
        attended = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return self._linear("self_attn.o_proj", attended.transpose(1, 2).flatten(2))

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(*values.shape[:-1], -1, self._config.head_dim).transpose(1, 2)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        name = f"{self._start}{name}"
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights.get(f"{self._start}{name}.weight")
        return x if weight is None else _norm(x, weight, self._config.eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return Llama's RMS norm: x divided by its root mean square in f32, rounded to its dtype, then multiplied by
    ``weight``.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
