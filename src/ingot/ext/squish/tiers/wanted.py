"""The element type that a model's weights are wanted in, which decides what tiers of another type would round."""

from __future__ import annotations

from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import IngotError
from ingot.naming.config import stored_config
from ingot.stores.location import Location


def wanted_dtype(location: Location, asked: Any = None) -> str | None:
    """Return the canonical name: as asked, as config.json says, that of the first floating-point tensor.

    None where nothing says it. What is wrong with a type or a file is told by those who need it.
    """
    config = config_of(location)
    for value in (asked, config.get("dtype"), config.get("torch_dtype")):
        if value is not None:
            try:
                return resolve_dtype(value).name
            except IngotError:
                return None
    try:
        with open_checkpoint(location, verify=False) as checkpoint:
            rows = [DTYPES.get(tensor.dtype) for tensor in checkpoint.values()]
    except IngotError:  # only built tiers are here
        return None
    return next((row.name for row in rows if row is not None and row.is_float and row.bits >= 16), None)


def config_of(location: Location) -> dict[str, Any]:
    """Return the ``config.json`` of a directory; empty if there is none, which whoever loads the model says."""
    try:
        return stored_config(location.store(), "model.config")
    except IngotError:
        return {}
