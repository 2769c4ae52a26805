"""Speculative decoding: a drafter proposes tokens, one pass of the model proves them; the text is that without it.

A pass over several tokens would do to make almost the same text: libraries sum in another order when rows come
together, and where two tokens are nearly equally likely the other one wins. Here rows come out with the bits that they
have alone (``Alone``): what this machine computes otherwise together is computed row by row, and the first pass over
several tokens is compared with the same passes one by one, bit by bit.

This module needs torch to be imported (``core.extras.require`` names the extra); nothing else imports it at the top.
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

# Elements: of a vector, of what torch gives a thread, of the largest layer that is tried out.
_VECTOR, _GRAIN, _LARGEST = 64, 1 << 15, 1 << 28
_TRIES = 8
_PRODUCTS = tuple(
    getattr(torch, name) for name in ("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "mv", "addbmm", "tensordot")
)
_POINTWISE = (functional.silu, functional.gelu, torch.sigmoid, torch.tanh, torch.exp)


class Drafter(Protocol):
    """What proposes tokens."""

    features: tuple[int, ...]

    def extend(self, features: torch.Tensor, ids: Sequence[int]) -> None:
        """Take in features [1, n, all features] of n positions, and the token that follows each."""

    def propose(self, count: int) -> list[int]:
        """Return ``count`` tokens that may follow the last one taken in."""


@dataclass(slots=True)
class Speculated:
    """What a generation with a drafter took.

    ``accepted`` has, for each pass over proposals, how many of them were right; ``alone`` the seconds of passes over
    one token, ``first`` those of the prompt, ``rest`` those of all after it, with proposals and without the comparison
    of the first pass (``compared``). ``dropped`` says why the drafter was given up, empty where it was not.
    """

    tokens: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)
    first: float = 0.0
    rest: float = 0.0
    alone: list[float] = field(default_factory=list)
    compared: float = 0.0
    dropped: str = ""


class Alone(TorchFunctionMode):
    """Within this, a pass over a few tokens [1, n] behind a cache gives each the bits that it has as the only one.

    Linear layers are tried once, by their shape, whether rows depend on how many there are; those for which they do are
    computed row by row. Attention is computed query by query, over the keys up to each. Products that are neither are
    refused: ``draft.model``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._together: dict[tuple[Any, ...], bool] = {}
        self.count = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self.count == 1:
            return func(*args, **named)
        if func is functional.linear:
            return self._linear(func, args, named)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, args, named)
        if func in _POINTWISE and args[0].shape[-2:-1] == (self.count,) and _in_parts(args[0]):
            return self._alone(func, args[0], args, named)
        if func in _PRODUCTS or func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm):
            _require_outer(args)
        return func(*args, **named)

    def _linear(self, func: Any, args: Any, named: Any) -> Any:
        x, weight = args[0], args[1] if len(args) > 1 else named["weight"]
        if x.ndim < 2 or x.shape[-2] != self.count:
            return func(*args, **named)
        key = (tuple(x.shape), tuple(weight.shape), x.dtype, x.device)
        if key not in self._together:
            numbers = torch.Generator().manual_seed(1)
            tries = [torch.randn(x.shape, generator=numbers).to(x.device, x.dtype) for _ in range(_TRIES)]
            same = (torch.equal(func(some, *args[1:], **named), self._alone(func, some, args, named)) for some in tries)
            self._together[key] = _together(*key) and all(same)
        if self._together[key]:
            return func(*args, **named)
        return self._alone(func, x, args, named)

    def _alone(self, func: Any, x: Any, args: Any, named: Any) -> Any:
        return torch.cat([func(row, *args[1:], **named) for row in _rows(x)], -2)

    def _attention(self, func: Any, args: Any, named: Any) -> Any:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | named
        query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
        mask, count = given.pop("attn_mask", None), query.shape[-2]
        past = key.shape[-2] - count
        given["is_causal"] = False
        _require_causal(mask, past, count)
        rows = []
        for number, row in enumerate(_rows(query)):
            seen = slice(0, past + number + 1)
            rows.append(func(row, key[:, :, seen].contiguous(), value[:, :, seen].contiguous(), None, **given))
        return torch.cat(rows, -2)


def _together(shape: tuple[int, ...], weight: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a linear layer of these shapes gives several rows the bits that each has alone.

    Asked with numbers whose products cancel: what comes out is what rounding left of the sums, so that another order
    shows in almost every element, of 16 bits too. Very large layers are not asked.
    """
    if weight[0] * weight[1] > _LARGEST:
        return False
    numbers, half = torch.Generator().manual_seed(0), weight[1] // 2
    order = torch.randperm(2 * half, generator=numbers)
    left, right = (_of_many_sizes((*size, half), numbers) for size in (shape[:-1], weight[:1]))
    pad = [0, weight[1] - 2 * half]
    x = functional.pad(torch.cat((left, left), -1)[..., order], pad).to(device, dtype)
    matrix = functional.pad(torch.cat((right, -right), -1)[..., order], pad).to(device, dtype)
    out = functional.linear(x, matrix)
    shows = bool(out.count_nonzero())  # else nothing was rounded, and nothing is known
    return shows and torch.equal(out, torch.cat([functional.linear(row, matrix) for row in _rows(x)], -2))


def _of_many_sizes(shape: tuple[int, ...], numbers: torch.Generator) -> torch.Tensor:
    return torch.ldexp(torch.randn(shape, generator=numbers), torch.randint(-6, 7, shape, generator=numbers))


def _in_parts(x: Any) -> bool:
    """Whether torch may compute the ends of rows otherwise than their middles: not in whole vectors, or by threads."""
    return bool(x.shape[-1] % _VECTOR) or x.numel() >= _GRAIN


def _rows(x: Any) -> Any:
    """Return the tokens of x [..., n, width] one by one."""
    return x.split(1, -2)


def _require_outer(args: Any) -> None:
    """Let products through that sum nothing, as rotary embeddings have them."""
    if isinstance(args[0], torch.Tensor) and args[0].shape[-1] != 1:
        raise UnsupportedError(
            "expected a model of linear layers and scaled_dot_product_attention to draft for, found another product, "
            f"of {list(args[0].shape)}; generate without the draft",
            rule="draft.model",
        )


def _require_causal(mask: Any, past: int, count: int) -> None:
    if mask is None:
        return
    seen = mask if mask.dtype == torch.bool else mask == 0
    wanted = torch.ones(count, past + count, dtype=torch.bool, device=mask.device).tril(past)
    if not bool((seen == wanted).all()):
        raise UnsupportedError(
            "expected attention to all tokens before, found another mask; generate without the draft",
            rule="draft.model",
        )


def speculate(
    model: Any, tokens: Any, count: int, enough: Callable[[list[int]], bool], drafter: Drafter, ahead: int = 4
) -> Speculated:
    """Return up to ``count`` new tokens after ``tokens`` ([1, n], i64): those that ``greedy`` returns.

    Parameters
    ----------
    model : a causal language model of transformers
    tokens, count, enough
        As for ``greedy``.
    drafter : Drafter
    ahead : int
        How many tokens are proposed at a time, 1 to 7.

    Raises
    ------
    UnsupportedError
        ``draft.model``: the model computes in other ways than by linear layers and attention to all tokens before.
    """
    run = _Run(model, drafter, Speculated())
    done = run.done

    def add(new: Sequence[int]) -> bool:
        """Take tokens in until it is enough; return whether it is."""
        for token in new:
            done.tokens.append(token)
            if len(done.tokens) >= count or enough(done.tokens):
                return True
        return False

    with torch.inference_mode():
        began = time.perf_counter()
        last = run.begin(tokens)
        done.first = time.perf_counter() - began
        finished = add([last])
        began = time.perf_counter()
        while not finished:
            finished = add(run.step(min(ahead, count - len(done.tokens) - 1)))
        done.rest = time.perf_counter() - began - done.compared
    return done


class _Run:
    """One generation: the model's cache, and what is known of the tokens before."""

    def __init__(self, model: Any, drafter: Drafter, done: Speculated) -> None:
        self._model, self._drafter, self.done = model, drafter, done
        self._layers = [module for module in model.modules() if isinstance(module, InNativeCalls)]
        self._packed = any(isinstance(module, PackedWeight) for module in model.modules())
        self._cache: Any = None
        self._last = 0
        self._mode = Alone()

    def begin(self, tokens: Any) -> int:
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
            self.done.alone.append(time.perf_counter() - began)
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
                logits = self._proven(ids, logits)
            likeliest = logits[0].argmax(-1).tolist()
            right = next((n for n, token in enumerate(proposed) if token != likeliest[n]), ahead)
            if ahead > right:
                self._cache.crop(right - ahead)
            self.done.accepted.append(right)
            new, features = likeliest[: right + 1], features[:, : right + 1]
        if not self.done.dropped:
            self._drafter.extend(features, new)
        self._last = new[-1]
        return new

    def _proven(self, ids: Any, logits: Any) -> Any:
        """Compare a pass over several tokens with the same passes one by one; return the latter's logits.

        Where they differ in a bit, the drafter is given up: what several tokens give is not what they give alone.
        """
        began = time.perf_counter()
        count = ids.shape[1]
        together = [layer.keys.clone() for layer in self._cache.layers], [layer.values for layer in self._cache.layers]
        self._cache.crop(-count)
        rows = []
        for row in ids.split(1, 1):
            before = time.perf_counter()
            rows.append(self._pass(row)[0])
            self.done.alone.append(time.perf_counter() - before)
        alone = torch.cat(rows, 1)
        same = torch.equal(alone, logits) and all(
            torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            for layer, keys, values in zip(self._cache.layers, *together, strict=True)
        )
        if not same:
            self.done.dropped = "this machine computes several tokens together with other bits than one by one"
            if self._packed:
                self.done.dropped += "; decoded weights (--decode) may make it of use"
        self.done.compared = time.perf_counter() - began
        return alone

    def _pass(self, ids: Any) -> tuple[Any, Any]:
        """Return logits and features, which are inputs of layers; tokens are computed as without a drafter."""
        wanted, states = self._drafter.features, dict[int, torch.Tensor]()
        if max(wanted) < len(self._layers):
            for number in wanted:
                self._layers[number].listener = partial(states.__setitem__, number)
            try:
                output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            finally:
                for number in wanted:
                    self._layers[number].listener = None
        else:
            output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, output_hidden_states=True)
            states = {number: output.hidden_states[number] for number in wanted}
        self._cache = output.past_key_values
        return output.logits, torch.cat([states[number] for number in wanted], -1)

    def _ids(self, tokens: list[int]) -> Any:
        return torch.tensor([tokens], device=self._device)


def require_croppable(cache: Any) -> None:
    """Refuse caches that cannot take back tokens exactly (``draft.model``): windows, states of recurrent layers."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", [None])}
    if kinds != {"DynamicLayer"}:
        raise UnsupportedError(
            f"expected a cache of all keys and values, found {', '.join(sorted(kinds))}; generate without the draft",
            rule="draft.model",
        )


class EagleDecoding:
    """Speculative decoding with EAGLE-3 heads, registered in the group ``ingot.draft_decoders``."""

    head = DraftHead
    speculate = staticmethod(speculate)
