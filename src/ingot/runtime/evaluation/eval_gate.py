"""Gates of ``ingot eval``: limits for a model, such as ``kl<0.02,ppl<1.01x``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ingot.core.suggest import did_you_mean
from ingot.errors import UsageError

RULE = "eval.gate"
NAMES = {
    "ppl": "perplexity",
    "kl": "kl",
    "kl_median": "kl_median",
    "kl_p99": "kl_p99",
    "kl_max": "kl_max",
    "agreement": "agreement",
    "top_k": "top_k",
    "layer_error": "layer_error",
    "layer_cosine": "layer_cosine",
}
"""The figure for each name that a term may use."""
WITHOUT_REFERENCE = frozenset({"perplexity"})
"""Figures that need no reference."""
_TERM = re.compile(r"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*(x|%|)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Term:
    """A limit on a figure; if ``relative``, ``bound`` is a multiple of the reference's figure."""

    text: str
    figure: str
    operator: str
    bound: float
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A term, the measured value (for a relative term the ratio to the reference), and whether it meets the bound."""

    term: str
    found: float
    met: bool


def parse_gate(text: str) -> list[Term]:
    """Return the terms of a gate: ``NAME<VALUE``, also with ``<=``, ``>`` or ``>=``, separated by commas.

    ``ppl<1.01x`` is a multiple of the reference's perplexity, ``agreement>98%`` a percentage. Raises ``UsageError``
    ``eval.gate``.
    """
    return [_term(item) for item in text.split(",")]


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise UsageError(
            f"expected terms such as kl<0.02, ppl<1.01x or agreement>98%, commas between, found {text.strip()!r:.80}",
            rule=RULE,
        )
    name, sign, number, unit = match.groups()
    if name not in NAMES:
        raise UsageError(
            f"expected one of {', '.join(NAMES)} in --gate, found {name!r:.80}{did_you_mean(name, NAMES)}", rule=RULE
        )
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise UsageError(f"expected a number after {name}{sign}, found {number!r:.80}", rule=RULE)
    if unit == "x" and name != "ppl":
        raise UsageError(f"only ppl can be a multiple of the reference's, found {text.strip()!r:.80}", rule=RULE)
    return Term(text.strip(), NAMES[name], sign, bound / 100 if unit == "%" else bound, unit == "x")


def require_measured(terms: Sequence[Term], measured: Collection[str], *, reference: bool) -> None:
    """Raise ``UsageError`` ``eval.gate`` if a term needs a figure that the run will not measure."""
    for term in terms:
        if (term.relative or term.figure not in WITHOUT_REFERENCE) and not reference:
            raise UsageError(f"{term.text!r} needs a model to compare with: add --reference", rule=RULE)
        if term.figure not in measured:
            raise UsageError(
                f"{term.text!r} needs a figure that is not measured: add {_OPTIONS[term.figure]}", rule=RULE
            )


_OPTIONS = {
    **dict.fromkeys(("kl_median", "kl_p99", "kl_max"), "--kl"),
    **dict.fromkeys(("layer_error", "layer_cosine"), "--per-layer"),
    "top_k": "--top-k N",
}


def check_terms(terms: Sequence[Term], figures: Mapping[str, float], relative: Mapping[str, float]) -> list[Verdict]:
    """Return the verdict on each term; NaN meets no term."""
    verdicts = []
    for term in terms:
        value = (relative if term.relative else figures)[term.figure]
        verdicts.append(Verdict(term.text, value, _OPERATORS[term.operator](value, term.bound)))
    return verdicts
