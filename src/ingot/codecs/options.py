"""What encoders ask of their options alike: known names, and the refusal of a value; what columns weigh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import UnsupportedError, UsageError
from ingot.model.tensor import Array

IMPORTANCE = "importance"


def wrong_option(codec: str, expected: str, found: object) -> UsageError:
    """Return the refusal ``<codec>.option`` of an option's value."""
    return UsageError(f"codec {codec} expects {expected}, found {found!r:.80}", rule=f"{codec}.option")


def require_known(codec: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse options of other names than ``known``: ``UsageError`` ``<codec>.option``."""
    unknown = sorted(str(key) for key in options if key not in known)
    if unknown:
        raise wrong_option(codec, f"the options {', '.join(known)}", unknown[0])


def source_dtype(codec: str, dtype: str, known: Collection[str]) -> str:
    """Return the name of the weights' element type; ``UnsupportedError`` ``<codec>.dtype`` for one not ``known``."""
    source = resolve_dtype(dtype).name
    if source not in known:
        raise UnsupportedError(
            f"expected weights of type {', '.join(known)}, found {source}; keep this tensor dense",
            rule=f"{codec}.dtype",
        )
    return source


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether a value is a whole number from ``low`` to ``high``; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def column_weights(codec: str, options: Mapping[str, Any], cols: int) -> Array | None:
    """Return what the squared errors of each column weigh (f64), or None where option ``importance`` is not stated.

    Raises ``UsageError`` ``<codec>.option``: not one finite number from 0 on per column, or all of them 0.
    """
    stated = options.get(IMPORTANCE)
    if stated is None:
        return None
    if not isinstance(stated, Sequence | np.ndarray) or isinstance(stated, str | bytes):
        raise wrong_option(codec, "importance as a list of numbers", stated)
    try:
        weights = np.ascontiguousarray(stated, np.float64)
    except (TypeError, ValueError):
        raise wrong_option(codec, "importance as a list of numbers", stated) from None
    if weights.shape != (cols,) or not (np.isfinite(weights) & (weights >= 0)).all():
        raise wrong_option(codec, f"{cols} importance weights, finite and not negative", weights.shape)
    if not weights.any():
        raise wrong_option(codec, "an importance above 0", 0)
    return weights
