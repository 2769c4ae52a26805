"""Gates of ``ingot eval``: what a model must keep to, such as ``kl<0.02,ppl<1.01x``."""

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
"""What a term may name, and the figure that it is."""
ALONE = frozenset({"perplexity"})
"""The figures that a model has without a reference."""
_TERM = re.compile(r"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*(x|%|)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Term:
    """One bound on a figure; ``relative`` is a multiple of the reference's."""

    text: str
    figure: str
    operator: str
    bound: float
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A term, what was found (of a relative one the ratio to the reference's), and whether it keeps to it."""

    term: str
    found: float
    met: bool


def parse_gate(text: str) -> list[Term]:
    """Return the terms of a gate: ``NAME<VALUE``, ``<=``, ``>`` or ``>=``, with commas between.

    ``ppl<1.01x`` is a multiple of the reference's perplexity, ``agreement>98%`` a share. Raises ``UsageError``
    ``eval.gate``.
    """
    return [_term(each) for each in text.split(",")]


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
        raise UsageError(f"expected a multiple of the reference's for ppl alone, found {text.strip()!r:.80}", rule=RULE)
    return Term(text.strip(), NAMES[name], sign, bound / 100 if unit == "%" else bound, unit == "x")


def require_measured(terms: Sequence[Term], measured: Collection[str], *, reference: bool) -> None:
    """Refuse, before anything is measured, terms on what will not be: ``UsageError`` ``eval.gate``."""
    for term in terms:
        if (term.relative or term.figure not in ALONE) and not reference:
            raise UsageError(f"{term.text!r} needs a model to compare with: add --reference", rule=RULE)
        if term.figure not in measured:
            raise UsageError(f"{term.text!r} is on what is not measured: add {_WANTED[term.figure]}", rule=RULE)


_WANTED = {
    **dict.fromkeys(("kl_median", "kl_p99", "kl_max"), "--kl"),
    **dict.fromkeys(("layer_error", "layer_cosine"), "--per-layer"),
    "top_k": "--top-k N",
}


def judged(terms: Sequence[Term], figures: Mapping[str, float], relative: Mapping[str, float]) -> list[Verdict]:
    """Return what each term finds; a figure that is not a number keeps to none."""
    found = []
    for term in terms:
        value = (relative if term.relative else figures)[term.figure]
        found.append(Verdict(term.text, value, _OPERATORS[term.operator](value, term.bound)))
    return found
