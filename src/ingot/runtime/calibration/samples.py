"""Sequences that a language model draws itself: what it is calibrated and measured on where no text is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError
from ingot.runtime.evaluation.generate import vocabulary_size

DRAWN = 96
"""Windows that are drawn together: a pass for one token of each takes little more than for one."""

SAMPLES_OF_MODEL = "samples of the model"
SAMPLES_WITHOUT_TOKENIZER = f"{SAMPLES_OF_MODEL}, beside which no tokenizer lies"
"""What reports and statistics files call them. Without a tokenizer it is not known what a text begins with."""

# torch seeds its generator of the CPU with the lower 32 bits of a number alone. Calibrations may take those without
# the highest, what is measured is drawn with it: nobody can calibrate on the windows that a budget is judged by.
SEEDS = 1 << 31
HELD_OUT = SEEDS | 0x4B4C


def samples_of(
    torch: Any,
    model: Any,
    count: int,
    length: int,
    progress: Progress,
    prefix: Sequence[int] = (),
    cache: Callable[[int], Any] = lambda count: None,
) -> Any:
    """Return sequences by torch's random state: i64 [count, length]; errors as ``finite``.

    Each begins with ``prefix``, the tokens that the tokenizer puts before a text. ``cache`` makes the cache of keys and
    values for a number of windows; None leaves it to the model.
    """
    drawn = []
    with torch.no_grad():  # a layer that is loaded on the way may serve other passes too
        for first in range(0, count, DRAWN):
            some = min(DRAWN, count - first)
            drawn.append(_sampled(torch, model, (some, length), prefix, cache(some), progress))
    return torch.cat(drawn).clone()


def _sampled(
    torch: Any, model: Any, shape: tuple[int, int], prefix: Sequence[int], cache: Any, progress: Progress
) -> Any:
    """Return sequences that the model draws at temperature 1, after the prefix or else a uniformly drawn token."""
    count, length = shape
    last = torch.tensor([[*prefix]]).expand(count, -1) if prefix else torch.randint(vocabulary_size(model), (count, 1))
    tokens = [last]
    progress.advance(last.numel(), "samples")
    for _ in range(length - last.shape[1]):
        out = model(input_ids=last, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        last = torch.multinomial(finite(torch, out.logits[:, -1]).softmax(-1), 1)
        tokens.append(last)
        progress.advance(count, "samples")
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
