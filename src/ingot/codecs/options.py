"""Checks that the options of several encoders share: names, ranges, source dtypes and weights of columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import UnsupportedError, UsageError
from ingot.model.tensor import Array

IMPORTANCE = "importance"


def option_error(codec: str, expected: str, value: object) -> UsageError:
    """Return the error ``<codec>.option`` for the value of an option."""
    return UsageError(f"codec {codec} expects {expected}, found {value!r:.80}", rule=f"{codec}.option")


def require_known(codec: str, options: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ``UsageError`` ``<codec>.option`` if an option has a name that is not in ``names``."""
    unknown = sorted(str(key) for key in options if key not in names)
    if unknown:
        raise option_error(codec, f"the options {', '.join(names)}", unknown[0])


def source_dtype(codec: str, dtype: str, supported: Collection[str]) -> str:
    """Return the name of the weights' dtype; ``UnsupportedError`` ``<codec>.dtype`` if it is not ``supported``."""
    source = resolve_dtype(dtype).name
    if source not in supported:
        raise UnsupportedError(
            f"expected weights of type {', '.join(supported)}, found {source}; keep this tensor dense",
            rule=f"{codec}.dtype",
        )
    return source


def is_int_between(value: object, low: int, high: int) -> bool:
    """Return whether ``value`` is an integer from ``low`` to ``high``; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def column_weights(codec: str, options: Mapping[str, Any], cols: int) -> Array | None:
    """Return the weight of each column's squared errors (f64, [cols]); None if option ``importance`` is not set.

    Raises ``UsageError`` ``<codec>.option`` unless the option has a finite number from 0 on for each column, and not
    all are 0.
    """
    importance = options.get(IMPORTANCE)
    if importance is None:
        return None
    if not isinstance(importance, Sequence | np.ndarray) or isinstance(importance, str | bytes):
        raise option_error(codec, "importance as a list of numbers", importance)
    try:
        weights = np.ascontiguousarray(importance, np.float64)
    except (TypeError, ValueError):
        raise option_error(codec, "importance as a list of numbers", importance) from None
    if weights.shape != (cols,) or not (np.isfinite(weights) & (weights >= 0)).all():
        raise option_error(codec, f"{cols} importance weights, finite and not negative", weights.shape)
    if not weights.any():
        raise option_error(codec, "an importance above 0", 0)
    return weights
