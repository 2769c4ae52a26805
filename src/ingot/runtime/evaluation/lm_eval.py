"""Models that Ingot loads, for the lm-evaluation-harness, under the model name ``ingot``.

Importing this module registers the name. ``python -m ingot.lm_eval`` imports it and then runs the harness, which cannot
find models in other packages by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - the harness lists its models only while no other is registered
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ingot.errors import UnsupportedError, UsageError
from ingot.runtime.evaluation.generate import end_tokens, greedy, require_room
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

_AUTO_BATCH = 8
_DEFAULT_LENGTH = 2048
_NEW_TOKENS = 256

# A request: the key of the harness's cache (context and continuation), the context tokens, the tokens to score.
_Request = tuple[Any, list[int], list[int]]


@register_model("ingot")
class IngotLM(TemplateLM):  # type: ignore[misc, unused-ignore]
    """A causal language model from any checkpoint that Ingot opens.

    Parameters
    ----------
    path : str
        Path for ``load_model``; ``pretrained`` is an alias, as in other models of the harness.
    dtype : str
        ``auto`` uses the dtype that ``config.json`` declares.
    keep_packed : bool
    device : str
    batch_size : int or str
        Requests per pass of the model; ``auto`` is 8.
    max_batch_size : int, optional
        Maximum number of requests per pass.
    add_bos_token : bool, optional
        Whether the BOS token is added to texts; by default the tokenizer decides, as for the harness's model ``hf``.
    max_length : int, optional
        Maximum number of tokens per pass; by default the model's positions, or 2048 if its config has no number.
    **options :
        Further options of ``load_model``.

    Raises
    ------
    UsageError
        ``lm-eval.path``: no path; ``lm-eval.batch``: ``batch_size`` is not ``auto`` or a number of at least 1.
    IngotError
        The errors of ``load_model``; ``model.tokenizer``.
    """

    def __init__(
        self,
        path: str | None = None,
        dtype: str = "auto",
        keep_packed: bool = False,
        device: str = "cpu",
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.path = path or options.pop("pretrained", None)
        if not self.path:
            raise UsageError("expected --model_args path=FOLDER", rule="lm-eval.path")
        max_count = options.pop("max_batch_size", None)
        self._max_length = options.pop("max_length", None)
        self._add_bos: bool | None = options.pop("add_bos_token", None)
        self.batch_size = _batch_size(batch_size, max_count)
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # the harness's default is cuda:0
        self.model = load_model(self.path, device, dtype, keep_packed, **options)
        require_room(self.model, 1, 0)
        self.tokenizer = load_tokenizer(self.path, add_bos_token=self._add_bos)
        self._device = self.model.device

    @property
    def max_length(self) -> int:
        """The maximum number of tokens per pass."""
        named = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(self._max_length or named or _DEFAULT_LENGTH)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text; None if the model has none."""
        token: int | None = self.tokenizer.eos_token_id
        return token if token is not None else next(iter(sorted(end_tokens(self.model))), None)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context: BOS, else the token that ends a text."""
        token = self._prefix()
        if token is None:
            raise UsageError(
                "this model has no token to begin a text with: use a task whose contexts are not empty",
                rule="lm-eval.prefix",
            )
        return token

    def _prefix(self) -> int | None:
        token: int | None = self.tokenizer.bos_token_id
        return token if token is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, with special tokens if requested.

        By default the tokenizer adds its special tokens, unless the text already begins with BOS. The harness's model
        ``hf`` does the same.
        """
        add_special = self._add_bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and self._begins(string):
            add_special = False
        options = {} if add_special is None else {"add_special_tokens": add_special}
        return list(self.tokenizer(string, **options, verbose=False).input_ids)

    def _begins(self, text: str) -> bool:
        """Return whether a text already begins with the BOS token."""
        prefix = self._prefix()
        begin = "" if prefix is None else self.tokenizer.decode([prefix])
        return bool(begin) and text.startswith(begin)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text; each token is scored once, with as much context as fits."""
        scores = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            pairs: list[_Request] = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(score for score, _ in self._loglikelihood_tokens(pairs))
            scores.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return scores

    def _loglikelihood_tokens(self, requests: Sequence[_Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of the tokens to score, and whether all were the likeliest."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        scores: dict[int, tuple[float, bool]] = {}
        for batch in _cut(order, self.batch_size):
            for index, answer in zip(batch, self._score([requests[i] for i in batch]), strict=True):
                scores[index] = answer
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return [scores[index] for index in range(len(requests))]

    def _score(self, batch: Sequence[_Request]) -> Iterator[tuple[float, bool]]:
        """Yield the scores of a batch. Texts are padded on the right, where padding does not affect causal models."""
        texts = [(before + after)[-self.max_length - 1 :][:-1] for _, before, after in batch]
        longest = max(map(len, texts))
        rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=self._device)
        with torch.inference_mode():
            logits = self.model(input_ids=rows, use_cache=False).logits
            for row, text, (_, _, after) in zip(logits, texts, batch, strict=True):
                targets = torch.tensor(after[-len(text) :], device=row.device)
                scores = torch.log_softmax(row[len(text) - len(targets) : len(text)].float(), -1)
                likely = bool((scores.argmax(-1) == targets).all())
                yield float(scores.gather(-1, targets[:, None]).sum()), likely

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy continuations, each cut before the request's first stop text."""
        texts = []
        for request in requests:
            context, settings = request.args
            text = self._continue(context, normalize_gen_kwargs(settings, _NEW_TOKENS))
            texts.append(text)
            self.cache_hook.add_partial("generate_until", (context, settings), text)
        return texts

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample"):
            raise UnsupportedError("expected a greedy task, but this task samples", rule="lm-eval.sampling")
        ends, count = end_tokens(self.model), int(settings["max_gen_toks"])
        eot = self.eot_token_id
        stops = handle_stop_sequences(settings.get("until"), None if eot is None else self.tokenizer.decode([eot]))
        tokens = self.tok_encode(context)[-(self.max_length - count) :] if count < self.max_length else []
        if not tokens:
            limit = self.max_length - count
            raise UsageError(f"expected a context of 1 to {limit} tokens, found 0", rule="lm-eval.context")

        def text_of(new: list[int]) -> str:
            return str(self.tokenizer.decode([token for token in new if token not in ends]))

        def enough(new: list[int]) -> bool:
            return new[-1] in ends or any(stop and stop in text_of(new) for stop in stops)

        new, _ = greedy(self.model, torch.tensor([tokens], device=self._device), count, enough)
        text = text_of(new)
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text


def _batch_size(requested: int | str, max_count: Any) -> int:
    text = str(requested)
    count = _AUTO_BATCH if text.startswith("auto") else int(text) if text.isdecimal() else 0
    if count < 1:
        raise UsageError(f"expected a batch size from 1 or auto, found {text[:80]!r}", rule="lm-eval.batch")
    return min(count, int(max_count)) if max_count else count


def _cut(items: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))
