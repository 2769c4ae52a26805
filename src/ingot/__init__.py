"""Ingot: model weights at rest and on the move.

Shrinks, ships, verifies, patches, converts and loads model weights in the containers people use. Names are imported on
first use, so that ``import ingot`` costs little more than NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingot.errors import INGOT_VERSION

if TYPE_CHECKING:
    from ingot import mlx as mlx
    from ingot import numpy as numpy
    from ingot import torch as torch
    from ingot import views as views
    from ingot.adapters.calibrate import calibrate as calibrate
    from ingot.adapters.compressed import load_compressed_model as load_compressed_model
    from ingot.adapters.evaluate import evaluate as evaluate
    from ingot.adapters.transformers import load_model as load_model
    from ingot.errors import IngotError as IngotError
    from ingot.model.checkpoint import Checkpoint as Checkpoint
    from ingot.model.tensor import Tensor as Tensor
    from ingot.ops.ane.plan import plan as plan
    from ingot.ops.check.compare import compare as compare
    from ingot.ops.check.seal import seal as seal
    from ingot.ops.check.verify import verify as verify
    from ingot.ops.convert.convert import convert as convert
    from ingot.ops.convert.execute_plan import execute as execute
    from ingot.ops.delta.apply import apply_delta as apply_delta
    from ingot.ops.delta.apply import revert as revert
    from ingot.ops.delta.diff import diff as diff
    from ingot.ops.delta.patch import patch as patch
    from ingot.ops.library.library import Library as Library
    from ingot.ops.open import open as open
    from ingot.ops.report.report import report as report
    from ingot.ops.save import save as save

__version__ = INGOT_VERSION

_NAMES = {
    "Checkpoint": "ingot.model.checkpoint",
    "IngotError": "ingot.errors",
    "Library": "ingot.ops.library.library",
    "Tensor": "ingot.model.tensor",
    "apply_delta": "ingot.ops.delta.apply",
    "calibrate": "ingot.adapters.calibrate",
    "compare": "ingot.ops.check.compare",
    "convert": "ingot.ops.convert.convert",
    "diff": "ingot.ops.delta.diff",
    "evaluate": "ingot.adapters.evaluate",
    "execute": "ingot.ops.convert.execute_plan",
    "load_compressed_model": "ingot.adapters.compressed",
    "load_model": "ingot.adapters.transformers",
    "open": "ingot.ops.open",
    "patch": "ingot.ops.delta.patch",
    "plan": "ingot.ops.ane.plan",
    "report": "ingot.ops.report.report",
    "revert": "ingot.ops.delta.apply",
    "save": "ingot.ops.save",
    "seal": "ingot.ops.check.seal",
    "verify": "ingot.ops.check.verify",
}
_MODULES = ("mlx", "numpy", "torch", "views")

__all__ = [
    "Checkpoint",
    "IngotError",
    "Library",
    "Tensor",
    "apply_delta",
    "calibrate",
    "compare",
    "convert",
    "diff",
    "evaluate",
    "execute",
    "load_compressed_model",
    "load_model",
    "mlx",
    "numpy",
    "open",
    "patch",
    "plan",
    "report",
    "revert",
    "save",
    "seal",
    "torch",
    "verify",
    "views",
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
