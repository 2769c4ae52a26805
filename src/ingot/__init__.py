"""Ingot: model weights at rest and on the move.

Shrinks, ships, verifies, patches, converts and loads model weights in the containers people use. Names are imported on
first use, so that ``import ingot`` costs little more than NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ingot import mlx as mlx
    from ingot import numpy as numpy
    from ingot import torch as torch
    from ingot.adapters.transformers import load_model as load_model
    from ingot.errors import IngotError as IngotError
    from ingot.model.checkpoint import Checkpoint as Checkpoint
    from ingot.model.tensor import Tensor as Tensor
    from ingot.ops.apply_delta import apply_delta as apply_delta
    from ingot.ops.apply_delta import revert as revert
    from ingot.ops.compare import compare as compare
    from ingot.ops.convert import convert as convert
    from ingot.ops.diff import diff as diff
    from ingot.ops.open import open as open
    from ingot.ops.patch import patch as patch
    from ingot.ops.plan_ane import plan as plan
    from ingot.ops.save import save as save
    from ingot.ops.verify import verify as verify

_NAMES = {
    "Checkpoint": "ingot.model.checkpoint",
    "IngotError": "ingot.errors",
    "Tensor": "ingot.model.tensor",
    "apply_delta": "ingot.ops.apply_delta",
    "compare": "ingot.ops.compare",
    "convert": "ingot.ops.convert",
    "diff": "ingot.ops.diff",
    "load_model": "ingot.adapters.transformers",
    "open": "ingot.ops.open",
    "patch": "ingot.ops.patch",
    "plan": "ingot.ops.plan_ane",
    "revert": "ingot.ops.apply_delta",
    "save": "ingot.ops.save",
    "verify": "ingot.ops.verify",
}
_MODULES = ("mlx", "numpy", "torch")

__all__ = [
    "Checkpoint",
    "IngotError",
    "Tensor",
    "apply_delta",
    "compare",
    "convert",
    "diff",
    "load_model",
    "mlx",
    "numpy",
    "open",
    "patch",
    "plan",
    "revert",
    "save",
    "torch",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"ingot.{name}")
    else:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
