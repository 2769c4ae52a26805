"""Timed greedy generation with a loaded model, which shows whether the result of a conversion works."""

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
    """Figures of speculative decoding with a draft head. The generated tokens are the same as without the head.

    Parameters
    ----------
    passes : int
        Passes of the model over proposals, after the prompt.
    proposed, accepted : int
        The number of tokens that the head proposed, and the number of proposed tokens that the model would have chosen
        too.
    accepted_lengths : tuple of int
        The number of accepted tokens of each pass; each pass generates one token more.
    tokens_per_pass : float or None
        Mean number of tokens per pass after the prompt.
    seconds_alone : float or None
        Median seconds of the passes over a single token in this generation.
    speed_up : float or None
        Tokens per second with the head, relative to passes over single tokens.
    dropped : str
        The reason why the head was disabled during the generation; empty if it was not.
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
    """A continuation with its time and memory.

    ``first_token_seconds`` is the time of the pass over the prompt. ``tokens_per_second`` is the rate of the tokens
    after the first token; None if only one token was generated. ``stopped`` is true if the model ended the text itself.
    ``drafted`` is set if a draft head was used. ``kv_cache`` is set if keys and values were packed; it is their memory
    after the last pass.
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
    """Load a model, continue ``prompt`` with the likeliest token at each step, and time it.

    Parameters
    ----------
    source : path or LoadOptions
        The model and how to load it; always a model of transformers, never a Core ML package. The tokenizer is in the
        model's folder.
    max_tokens : int
        Maximum number of new tokens, at least 1.
    draft : Draft, optional
        Decode speculatively with an EAGLE-3 head; the tokens are the same as without it.

    Raises
    ------
    UsageError
        ``generate.max-tokens``; ``generate.prompt``: the prompt has no tokens, or prompt and new tokens exceed the
        model's positions; ``attachments.none``: the artifact has no draft head; ``draft.tokens``; ``kv.draft``: a draft
        head combined with a packed KV cache.
    UnsupportedError
        ``generate.no-head``: the model has no language head; ``draft.model``: draft heads do not support the model.
    FormatError
        ``draft.*``: the draft head is invalid or does not fit the model.
    IngotError
        The errors of ``load_model``; ``model.tokenizer``, ``model.vocabulary``.
    """
    if max_tokens < 1:
        raise UsageError(f"expected at least 1 new token, found {max_tokens}", rule="generate.max-tokens")
    reports: list[LoadReport] = []
    load_options = source if isinstance(source, LoadOptions) else LoadOptions(source)
    if draft is not None and load_options.kv_cache is not None:
        raise UsageError(
            "a draft head needs an unpacked KV cache, because its tokens must equal those without it: remove one of "
            "the two options",
            rule="kv.draft",
        )
    model = load_model(replace(load_options, coreml=False, report=reports.append))
    tokenizer = load_tokenizer(load_options.path if load_options.model_dir is None else load_options.model_dir)
    torch = require("torch", EXTRA)
    tokens = torch.tensor([prompt_tokens(tokenizer, prompt)], dtype=torch.int64, device=model.device)
    require_room(model, tokens.shape[1], max_tokens)
    require_vocabulary(model, tokens)
    ends = end_tokens(model)
    if draft is None:
        caches: list[Any] = []
        new_tokens, seconds = greedy(model, tokens, max_tokens, lambda new: new[-1] in ends, caches.append)
        first_seconds = seconds[0]
        rest_seconds = sum(seconds[1:])
        drafted = None
        use = None if load_options.kv_cache is None else caches[0].use()
    else:
        head = draft_head(load_options.path if draft.head is None else draft.head, model)
        speculated = DRAFT_DECODERS[EAGLE].speculate(
            model, tokens, max_tokens, lambda new: new[-1] in ends, head, draft.tokens
        )
        new_tokens = speculated.tokens
        first_seconds = speculated.first_seconds
        rest_seconds = speculated.rest_seconds
        drafted = _drafted(speculated)
        use = None
    text = tokenizer.decode([token for token in new_tokens if token not in ends], skip_special_tokens=True)
    return Generated(
        prompt=prompt,
        text=text,
        tokens=tuple(new_tokens),
        stopped=new_tokens[-1] in ends,
        load=reports[0],
        first_token_seconds=first_seconds,
        tokens_per_second=len(new_tokens[1:]) / rest_seconds if rest_seconds else None,
        drafted=drafted,
        kv_cache=use,
    )


def draft_head(path: AnyPath, model: Any) -> Any:
    """Return the draft head at ``path``, or the head in the artifact there, for its target ``model``.

    Raises
    ------
    UsageError
        ``attachments.none``: there is no draft head.
    FormatError
        ``draft.*``.
    """
    with open_checkpoint(path) as checkpoint, located(checkpoint.location):
        carried = checkpoint.attachments.draft
        if carried is None and "fc.weight" not in checkpoint:
            error = no_attachment("draft", Location.parse(path))
            error.message += ", or name a draft head in another place with --draft-head PATH"
            raise error
        draft_config = config_of_draft(checkpoint)
        return DRAFT_DECODERS[EAGLE].head(checkpoint if carried is None else carried, model, draft_config)


def _drafted(speculated: Any) -> Drafted:
    """Return the figures of a speculative generation."""
    seconds_alone = median(speculated.single_seconds) if speculated.single_seconds else None
    tokens_after_first = len(speculated.tokens) - 1
    accepted = sum(speculated.accepted)
    speed_up = None
    if seconds_alone and tokens_after_first and speculated.rest_seconds > 0:
        speed_up = tokens_after_first * seconds_alone / speculated.rest_seconds
    return Drafted(
        passes=len(speculated.accepted),
        proposed=speculated.proposed,
        accepted=accepted,
        accepted_lengths=tuple(speculated.accepted),
        tokens_per_pass=1 + accepted / len(speculated.accepted) if speculated.accepted else None,
        seconds_alone=seconds_alone,
        speed_up=speed_up,
        dropped=speculated.dropped,
    )


def greedy(
    model: Any,
    tokens: Any,
    count: int,
    enough: Callable[[list[int]], bool],
    ended: Callable[[Any], object] = lambda _: None,
) -> tuple[list[int], list[float]]:
    """Return up to ``count`` new tokens after ``tokens`` ([1, n], i64) and the seconds that each took.

    ``enough`` receives all new tokens after each step and returns whether to stop. ``ended`` is called with the KV
    cache at the end. Each token is the one with the largest logit; temperature, penalties and sampling are not applied.
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
    """Raise ``model.vocabulary`` if the model has no embedding for a token; the tokenizer then fits another model."""
    size = vocabulary_size(model)
    if tokens.numel() and int(tokens.max()) >= size:
        raise FormatError(
            "model.vocabulary",
            f"expected tokens below {size}, found {int(tokens.max())}: the tokenizer belongs to another model",
        )


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens in a model's vocabulary."""
    return int(model.config.get_text_config().vocab_size)


def end_tokens(model: Any) -> set[int]:
    """Return the tokens that end a text, from the model's generation config."""
    end_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set(end_ids) if isinstance(end_ids, list) else set() if end_ids is None else {end_ids}


def require_room(model: Any, prompt: int, new: int) -> None:
    """Raise ``generate.no-head`` without a language head, ``generate.prompt`` if the prompt is empty or too long."""
    if not model.can_generate():
        raise UnsupportedError(
            f"expected a model with a language head, found {type(model).__name__}", rule="generate.no-head"
        )
    if not prompt:
        raise UsageError("expected a prompt of at least 1 token, found 0", rule="generate.prompt")
    max_positions = positions(model)
    if max_positions is not None and prompt + new > max_positions:
        raise UsageError(
            f"expected at most {max_positions} tokens, the model's number of positions, found {prompt} in the prompt "
            f"and {new} new ones",
            rule="generate.prompt",
        )


def positions(model: Any) -> int | None:
    """Return the maximum number of positions of a model; None if its config has no number."""
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return max_positions if isinstance(max_positions, int) else None
