"""Sums over the windows of a text, from which perplexity, KL and agreement are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.bootstrap import Interval, interval
from ingot.runtime.loading.transformers_config import EXTRA

Array = np.ndarray[Any, np.dtype[Any]]

_LOSS, _REFERENCE_LOSS, _KL, _SAME, _TOP, _ROUNDED, _COUNT = range(7)


@dataclass(slots=True)
class Scores:
    """Sums over the tokens of each window.

    ``compared`` states whether there is a reference. If ``spread`` is set, the KL of every token is stored. If
    ``rounded`` is set, the KL between the model with exact inputs and the model with inputs rounded to int8 is summed
    too.
    """

    compared: bool = False
    top_k: int | None = None
    spread: bool = False
    rounded: bool = False
    _sums: list[list[float]] = field(default_factory=list)
    _kl: list[Array] = field(default_factory=list)

    def add(self, logits: Any, targets: Any, reference: Any | None, exact: Any | None = None) -> None:
        """Add a window to the sums.

        ``logits`` are f32 [tokens, vocabulary], and ``targets`` the actual tokens. ``reference`` has the logits of the
        reference, None without a reference.

        If ``rounded`` is set, ``exact`` must contain the model's logits with inputs that are not rounded.

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
                _divergence(functional, ours, functional.log_softmax(exact, -1)).cpu().sum(dtype=torch.float64)
            )
        if reference is not None:
            theirs = functional.log_softmax(reference, -1)
            row[_REFERENCE_LOSS] = float(functional.nll_loss(theirs, targets, reduction="sum"))
            divergences = _divergence(functional, ours, theirs).cpu()  # not all devices support f64 for the sum
            row[_KL] = float(divergences.sum(dtype=torch.float64))
            row[_SAME] = float((ours.argmax(-1) == theirs.argmax(-1)).sum())
            if self.top_k is not None:
                row[_TOP] = _shared_top_k(ours, theirs, self.top_k)
            if self.spread:
                self._kl.append(divergences.numpy())
        self._sums.append(row)

    def figures(self) -> dict[str, float]:
        """Return the figures over all windows, keyed by name, including comparisons if there is a reference."""
        table = np.array(self._sums)
        figures = {name: float(formula(table.sum(0, keepdims=True))[0]) for name, formula in self._formulas().items()}
        if self._kl:
            divergences = np.concatenate(self._kl)
            with np.errstate(invalid="ignore"):  # infinities give NaN, which is the intended result
                figures["kl_median"], figures["kl_p99"] = map(float, np.quantile(divergences, (0.5, 0.99)))
            figures["kl_max"] = float(divergences.max())
        return figures

    def intervals(self, resamples: int, seed: int) -> dict[str, Interval]:
        """Return 95 % bootstrap intervals over windows, keyed by figure; figures with too few windows are absent."""
        table = np.array(self._sums)
        figures = {name: interval(table, formula, resamples, seed) for name, formula in self._formulas().items()}
        return {name: value for name, value in figures.items() if value is not None}

    def _formulas(self) -> Mapping[str, Any]:
        """Return the formula of each figure: a function that computes it from sums over windows, f64 [..., terms]."""
        formulas = {"perplexity": lambda sums: exp(sums[:, _LOSS] / sums[:, _COUNT])}
        if self.compared:
            formulas |= {
                "reference_perplexity": lambda sums: exp(sums[:, _REFERENCE_LOSS] / sums[:, _COUNT]),
                "perplexity_ratio": lambda sums: exp((sums[:, _LOSS] - sums[:, _REFERENCE_LOSS]) / sums[:, _COUNT]),
                "kl": lambda sums: sums[:, _KL] / sums[:, _COUNT],
                "agreement": lambda sums: sums[:, _SAME] / sums[:, _COUNT],
            }
        if self.rounded:
            formulas["compute_kl"] = lambda sums: sums[:, _ROUNDED] / sums[:, _COUNT]
        if self.compared and self.top_k is not None:
            formulas["top_k"] = lambda sums: sums[:, _TOP] / sums[:, _COUNT]
        return formulas


def _divergence(functional: Any, ours: Any, theirs: Any) -> Any:
    """Return KL(theirs || ours) of each token, given log probabilities."""
    return functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def _shared_top_k(ours: Any, theirs: Any, count: int) -> float:
    """Return the sum over tokens of the share of the ``count`` likeliest tokens that both have in common."""
    first, second = (logits.topk(count, -1).indices for logits in (ours, theirs))
    among = ours.new_zeros(ours.shape, dtype=bool).scatter_(-1, second, True)
    return float(among.gather(-1, first).sum()) / count


def exp(values: Array) -> Array:
    """Return the exponential of the values; infinity on overflow."""
    with np.errstate(over="ignore"):
        result: Array = np.exp(values)
    return result
