"""Choice of wider types for scales and entries if values are small (``spec/affine.md``, "Small values")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ingot.codecs.base import BaseEncoder
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array

RULE = "codec.underflow"
Options = Mapping[str, Any]
_E = TypeVar("_E", bound=BaseEncoder)


def merge_options(options: Options, more: Options) -> dict[str, Any]:
    """Return ``options`` with the entries of ``more``; the options of an inner codec are merged likewise."""
    inner = {"options": merge_options(options.get("options", {}), more["options"])} if "options" in more else {}
    return {**options, **more, **inner}


def describe_types(more: Mapping[str, Any]) -> str:
    """Return the chosen types as text, such as ``scales bf16``."""
    return ", ".join(
        describe_types(value) if isinstance(value, Mapping) else f"{key} {value}" for key, value in more.items()
    )


def resolve_range(
    encoder: _E,
    make: Callable[[Options], _E],
    options: Options,
    chunks: Iterable[tuple[int, Array]],
    accepts: Callable[[_E], bool] = lambda encoder: True,
) -> tuple[_E, Options]:
    """Return an encoder whose types represent the values, and the changed options.

    Only as many chunks are read as the encoder must observe.

    Parameters
    ----------
    encoder
        The result of ``make(options)``.
    make : callable
        Creates an encoder from options.
    chunks : iterable of (int, array)
        First row and rows of each chunk, in order. For most weights, the first chunk is enough.
    accepts : callable
        Returns whether a container can store the result of an encoder with other types.

    Returns
    -------
    encoder, and the options that were changed (usually none)

    Raises
    ------
    UnsupportedError
        ``codec.underflow``: the values are too small for the requested types, or for those that the container accepts.
    """
    if not encoder.observes():
        return encoder, {}
    for start, rows in chunks:
        if encoder.observe(rows, start):
            break
    more = encoder.wider_options()
    if more:
        wide = make(merge_options(options, more))
        if accepts(wide):
            return wide, more
    reason = encoder.underflow()
    if reason is not None:
        raise UnsupportedError(reason, rule=RULE)
    return encoder, {}
