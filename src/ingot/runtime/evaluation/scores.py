"""Sums over the windows of a text that perplexity, KL and agreement are made from, and what they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.bootstrap import Interval, interval
from ingot.runtime.loading.transformers_config import EXTRA

Array = np.ndarray[Any, np.dtype[Any]]

_LOSS, _WANTED, _KL, _SAME, _TOP, _ROUNDED, _COUNT = range(7)


@dataclass(slots=True)
class Scores:
    """What each window read so far adds to the sums; ``spread`` keeps the KL of every token, ``rounded`` takes what the
    model's rounding of activations adds."""

    compared: bool = False
    top_k: int | None = None
    spread: bool = False
    rounded: bool = False
    _sums: list[list[float]] = field(default_factory=list)
    _kl: list[Array] = field(default_factory=list)

    def add(self, logits: Any, targets: Any, wanted: Any | None, exact: Any | None = None) -> None:
        """Add one window: logits f32 [tokens, vocabulary], the tokens that came, the reference's logits or None, and
        the model's own in exact mode, where ``rounded``.

        KL(reference || model) is sum of p (log p - log q) over the vocabulary, in nats.
        """
        torch = require("torch", EXTRA)
        functional = torch.nn.functional
        row = [0.0] * 7
        ours = functional.log_softmax(logits, -1)
        row[_LOSS] = float(functional.nll_loss(ours, targets, reduction="sum"))
        row[_COUNT] = len(targets)
        if exact is not None:
            row[_ROUNDED] = float(
                _divergence(functional, ours, functional.log_softmax(exact, -1)).sum(dtype=torch.float64)
            )
        if wanted is not None:
            theirs = functional.log_softmax(wanted, -1)
            row[_WANTED] = float(functional.nll_loss(theirs, targets, reduction="sum"))
            each = _divergence(functional, ours, theirs)
            row[_KL] = float(each.sum(dtype=torch.float64))
            row[_SAME] = float((ours.argmax(-1) == theirs.argmax(-1)).sum())
            if self.top_k is not None:
                row[_TOP] = _shared(ours, theirs, self.top_k)
            if self.spread:
                self._kl.append(each.cpu().numpy())
        self._sums.append(row)

    def figures(self) -> dict[str, float]:
        """Return the figures over all windows by name; those of a comparison where there is a reference."""
        table = np.array(self._sums)
        found = {name: float(of(table.sum(0, keepdims=True))[0]) for name, of in self._made().items()}
        if self._kl:
            every = np.concatenate(self._kl)
            with np.errstate(invalid="ignore"):  # infinities, which tell by what comes out
                found["kl_median"], found["kl_p99"] = map(float, np.quantile(every, (0.5, 0.99)))
            found["kl_max"] = float(every.max())
        return found

    def intervals(self, resamples: int, seed: int) -> dict[str, Interval]:
        """Return the figures' intervals of 95 % over windows drawn again; none where there are too few to tell."""
        table = np.array(self._sums)
        found = {name: interval(table, of, resamples, seed) for name, of in self._made().items()}
        return {name: value for name, value in found.items() if value is not None}

    def _made(self) -> Mapping[str, Any]:
        """Return the figures by name, as functions of sums over windows: f64 [..., terms]."""
        made = {"perplexity": lambda sums: exp(sums[:, _LOSS] / sums[:, _COUNT])}
        if self.compared:
            made |= {
                "reference_perplexity": lambda sums: exp(sums[:, _WANTED] / sums[:, _COUNT]),
                "perplexity_ratio": lambda sums: exp((sums[:, _LOSS] - sums[:, _WANTED]) / sums[:, _COUNT]),
                "kl": lambda sums: sums[:, _KL] / sums[:, _COUNT],
                "agreement": lambda sums: sums[:, _SAME] / sums[:, _COUNT],
            }
        if self.rounded:
            made["compute_kl"] = lambda sums: sums[:, _ROUNDED] / sums[:, _COUNT]
        if self.compared and self.top_k is not None:
            made["top_k"] = lambda sums: sums[:, _TOP] / sums[:, _COUNT]
        return made


def _divergence(functional: Any, ours: Any, theirs: Any) -> Any:
    """Return KL(theirs || ours) of every token, from logarithms of probabilities."""
    return functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def _shared(ours: Any, theirs: Any, count: int) -> float:
    """Return, summed over tokens, the share of the ``count`` likeliest of one that are among those of the other."""
    first, second = (each.topk(count, -1).indices for each in (ours, theirs))
    among = ours.new_zeros(ours.shape, dtype=bool).scatter_(-1, second, True)
    return float(among.gather(-1, first).sum()) / count


def exp(values: Array) -> Array:
    """Return exp, infinity where it has no number."""
    with np.errstate(over="ignore"):
        result: Array = np.exp(values)
    return result
