"""Optional packages: imported where they are used, and named with their extra where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ingot.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import and return ``module``.

    Raises
    ------
    MissingExtraError
        Its package is not installed; names the extra that brings it. A package that is there and fails inside its own
        imports raises what it raises.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(package, extra) from error
