"""Attention that reads packed blocks of keys and values, as transformers calls it (``spec/kv-cache.md``).

This module needs torch and transformers to be imported (``core.extras.require`` names the extra).
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
"""What ``config._attn_implementation`` says; the masks are those of torch's own attention."""
POOLED = 7
"""Neighbouring tokens whose largest vote a token gets (SnapKV)."""

_SCORES = 1 << 23  # elements of scores at a time: 32 MiB
_PLAIN = frozenset(("dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "cache_position"))


def register() -> None:
    """Let transformers find this attention, and its masks, by ``NAME``."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **more: Any
) -> tuple[Any, None]:
    """Return what attention gives, [sequences, tokens, heads, width], and None in place of its weights.

    Keys and values that are packed are multiplied as they lie, where their layout and the arguments allow, else
    decoded; all other calls are torch's own attention.
    """
    view = _view_of(key, value)
    if view is None:
        return _dense(module, query, (key, value), attention_mask, scaling, more)
    mask = _mask_of(view, query, attention_mask)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if view.waiting is not None:
        found = _dense(module, query, (key, value), mask, scaling, more)
        view.waiting.evict(kept_tokens(view, query, mask, factor))
        return found
    if not covers(view, query, more):
        return _dense(module, query, (view.decode(keys=True), view.decode(keys=False)), mask, scaling, more)
    return _packed(view, query, mask, factor), None


def _view_of(key: Any, value: Any) -> View | None:
    """Return what lies behind keys and values; None where a layer of another kind made them, or they are copies."""
    view = getattr(key, VIEW, None)
    return view if isinstance(view, View) and getattr(value, VIEW, None) is view else None


def _dense(module: Any, query: Any, states: Any, mask: Any, scaling: float | None, more: Any) -> tuple[Any, None]:
    """Return what torch's own attention gives."""
    own: Any = sdpa_attention_forward
    return own(module, query, *states, mask, scaling=scaling, **more)[0], None


def covers(view: View, query: Any, more: dict[str, Any]) -> bool:
    """Whether the kernels can take a call; ``more`` are its further arguments."""
    plain = all(name in _PLAIN or given is None or given is False for name, given in more.items())
    grad = torch.is_grad_enabled() and (query.requires_grad or view.keys.requires_grad or view.values.requires_grad)
    return (
        plain
        and view.packed > 0
        and not grad
        and not more.get("dropout")
        and query.dtype in TYPES
        and query.device.type == "cpu"
        and view.value_blocks.shape[1] % LANES == 0
    )


def _mask_of(view: View, query: Any, mask: Any) -> Any:
    """Return the mask [sequences, 1 or heads, tokens, length] for what a view holds, or None: everything is seen."""
    count = query.shape[2]
    if mask is None:
        if count in (1, view.length):
            return None
        behind = torch.arange(view.length)[None, :] <= torch.arange(count)[:, None] + view.length - count
        return behind[None, None]
    if view.positions is None:
        return mask
    groups = query.shape[1] // view.heads
    rows = mask.expand(len(query), query.shape[1], *mask.shape[2:])
    kept = view.positions.repeat_interleave(groups, dim=1)[:, :, None].expand(-1, -1, count, -1)
    return torch.cat([rows.gather(3, kept), rows[..., view.prompt :]], dim=3)


def _packed(view: View, query: Any, mask: Any, scaling: float) -> Any:
    """Attend by the kernels, so many rows at a time that their scores stay small."""
    step = max(1, _SCORES // max(1, query.shape[0] * query.shape[1] * view.length))
    parts = []
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        parts.append(_rows(view, query[:, :, rows], None if mask is None else mask[:, :, rows], scaling))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rows(view: View, query: Any, mask: Any, scaling: float) -> Any:
    sequences, heads, count, width = query.shape
    groups = heads // view.heads
    workers, behind = torch.get_num_threads(), view.lead + view.packed
    # Heads that share keys become rows of one product.
    asked = (query.detach().float() * scaling).reshape(sequences * view.heads, groups * count, width).contiguous()
    keys, values = (
        states.detach().float().reshape(len(asked), -1, states.shape[-1]) for states in (view.keys, view.values)
    )
    scores = torch.empty(*asked.shape[:2], view.length)
    view.key_blocks.scores(asked.numpy(), scores.numpy(), view.lead, workers)
    dense = torch.matmul(asked, keys.transpose(1, 2))
    scores[:, :, : view.lead] = dense[:, :, : view.lead]
    scores[:, :, behind:] = dense[:, :, view.lead :]
    if mask is not None:
        _hide(scores.view(sequences, view.heads, groups, count, view.length), mask, groups)
    weights = functional.softmax(scores, dim=-1)
    out = torch.empty(*asked.shape[:2], values.shape[-1])
    view.value_blocks.weighted_sums(weights.numpy(), view.lead, out.numpy(), workers)
    out += torch.matmul(weights[:, :, : view.lead], values[:, : view.lead])
    out += torch.matmul(weights[:, :, behind:], values[:, view.lead :])
    return out.view(sequences, heads, count, -1).transpose(1, 2).to(query.dtype).contiguous()


def _hide(scores: Any, mask: Any, groups: int) -> None:
    """Apply a mask to scores [sequences, heads of keys, groups, rows, length]: of booleans, or added."""
    shaped = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (-1, groups))
    if mask.dtype == torch.bool:
        # Not minus infinity: a row that sees nothing, as in padding, has no NaN.
        scores.masked_fill_(~shaped, torch.finfo(scores.dtype).min)
    else:
        scores += shaped


def kept_tokens(view: View, query: Any, mask: Any, scaling: float) -> Any:
    """Return which tokens of a prompt are kept, [sequences, heads, tokens]: SnapKV (arXiv 2404.14469, section 4).

    The last ``OBSERVED`` tokens vote by their attention to those before them, summed over the heads that share keys; a
    token has the largest vote of the ``POOLED`` around it. The first tokens and those that vote are always kept.
    """
    assert view.waiting is not None
    settings, length = view.waiting.settings, view.length
    assert settings.evict is not None
    sequences, heads, count, width = query.shape
    seen = min(OBSERVED, count)
    asked = query[:, :, -seen:].detach().float().reshape(sequences, view.heads, -1, width)
    scores = torch.matmul(asked * scaling, view.keys.detach().float().transpose(2, 3))
    scores = scores.view(sequences, view.heads, heads // view.heads, seen, length)
    if mask is None:
        mask = (torch.arange(length)[None, :] <= torch.arange(seen)[:, None] + length - seen)[None, None]
    _hide(scores, mask[:, :, -seen:], heads // view.heads)
    votes = functional.softmax(scores, dim=-1)[..., : length - seen].sum(dim=(2, 3))
    votes = functional.max_pool1d(votes, POOLED, stride=1, padding=POOLED // 2)
    votes[..., : settings.sinks] = torch.inf
    chosen = votes.topk(settings.evict - seen, dim=-1).indices.sort(dim=-1).values
    last = torch.arange(length - seen, length).expand(sequences, view.heads, -1)
    return torch.cat([chosen, last], dim=-1)
