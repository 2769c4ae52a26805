"""Greedy generation with a loaded model, timed: the smoke test of a conversion."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ingot.artifacts.attachments import located, no_attachment
from ingot.artifacts.draft_head import config_of_draft
from ingot.artifacts.open import open as open_checkpoint
from ingot.core.border import require
from ingot.errors import FormatError, UnsupportedError, UsageError
from ingot.runtime.evaluation.special_tokens import prompt_tokens
from ingot.runtime.loading.kv_options import KvUse
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.options import Draft, LoadOptions
from ingot.runtime.loading.serving import DRAFT_DECODERS, EAGLE
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a draft head did for a generation, whose tokens are those without it.

    Parameters
    ----------
    passes : int
        Passes of the model over proposals, behind the prompt.
    proposed, accepted : int
        Tokens that the head proposed, and how many of them the model would have chosen too.
    accepted_lengths : tuple of int
        Accepted tokens of each of those passes; each gives one token more.
    tokens_per_pass : float or None
        Tokens that a pass behind the prompt gave.
    seconds_alone : float or None
        What a pass over one token takes, the median of those that this generation needed.
    speed_up : float or None
        Tokens per second with the head, over those of passes over one token each.
    dropped : str
        Why the head was given up on the way; empty where it was not.
    """

    passes: int
    proposed: int
    accepted: int
    accepted_lengths: tuple[int, ...]
    tokens_per_pass: float | None
    seconds_alone: float | None
    speed_up: float | None
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """A continuation and what it took.

    ``first_token_seconds`` is the pass over the prompt; ``tokens_per_second`` counts the tokens after the first, None
    where there is only one. ``stopped`` tells whether the model ended by itself. ``drafted`` is there where a
    draft head was used; ``kv_cache`` where keys and values were packed: what they take behind the last pass.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    stopped: bool
    load: LoadReport
    first_token_seconds: float
    tokens_per_second: float | None
    drafted: Drafted | None = None
    kv_cache: KvUse | None = None


def generate(source: AnyPath | LoadOptions, prompt: str, max_tokens: int = 32, draft: Draft | None = None) -> Generated:
    """Load a model, continue ``prompt`` by the most likely token at each step, and time it.

    Parameters
    ----------
    source : path or LoadOptions
        What is loaded and how; always a model of transformers, never a Core ML package. The tokenizer lies in the same
        folder.
    max_tokens : int
        At most so many new tokens, at least 1.
    draft : Draft, optional
        Decode speculatively with an EAGLE-3 head; the tokens are those without it.

    Raises
    ------
    UsageError
        ``generate.max-tokens``, ``generate.prompt``: the prompt has no tokens, or with the new ones too many for the
        model; ``attachments.none``: the artifact carries no draft head; ``draft.tokens``; ``kv.draft``: a draft head
        beside a packed KV cache.
    UnsupportedError
        ``generate.no-head``: a model without a language head; ``draft.model``: one that no head can draft for.
    FormatError
        ``draft.*``: a head that does not fit, or none is one.
    IngotError
        As ``load_model``; ``model.tokenizer``, ``model.vocabulary``.
    """
    if max_tokens < 1:
        raise UsageError(f"expected at least 1 new token, found {max_tokens}", rule="generate.max-tokens")
    reports: list[LoadReport] = []
    wanted = source if isinstance(source, LoadOptions) else LoadOptions(source)
    if draft is not None and wanted.kv_cache is not None:
        raise UsageError(
            "expected the full cache beside a draft head, whose tokens are those without it, found a packed one: leave "
            "one of them away",
            rule="kv.draft",
        )
    model = load_model(replace(wanted, coreml=False, report=reports.append))
    tokenizer = load_tokenizer(wanted.path if wanted.model_dir is None else wanted.model_dir)
    torch = require("torch", EXTRA)
    tokens = torch.tensor([prompt_tokens(tokenizer, prompt)], dtype=torch.int64, device=model.device)
    require_room(model, tokens.shape[1], max_tokens)
    require_vocabulary(model, tokens)
    ends = end_tokens(model)
    if draft is None:
        caches: list[Any] = []
        new_tokens, seconds = greedy(model, tokens, max_tokens, lambda new: new[-1] in ends, caches.append)
        first, rest, drafted = seconds[0], sum(seconds[1:]), None
        use = None if wanted.kv_cache is None else caches[0].use()
    else:
        head = draft_head(wanted.path if draft.head is None else draft.head, model)
        done = DRAFT_DECODERS[EAGLE].speculate(
            model, tokens, max_tokens, lambda new: new[-1] in ends, head, draft.tokens
        )
        new_tokens, first, rest, drafted, use = done.tokens, done.first, done.rest, _drafted(done), None
    text = tokenizer.decode([token for token in new_tokens if token not in ends], skip_special_tokens=True)
    return Generated(
        prompt=prompt,
        text=text,
        tokens=tuple(new_tokens),
        stopped=new_tokens[-1] in ends,
        load=reports[0],
        first_token_seconds=first,
        tokens_per_second=len(new_tokens[1:]) / rest if rest else None,
        drafted=drafted,
        kv_cache=use,
    )


def draft_head(path: AnyPath, model: Any) -> Any:
    """Return the draft head at ``path``, or that which the artifact there carries, beside its target ``model``.

    Raises
    ------
    UsageError
        ``attachments.none``: neither.
    FormatError
        ``draft.*``.
    """
    with open_checkpoint(path) as checkpoint, located(checkpoint.location):
        carried = checkpoint.attachments.draft
        if carried is None and "fc.weight" not in checkpoint:
            error = no_attachment("draft", Location.parse(path))
            error.message += ", or name one that lies elsewhere with --draft-head PATH"
            raise error
        own = config_of_draft(checkpoint)
        return DRAFT_DECODERS[EAGLE].head(checkpoint if carried is None else carried, model, own)


def _drafted(done: Any) -> Drafted:
    """Return the figures of a speculative generation."""
    alone = median(done.alone) if done.alone else None
    behind = len(done.tokens) - 1
    accepted = sum(done.accepted)
    return Drafted(
        passes=len(done.accepted),
        proposed=done.proposed,
        accepted=accepted,
        accepted_lengths=tuple(done.accepted),
        tokens_per_pass=1 + accepted / len(done.accepted) if done.accepted else None,
        seconds_alone=alone,
        speed_up=behind * alone / done.rest if alone and behind and done.rest > 0 else None,
        dropped=done.dropped,
    )


def greedy(
    model: Any,
    tokens: Any,
    count: int,
    enough: Callable[[list[int]], bool],
    ended: Callable[[Any], object] = lambda _: None,
) -> tuple[list[int], list[float]]:
    """Return up to ``count`` new tokens after ``tokens`` ([1, n], i64) and the seconds that each took.

    ``enough`` is asked after each token, with all new ones, whether to end; ``ended`` gets the cache at the end. Logits
    are compared as they are: no temperature, no penalty, no sampling.
    """
    torch = require("torch", EXTRA)
    new_tokens: list[int] = []
    seconds: list[float] = []
    cache = None
    with torch.inference_mode():
        while len(new_tokens) < count and not (new_tokens and enough(new_tokens)):
            began = time.perf_counter()
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            token = int(output.logits[0, -1].argmax())
            cache = output.past_key_values
            tokens = torch.tensor([[token]], device=tokens.device)
            new_tokens.append(token)
            seconds.append(time.perf_counter() - began)
    ended(cache)
    return new_tokens, seconds


def require_vocabulary(model: Any, tokens: Any) -> None:
    """Refuse tokens that the model has no embedding for: ``model.vocabulary``, the tokenizer is another model's."""
    size = vocabulary(model)
    if tokens.numel() and int(tokens.max()) >= size:
        raise FormatError(
            "model.vocabulary", f"expected tokens below {size}, found {int(tokens.max())}: another model's tokenizer"
        )


def vocabulary(model: Any) -> int:
    """Return how many tokens a model knows."""
    return int(model.config.get_text_config().vocab_size)


def end_tokens(model: Any) -> set[int]:
    """Return the tokens with which the model ends a text: those of its generation config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set(named) if isinstance(named, list) else set() if named is None else {named}


def require_room(model: Any, prompt: int, new: int) -> None:
    """Refuse a model without a language head (``generate.no-head``) and prompts without tokens or too long."""
    if not model.can_generate():
        raise UnsupportedError(
            f"expected a model with a language head, found {type(model).__name__}", rule="generate.no-head"
        )
    if not prompt:
        raise UsageError("expected a prompt of at least 1 token, found none", rule="generate.prompt")
    most = positions(model)
    if most is not None and prompt + new > most:
        raise UsageError(
            f"expected at most {most} tokens, which the model has positions for, found {prompt} of the prompt and "
            f"{new} new ones",
            rule="generate.prompt",
        )


def positions(model: Any) -> int | None:
    """Return how many tokens a model has positions for; None where its config does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) else None
