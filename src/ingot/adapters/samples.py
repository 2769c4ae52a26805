"""Sequences that a language model draws itself: what it is calibrated and measured on where no text is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ingot.adapters.generate import vocabulary
from ingot.core.progress import Progress
from ingot.errors import IntegrityError

DRAWN = 96
"""Windows that are drawn together: a pass for one token of each takes little more than for one."""

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
    cache: Callable[[int], Any] = lambda count: None,
) -> Any:
    """Return sequences by torch's random state: i64 [count, length]; errors as ``finite``.

    ``cache`` makes what keys and values are kept in, of so many windows; None leaves it to the model.
    """
    drawn = []
    with torch.no_grad():  # a layer that is loaded on the way may serve other passes too
        for first in range(0, count, DRAWN):
            some = min(DRAWN, count - first)
            drawn.append(_sampled(torch, model, (some, length), cache(some), progress))
    return torch.cat(drawn).clone()


def _sampled(torch: Any, model: Any, shape: tuple[int, int], cache: Any, progress: Progress) -> Any:
    """Return sequences that the model draws: the first token uniform, the others at temperature 1."""
    count, length = shape
    last = torch.randint(vocabulary(model), (count, 1))
    tokens = [last]
    progress.advance(count, "samples")
    while len(tokens) < length:
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
