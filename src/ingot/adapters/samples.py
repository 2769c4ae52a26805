"""Sequences that a language model draws itself: what it is calibrated and measured on where no text is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ingot.adapters.generate import vocabulary
from ingot.core.progress import Progress
from ingot.errors import IntegrityError

_DRAWN = 96  # windows that are drawn together: a pass for one token of each takes little more than for one


def samples_of(torch: Any, model: Any, count: int, length: int, progress: Progress) -> Any:
    """Return sequences by torch's random state: i64 [count, length]; errors as ``finite``."""
    drawn = []
    with torch.inference_mode():
        for first in range(0, count, _DRAWN):
            drawn.append(_sampled(torch, model, min(_DRAWN, count - first), length))
            progress.advance(drawn[-1].numel(), "samples")
    return torch.cat(drawn).clone()


def _sampled(torch: Any, model: Any, count: int, length: int) -> Any:
    """Return sequences that the model draws: the first token uniform, the others at temperature 1."""
    last = torch.randint(vocabulary(model), (count, 1))
    tokens, cache = [last], None
    while len(tokens) < length:
        out = model(input_ids=last, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        last = torch.multinomial(finite(torch, out.logits[:, -1]).softmax(-1), 1)
        tokens.append(last)
    return torch.cat(tokens, 1)


def finite(torch: Any, logits: Any) -> Any:
    """Return the logits; NaN and infinity are an ``IntegrityError`` ``calibrate.value``."""
    if not torch.isfinite(logits).all():
        raise IntegrityError(
            "calibrate.value", "expected finite logits, found NaN or infinity: the weights are damaged"
        )
    return logits


@contextmanager
def seeded(torch: Any, seed: int) -> Iterator[None]:
    """Draw from a seed, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
