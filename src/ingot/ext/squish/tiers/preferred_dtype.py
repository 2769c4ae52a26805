"""Determine the element type that the loaded weights of a model should have; a tier of another type may round them."""

from __future__ import annotations

from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import IngotError
from ingot.naming.config import stored_config
from ingot.stores.location import Location


def preferred_dtype(location: Location, requested: Any = None) -> str | None:
    """Return the canonical name of the requested type, else of the type in config.json, else of the first float tensor.

    Return None if there is no such type, or if a type or the file is invalid. The code that uses it raises the error.
    """
    config = config_of(location)
    for value in (requested, config.get("dtype"), config.get("torch_dtype")):
        if value is not None:
            try:
                return resolve_dtype(value).name
            except IngotError:
                return None
    try:
        with open_checkpoint(location, verify=False) as checkpoint:
            rows = [DTYPES.get(tensor.dtype) for tensor in checkpoint.values()]
    except IngotError:  # the directory has only built tiers
        return None
    return next((row.name for row in rows if row is not None and row.is_float and row.bits >= 16), None)


def config_of(location: Location) -> dict[str, Any]:
    """Return the ``config.json`` of a directory; empty if it is missing or invalid, which is an error on loading."""
    try:
        return stored_config(location.store(), "model.config")
    except IngotError:
        return {}
