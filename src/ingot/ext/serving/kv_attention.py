"""Attention over packed blocks of keys and values, as a function for transformers (``spec/kv-cache.md``).

Importing this module needs torch and transformers (``core.border.require`` names the extra).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ingot.codecs.affine.blocks import LANES
from ingot.ext.serving.kv_layer import TYPES, VIEW, View
from ingot.runtime.loading.kv_options import OBSERVED

NAME: Final = "ingot_kv"
"""The value of ``config._attn_implementation``. The masks are the same as for torch's attention."""
POOLED = 7
"""Number of neighbouring tokens among which the largest vote is taken (SnapKV)."""

_SCORES = 1 << 23  # maximum number of scores at a time: 32 MiB
_PLAIN = frozenset(("dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "cache_position"))


def register() -> None:
    """Register this attention and its masks in transformers under ``NAME``."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Any, None]:
    """Return the attention output [sequences, tokens, heads, width], and None instead of attention weights.

    Kernels multiply packed keys and values if they support the call. Otherwise these are decoded, and torch's attention
    is used.
    """
    view = _view_of(key, value)
    if view is None:
        return _dense(module, query, (key, value), attention_mask, scaling, options)
    mask = _mask_of(view, query, attention_mask)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if view.waiting is not None:
        attended = _dense(module, query, (key, value), mask, scaling, options)
        view.waiting.evict(tokens_to_keep(view, query, mask, factor))
        return attended
    if not covers(view, query, options):
        return _dense(module, query, (view.decode(keys=True), view.decode(keys=False)), mask, scaling, options)
    return _packed(view, query, mask, factor), None


def _view_of(key: Any, value: Any) -> View | None:
    """Return the view to which both ``key`` and ``value`` belong.

    Returns None if another type of cache layer created them, or if they are copies.
    """
    view = getattr(key, VIEW, None)
    return view if isinstance(view, View) and getattr(value, VIEW, None) is view else None


def _dense(module: Any, query: Any, states: Any, mask: Any, scaling: float | None, options: Any) -> tuple[Any, None]:
    """Return the attention output of torch's own function for decoded keys and values."""
    sdpa: Any = sdpa_attention_forward
    return sdpa(module, query, *states, mask, scaling=scaling, **options)[0], None


def covers(view: View, query: Any, options: dict[str, Any]) -> bool:
    """Return whether the kernels support an attention call; ``options`` are all other arguments of the call."""
    plain = all(name in _PLAIN or value is None or value is False for name, value in options.items())
    grad = torch.is_grad_enabled() and (query.requires_grad or view.keys.requires_grad or view.values.requires_grad)
    return (
        plain
        and view.packed > 0
        and not grad
        and not options.get("dropout")
        and query.dtype in TYPES
        and query.device.type == "cpu"
        and view.value_blocks.shape[1] % LANES == 0
    )


def _mask_of(view: View, query: Any, mask: Any) -> Any:
    """Return the mask [sequences, 1 or heads, tokens, length] for the tokens of a view; None if all are visible."""
    count = query.shape[2]
    if mask is None:
        if count in (1, view.length):
            return None
        causal = torch.arange(view.length)[None, :] <= torch.arange(count)[:, None] + view.length - count
        return causal[None, None]
    if view.positions is None:
        return mask
    groups = query.shape[1] // view.heads
    rows = mask.expand(len(query), query.shape[1], *mask.shape[2:])
    indices = view.positions.repeat_interleave(groups, dim=1)[:, :, None].expand(-1, -1, count, -1)
    return torch.cat([rows.gather(3, indices), rows[..., view.prompt :]], dim=3)


def _packed(view: View, query: Any, mask: Any, scaling: float) -> Any:
    """Return the attention output, computed by the kernels for one block of rows at a time, to limit the memory of
    scores.
    """
    step = max(1, _SCORES // max(1, query.shape[0] * query.shape[1] * view.length))
    parts = []
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        parts.append(_rows(view, query[:, :, rows], None if mask is None else mask[:, :, rows], scaling))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rows(view: View, query: Any, mask: Any, scaling: float) -> Any:
    sequences, heads, count, width = query.shape
    groups = heads // view.heads
    workers = torch.get_num_threads()
    after = view.lead + view.packed
    # Heads that share keys become rows of one product.
    queries = (query.detach().float() * scaling).reshape(sequences * view.heads, groups * count, width).contiguous()
    keys, values = (
        states.detach().float().reshape(len(queries), -1, states.shape[-1]) for states in (view.keys, view.values)
    )
    scores = torch.empty(*queries.shape[:2], view.length)
    view.key_blocks.scores(queries.numpy(), scores.numpy(), view.lead, workers)
    dense = torch.matmul(queries, keys.transpose(1, 2))
    scores[:, :, : view.lead] = dense[:, :, : view.lead]
    scores[:, :, after:] = dense[:, :, view.lead :]
    if mask is not None:
        _hide(scores.view(sequences, view.heads, groups, count, view.length), mask, groups)
    weights = functional.softmax(scores, dim=-1)
    out = torch.empty(*queries.shape[:2], values.shape[-1])
    view.value_blocks.weighted_sums(weights.numpy(), view.lead, out.numpy(), workers)
    out += torch.matmul(weights[:, :, : view.lead], values[:, : view.lead])
    out += torch.matmul(weights[:, :, after:], values[:, view.lead :])
    return out.view(sequences, heads, count, -1).transpose(1, 2).to(query.dtype).contiguous()


def _hide(scores: Any, mask: Any, groups: int) -> None:
    """Apply a boolean or additive mask to scores, in place.

    Scores are [sequences, heads of keys, heads of queries per head of keys, rows, length].
    """
    shaped = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (-1, groups))
    if mask.dtype == torch.bool:
        # Not minus infinity: a row without visible tokens, as in padding, must not become NaN.
        scores.masked_fill_(~shaped, torch.finfo(scores.dtype).min)
    else:
        scores += shaped


def tokens_to_keep(view: View, query: Any, mask: Any, scaling: float) -> Any:
    """Return the tokens of a prompt to keep, [sequences, heads, tokens]: SnapKV (arXiv 2404.14469, section 4).

    The vote for a token is the sum of the attention that the last ``OBSERVED`` tokens pay to it, over all heads that
    share keys. It is replaced by the largest vote among the ``POOLED`` tokens around the token. The tokens with the
    largest votes are kept, and always the first tokens and the last ``OBSERVED`` tokens.
    """
    assert view.waiting is not None
    settings = view.waiting.settings
    length = view.length
    assert settings.evict is not None
    sequences, heads, count, width = query.shape
    voters = min(OBSERVED, count)
    queries = query[:, :, -voters:].detach().float().reshape(sequences, view.heads, -1, width)
    scores = torch.matmul(queries * scaling, view.keys.detach().float().transpose(2, 3))
    scores = scores.view(sequences, view.heads, heads // view.heads, voters, length)
    if mask is None:
        mask = (torch.arange(length)[None, :] <= torch.arange(voters)[:, None] + length - voters)[None, None]
    _hide(scores, mask[:, :, -voters:], heads // view.heads)
    votes = functional.softmax(scores, dim=-1)[..., : length - voters].sum(dim=(2, 3))
    votes = functional.max_pool1d(votes, POOLED, stride=1, padding=POOLED // 2)
    votes[..., : settings.sinks] = torch.inf
    chosen = votes.topk(settings.evict - voters, dim=-1).indices.sort(dim=-1).values
    last = torch.arange(length - voters, length).expand(sequences, view.heads, -1)
    return torch.cat([chosen, last], dim=-1)
