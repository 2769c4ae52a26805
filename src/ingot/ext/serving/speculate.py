"""Speculative decoding: a drafter proposes tokens, and one pass of the model verifies them.

The text is the same as without a drafter. An ordinary pass over several tokens does not ensure this: libraries sum in
another order for several rows. So another token can win if two tokens are nearly equally likely. Here each row has the
bits of a pass over one token (``RowByRow``). Operations that this machine computes differently for several rows are
computed row by row. The first pass over several tokens is compared with passes over one token, bit by bit.

Importing this module needs torch (``core.border.require`` names the extra); no module imports it at its top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ingot.errors import UnsupportedError
from ingot.ext.serving.eagle import DraftHead
from ingot.runtime.layers.decoder_layers import InNativeCalls
from ingot.runtime.layers.packed_linear import PackedWeight, rows_alone

# Elements of a vector, of torch's work per thread, of the largest layer to probe.
_VECTOR = 64
_GRAIN = 1 << 15
_LARGEST = 1 << 28
_TRIES = 8
_PRODUCTS = tuple(
    getattr(torch, name) for name in ("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "mv", "addbmm", "tensordot")
)
_POINTWISE = (functional.silu, functional.gelu, torch.sigmoid, torch.tanh, torch.exp)


class Drafter(Protocol):
    """A model that proposes tokens, such as a draft head.

    ``features`` are the indices of the target's layers whose inputs the drafter gets.
    """

    features: tuple[int, ...]

    def extend(self, features: torch.Tensor, ids: Sequence[int]) -> None:
        """Append n positions: their features [1, n, all features], and the token that follows each."""

    def propose(self, count: int) -> list[int]:
        """Return ``count`` tokens that may follow the last appended token."""


@dataclass(slots=True)
class Speculated:
    """The tokens and the metrics of a generation with a drafter.

    ``proposed`` is the number of all proposed tokens. ``accepted`` has the number of correct proposals of each pass
    over proposals. ``single_seconds`` are the times of passes over one token, and ``first_seconds`` is the time of the
    pass over the prompt. ``compared`` is the time of comparing the first pass over proposals with single passes.
    ``rest_seconds`` is the time after the prompt, without ``compared``. ``dropped`` is the reason why the drafter was
    abandoned; empty if it was not.
    """

    tokens: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)
    first_seconds: float = 0.0
    rest_seconds: float = 0.0
    single_seconds: list[float] = field(default_factory=list)
    compared: float = 0.0
    dropped: str = ""


class RowByRow(TorchFunctionMode):
    """A torch mode for a pass over a few tokens [1, n] after cached tokens; each row has the bits of a pass over one
    token.

    Each shape of linear layer is probed once. If its results depend on the number of rows, it is computed row by row.
    Attention is computed for one query at a time, over the keys up to the query. Other products raise
    ``UnsupportedError`` ``draft.model``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batched: dict[tuple[Any, ...], bool] = {}
        self.count = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if self.count == 1:
            return func(*args, **keywords)
        if func is functional.linear:
            return self._linear(func, args, keywords)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, args, keywords)
        if func in _POINTWISE and args[0].shape[-2:-1] == (self.count,) and _in_parts(args[0]):
            return self._row_by_row(func, args[0], args, keywords)
        if func in _PRODUCTS or func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm):
            _require_outer(args)
        return func(*args, **keywords)

    def _linear(self, func: Any, args: Any, keywords: Any) -> Any:
        x = args[0]
        weight = args[1] if len(args) > 1 else keywords["weight"]
        if x.ndim < 2 or x.shape[-2] != self.count:
            return func(*args, **keywords)
        key = (tuple(x.shape), tuple(weight.shape), x.dtype, x.device)
        if key not in self._batched:
            generator = torch.Generator().manual_seed(1)
            samples = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for _ in range(_TRIES)]
            same = (
                torch.equal(func(values, *args[1:], **keywords), self._row_by_row(func, values, args, keywords))
                for values in samples
            )
            self._batched[key] = _keeps_bits(*key) and all(same)
        if self._batched[key]:
            return func(*args, **keywords)
        return self._row_by_row(func, x, args, keywords)

    def _row_by_row(self, func: Any, x: Any, args: Any, keywords: Any) -> Any:
        return torch.cat([func(row, *args[1:], **keywords) for row in _rows(x)], -2)

    def _attention(self, func: Any, args: Any, keywords: Any) -> Any:
        options = (
            dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | keywords
        )
        query = options.pop("query")
        key = options.pop("key")
        value = options.pop("value")
        mask = options.pop("attn_mask", None)
        count = query.shape[-2]
        past = key.shape[-2] - count
        options["is_causal"] = False
        _require_causal(mask, past, count)
        rows = []
        for index, row in enumerate(_rows(query)):
            visible = slice(0, past + index + 1)
            rows.append(func(row, key[:, :, visible].contiguous(), value[:, :, visible].contiguous(), None, **options))
        return torch.cat(rows, -2)


def _keeps_bits(shape: tuple[int, ...], weight: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a linear layer of these shapes gives each row the same bits in a batch as alone.

    The probe uses values whose products cancel. The output is the rounding error of the sums, so another order of
    summation changes almost every element, also in 16 bits. Very large layers are not probed and count as false.
    """
    if weight[0] * weight[1] > _LARGEST:
        return False
    generator = torch.Generator().manual_seed(0)
    half = weight[1] // 2
    order = torch.randperm(2 * half, generator=generator)
    first, second = (_of_many_sizes((*size, half), generator) for size in (shape[:-1], weight[:1]))
    pad = [0, weight[1] - 2 * half]
    x = functional.pad(torch.cat((first, first), -1)[..., order], pad).to(device, dtype)
    matrix = functional.pad(torch.cat((second, -second), -1)[..., order], pad).to(device, dtype)
    out = functional.linear(x, matrix)
    has_rounding = bool(out.count_nonzero())  # without rounding the probe shows nothing
    return has_rounding and torch.equal(out, torch.cat([functional.linear(row, matrix) for row in _rows(x)], -2))


def _of_many_sizes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.ldexp(torch.randn(shape, generator=generator), torch.randint(-6, 7, shape, generator=generator))


def _in_parts(x: Any) -> bool:
    """Return whether torch may compute an elementwise operation on ``x`` in parts, with different bits at their
    ends.
    """
    return bool(x.shape[-1] % _VECTOR) or x.numel() >= _GRAIN


def _rows(x: Any) -> Any:
    """Return the rows of x [..., n, width] as n tensors [..., 1, width]."""
    return x.split(1, -2)


def _require_outer(args: Any) -> None:
    """Raise ``UnsupportedError`` ``draft.model`` for a product whose sums have more than one term.

    Such sums might have other bits if several rows are computed together. Products with one term per sum occur in
    rotary embeddings.
    """
    if isinstance(args[0], torch.Tensor) and args[0].shape[-1] != 1:
        raise UnsupportedError(
            "drafting needs a model of linear layers and scaled_dot_product_attention, but this one computes another "
            f"product, of {list(args[0].shape)}; generate without the draft",
            rule="draft.model",
        )


def _require_causal(mask: Any, past: int, count: int) -> None:
    if mask is None:
        return
    visible = mask if mask.dtype == torch.bool else mask == 0
    expected = torch.ones(count, past + count, dtype=torch.bool, device=mask.device).tril(past)
    if not bool((visible == expected).all()):
        raise UnsupportedError(
            "drafting needs attention to all earlier tokens, but this model uses another mask; generate without the "
            "draft",
            rule="draft.model",
        )


def speculate(
    model: Any, tokens: Any, count: int, enough: Callable[[list[int]], bool], drafter: Drafter, ahead: int = 4
) -> Speculated:
    """Return up to ``count`` new tokens after ``tokens`` ([1, n], i64), equal to those of ``greedy``.

    Parameters
    ----------
    model : a causal language model of transformers
    tokens, count, enough
        The parameters of ``greedy``.
    drafter : Drafter
    ahead : int
        Number of tokens per proposal, 1 to 7.

    Raises
    ------
    UnsupportedError
        ``draft.model``: the model has products besides linear layers and attention to all earlier tokens.
    """
    run = _Run(model, drafter, Speculated())
    result = run.done

    def add(new: Sequence[int]) -> bool:
        """Append tokens to the result until the text is complete; return whether it is complete."""
        for token in new:
            result.tokens.append(token)
            if len(result.tokens) >= count or enough(result.tokens):
                return True
        return False

    with torch.inference_mode():
        began = time.perf_counter()
        last = run.start(tokens)
        result.first_seconds = time.perf_counter() - began
        finished = add([last])
        began = time.perf_counter()
        while not finished:
            finished = add(run.step(min(ahead, count - len(result.tokens) - 1)))
        result.rest_seconds = time.perf_counter() - began - result.compared
    return result


class _Run:
    """A generation with a drafter in progress: the model's cache, and the last token."""

    def __init__(self, model: Any, drafter: Drafter, result: Speculated) -> None:
        self._model = model
        self._drafter = drafter
        self.done = result
        self._layers = [module for module in model.modules() if isinstance(module, InNativeCalls)]
        self._packed = any(isinstance(module, PackedWeight) for module in model.modules())
        self._cache: Any = None
        self._last = 0
        self._mode = RowByRow()

    def start(self, tokens: Any) -> int:
        """Read the prompt; return the token that follows it."""
        logits, features = self._pass(tokens)
        require_croppable(self._cache)
        self._last = int(logits[0, -1].argmax())
        self._device = tokens.device
        self._drafter.extend(features, [*tokens[0, 1:].tolist(), self._last])
        return self._last

    def step(self, ahead: int) -> list[int]:
        """Return the next tokens, at least one and at most ``ahead`` + 1."""
        if ahead < 1 or self.done.dropped:
            began = time.perf_counter()
            logits, features = self._pass(self._ids([self._last]))
            self.done.single_seconds.append(time.perf_counter() - began)
            new = [int(logits[0, -1].argmax())]
        else:
            proposed = self._drafter.propose(ahead)
            self.done.proposed += ahead
            ids = self._ids([self._last, *proposed])
            with self._mode, rows_alone():
                self._mode.count = ids.shape[1]
                logits, features = self._pass(ids)
                self._mode.count = 1
            if not self.done.accepted:
                logits = self._verify(ids, logits)
            likeliest = logits[0].argmax(-1).tolist()
            right = next((n for n, token in enumerate(proposed) if token != likeliest[n]), ahead)
            if ahead > right:
                self._cache.crop(right - ahead)
            self.done.accepted.append(right)
            new = likeliest[: right + 1]
            features = features[:, : right + 1]
        if not self.done.dropped:
            self._drafter.extend(features, new)
        self._last = new[-1]
        return new

    def _verify(self, ids: Any, logits: Any) -> Any:
        """Compare a pass over several tokens with single passes; return the logits of the single passes.

        If a bit differs, the drafter is abandoned: it would change the text.
        """
        began = time.perf_counter()
        count = ids.shape[1]
        batched_states = (
            [layer.keys.clone() for layer in self._cache.layers],
            [layer.values for layer in self._cache.layers],
        )
        self._cache.crop(-count)
        rows = []
        for row in ids.split(1, 1):
            before = time.perf_counter()
            rows.append(self._pass(row)[0])
            self.done.single_seconds.append(time.perf_counter() - before)
        single_logits = torch.cat(rows, 1)
        same = torch.equal(single_logits, logits) and all(
            torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            for layer, keys, values in zip(self._cache.layers, *batched_states, strict=True)
        )
        if not same:
            self.done.dropped = "this machine computes several tokens with other bits than single tokens"
            if self._packed:
                self.done.dropped += "; decoded weights (--decode) may avoid this"
        self.done.compared = time.perf_counter() - began
        return single_logits

    def _pass(self, ids: Any) -> tuple[Any, Any]:
        """Run the model on ``ids``; return the logits, and the inputs of the layers that are the drafter's features.

        The logits are the same as without a drafter.
        """
        features = self._drafter.features
        states = dict[int, torch.Tensor]()
        if max(features) < len(self._layers):
            for index in features:
                self._layers[index].listener = partial(states.__setitem__, index)
            try:
                output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            finally:
                for index in features:
                    self._layers[index].listener = None
        else:
            output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, output_hidden_states=True)
            states = {index: output.hidden_states[index] for index in features}
        self._cache = output.past_key_values
        return output.logits, torch.cat([states[index] for index in features], -1)

    def _ids(self, tokens: list[int]) -> Any:
        return torch.tensor([tokens], device=self._device)


def require_croppable(cache: Any) -> None:
    """Raise ``draft.model`` for caches that cannot remove tokens exactly: windows, states of recurrent layers."""
    types = {type(layer).__name__ for layer in getattr(cache, "layers", [None])}
    if types != {"DynamicLayer"}:
        raise UnsupportedError(
            f"drafting needs a cache of all keys and values, found {', '.join(sorted(types))}; generate without the "
            "draft",
            rule="draft.model",
        )


class EagleDecoding:
    """Speculative decoding with EAGLE-3 heads, registered in the group ``ingot.draft_decoders``."""

    head = DraftHead
    speculate = staticmethod(speculate)
