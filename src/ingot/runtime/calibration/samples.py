"""Sequences sampled from a language model, for calibration and measurement without a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError
from ingot.runtime.evaluation.generate import vocabulary_size

BATCH = 96
"""Windows that are sampled together, because a pass costs little more for all of them than for one."""

SAMPLES_OF_MODEL = "samples of the model"
SAMPLES_WITHOUT_TOKENIZER = f"{SAMPLES_OF_MODEL}, beside which no tokenizer lies"
"""Names of samples in reports and statistics files; without a tokenizer, the tokens that begin a text are unknown."""

# torch seeds its CPU generator with the lower 32 bits of a number. Calibrations use seeds below 1 << 31. Measurements
# set the highest bit, so that no calibration reads the windows with which a budget is checked.
SEEDS = 1 << 31
HELD_OUT = SEEDS | 0x4B4C


def draw_samples(
    torch: Any,
    model: Any,
    shape: tuple[int, int],
    progress: Progress,
    prefix: Sequence[int] = (),
    cache: Callable[[int], Any] = lambda count: None,
    *,
    device: Any = None,
    together: int = BATCH,
) -> Any:
    """Return sequences drawn with torch's random state, i64 of ``shape``; raise the error of ``require_finite``.

    Each sequence begins with ``prefix``, such as the tokens that the tokenizer adds before a text. ``cache`` creates
    the KV cache for a number of windows; if it returns None, the model creates one. The model computes on ``device``,
    by default the CPU, for ``together`` windows at once.
    """
    count, length = shape
    drawn = []
    with torch.no_grad():  # not inference mode: other passes may also use a layer that is loaded here
        for first in range(0, count, together):
            batch = min(together, count - first)
            drawn.append(_draw_batch(torch, model, (batch, length), prefix, cache(batch), progress, device))
    return torch.cat(drawn).clone()


def _draw_batch(
    torch: Any,
    model: Any,
    shape: tuple[int, int],
    prefix: Sequence[int],
    cache: Any,
    progress: Progress,
    device: Any,
) -> Any:
    """Return sequences sampled at temperature 1 after the prefix, or after a uniformly drawn token without a prefix."""
    count, length = shape
    last = first_tokens(torch, model, count, prefix)
    tokens = [last]
    progress.advance(last.numel(), "samples")
    for _ in range(length - last.shape[1]):
        last, cache = draw_token(torch, model, last, cache, device)
        tokens.append(last)
        progress.advance(count, "samples")
    return torch.cat(tokens, 1)


def draw(torch: Any, probabilities: Any) -> Any:
    """Draw one index per row by the probabilities: i64 [rows, 1], with torch's random state of the CPU.

    If the rows are on another device, one random number per row is copied there.
    """
    if probabilities.device.type == "cpu":
        return torch.multinomial(probabilities, 1)
    sums = probabilities.cumsum(-1)
    heights = torch.rand(len(sums), 1).to(sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, heights, right=True).clamp_(max=sums.shape[-1] - 1)


def first_tokens(torch: Any, model: Any, count: int, prefix: Sequence[int]) -> Any:
    """Return the first tokens of samples, i64 [count, tokens]: the prefix, or a uniformly drawn token."""
    if prefix:
        return torch.tensor([[*prefix]]).expand(count, -1)
    return torch.randint(vocabulary_size(model), (count, 1))


def draw_token(torch: Any, model: Any, last: Any, cache: Any, device: Any = None) -> tuple[Any, Any]:
    """Return the next token of each sequence, i64 [count, 1] on the CPU, and the KV cache that includes ``last``.

    The model computes on ``device``, by default the CPU.
    """
    out = model(input_ids=last if device is None else last.to(device), past_key_values=cache, use_cache=True)
    return draw(torch, require_finite(torch, out.logits[:, -1]).softmax(-1)).cpu(), out.past_key_values


def require_finite(torch: Any, logits: Any) -> Any:
    """Return the logits; raise ``IntegrityError`` ``calibrate.value`` for NaN or infinity."""
    if not torch.isfinite(logits).all():
        raise IntegrityError(
            "calibrate.value", "expected finite logits, found NaN or infinity: the weights are damaged"
        )
    return logits


@contextmanager
def seeded(torch: Any, seed: int) -> Iterator[None]:
    """Set torch's seed in this context; afterwards restore the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
