"""Reading and comparison of numbers in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError

RULE = "architecture.config"


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads; raises ``UnsupportedError`` ``architecture.config``."""
    count = integer(config, "num_attention_heads")
    return count, integer(config, "num_key_value_heads", count)


def head_size(config: Mapping[str, Any]) -> int:
    """Return the size of a head: declared, or the hidden size divided by the number of heads.

    Raises ``UnsupportedError`` ``architecture.config``.
    """
    size = config.get("head_dim") or integer(config, "hidden_size") // heads(config)[0]
    return integer({"head_dim": size}, "head_dim")


def is_number(value: Any) -> bool:
    """Return whether a value is one number, and not a list with a number per layer."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal; numbers are compared with the precision of f32."""
    if isinstance(first, float | int) and isinstance(second, float | int) and not isinstance(first, bool):
        return first == second or abs(first - second) <= 1e-6 * abs(first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    return bool(first == second)


def nested_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or of ``outer.inner`` in a nested object; None if the key is missing."""
    outer, dot, inner = key.partition(".")
    if not dot:
        return config.get(key)
    nested = config.get(outer)
    return nested.get(inner) if isinstance(nested, Mapping) else None


def set_nested(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a key, or of ``outer.inner`` in a nested object."""
    outer, dot, inner = key.partition(".")
    if not dot:
        config[key] = value
        return
    nested = config.get(outer)
    config[outer] = {**(nested if isinstance(nested, Mapping) else {}), inner: value}


def largest(value: Any) -> Any:
    """Return the largest integer of a list with a value per layer; any other value unchanged."""
    is_list = isinstance(value, list) and value and all(type(item) is int for item in value)
    return max(value) if is_list else value


def shorten(value: Any) -> Any:
    """Return the shortest decimal with the same f32 value: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of the config; raises ``UnsupportedError`` ``architecture.config``."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < 2**32:
        raise number_error(key, "an integer above 0", value)
    return value


def config_number(config: Mapping[str, Any], key: str, gguf_type: str) -> int | float:
    """Return a value as GGUF's type ``bool``, ``u32`` or ``f32``.

    Raises ``UnsupportedError`` ``architecture.config``: the value does not fit the type.
    """
    value = config[key]
    if gguf_type == "bool":
        if not isinstance(value, bool):
            raise number_error(key, "true or false", value)
        return value
    if gguf_type == "u32":
        if type(value) is not int or not 0 <= value < 2**32:
            raise number_error(key, "an integer from 0 to 2^32 - 1", value)
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise number_error(key, "a number", value)
    return float(value)


def number_error(key: str, expected: str, value: object) -> UnsupportedError:
    """Build the error for a hyperparameter that is not the expected number."""
    return UnsupportedError(
        f"expected {expected} as the model's {key}, found {value!r:.80}; correct config.json, or convert to or from "
        "GGUF with --keep-names, which does not need it",
        rule=RULE,
    )
