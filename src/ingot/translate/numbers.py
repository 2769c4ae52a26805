"""Numbers of ``config.json``: what they have to be, and whether two are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError

RULE = "architecture.config"


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of heads and of key-value heads; raises ``UnsupportedError`` ``architecture.config``."""
    count = integer(config, "num_attention_heads")
    return count, integer(config, "num_key_value_heads", count)


def head_size(config: Mapping[str, Any]) -> int:
    """Return the numbers that a head has, stated or an equal share of all; errors as ``heads``."""
    size = config.get("head_dim") or integer(config, "hidden_size") // heads(config)[0]
    return integer({"head_dim": size}, "head_dim")


def is_number(value: Any) -> bool:
    """Whether this is one number, and not one for each layer."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers as nearly as f32 tells."""
    if isinstance(one, float | int) and isinstance(other, float | int) and not isinstance(one, bool):
        return one == other or abs(one - other) <= 1e-6 * abs(one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def short(value: Any) -> Any:
    """Return the shortest number that is the same in f32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number above 0; raises ``UnsupportedError`` ``architecture.config``."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < 2**32:
        raise wrong(key, "a whole number above 0", value)
    return value


def number(config: Mapping[str, Any], key: str, kind: str) -> int | float:
    """Return a value as one of GGUF's types; errors as ``integer``."""
    value = config[key]
    if kind == "bool":
        if not isinstance(value, bool):
            raise wrong(key, "true or false", value)
        return value
    if kind == "u32":
        if type(value) is not int or not 0 <= value < 2**32:
            raise wrong(key, "a whole number", value)
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(key, "a number", value)
    return float(value)


def wrong(key: str, expected: str, found: object) -> UnsupportedError:
    """Make the error of a hyperparameter that is no such number."""
    return UnsupportedError(
        f"expected {expected} as the model's {key}, found {found!r:.80}; correct config.json, or convert to or from "
        "GGUF with --keep-names, which does without it",
        rule=RULE,
    )
