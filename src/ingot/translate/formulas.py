"""Evaluation of the formulas in family records, such as ``num_attention_heads*head_dim``, for a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import UnsupportedError
from ingot.translate.config_numbers import head_size, heads, integer

_MAX_SIZE = 1 << 40


def evaluate(formula: str | int, config: Mapping[str, Any]) -> int:
    """Return the value of a formula: a sum of products and quotients of integers and config keys.

    ``a!=b`` is 1 if the formulas ``a`` and ``b`` differ, otherwise 0.

    Raises ``UnsupportedError`` ``architecture.config``: a key is missing or not a positive integer, or the result is
    out of range.
    """
    if isinstance(formula, int):
        return formula
    first, unequal, second = formula.partition("!=")
    if unequal:
        return int(evaluate(first, config) != evaluate(second, config))
    total = sum(_term(term, config) for term in formula.split("+"))
    if not 0 <= total < _MAX_SIZE:
        raise UnsupportedError(f"{formula} is {total}, which is out of range", rule="architecture.config")
    return total


def resolve_shape(sizes: Sequence[str | int], total: int, config: Mapping[str, Any]) -> list[int] | None:
    """Return sizes whose product is ``total``; None if it is not. One size may be -1: the remaining factor."""
    values = [evaluate(size, config) for size in sizes]
    product = 1
    for value in values:
        product *= value if value != -1 else 1
    if -1 in values:
        if product == 0 or total % product:
            return None
        return [total // product if value == -1 else value for value in values]
    return values if product == total else None


def _term(term: str, config: Mapping[str, Any]) -> int:
    first, *divisors = term.split("/")
    value = 1
    for factor in first.split("*"):
        value *= _factor(factor.strip(), config)
    for divisor in divisors:
        value //= max(_factor(divisor.strip(), config), 1)
    return value


def _factor(text: str, config: Mapping[str, Any]) -> int:
    if text.removeprefix("-").isdigit():
        return int(text)
    if text == "head_dim":
        return head_size(config)
    if text == "num_key_value_heads":
        return heads(config)[1]
    return integer(config, text)
