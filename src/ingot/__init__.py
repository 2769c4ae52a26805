"""Ingot: tools for the weights of language models.

It quantizes, converts, verifies, patches and loads model weights in common file formats. Names are imported at their
first use, so that ``import ingot`` takes little longer than importing NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingot.errors import INGOT_VERSION

if TYPE_CHECKING:
    from ingot import mlx as mlx
    from ingot import numpy as numpy
    from ingot import torch as torch
    from ingot import views
    from ingot.adapters.convert import convert_adapter as convert_adapter
    from ingot.archives.archive import archive as archive
    from ingot.archives.restore import restore as restore
    from ingot.artifacts.append import append as append
    from ingot.artifacts.open import open as open
    from ingot.artifacts.save import save as save
    from ingot.conversion.execute_plan import execute as execute
    from ingot.conversion.merge import merge as merge
    from ingot.conversion.run import convert as convert
    from ingot.delta.apply import apply_delta as apply_delta
    from ingot.delta.apply import revert as revert
    from ingot.delta.diff import diff as diff
    from ingot.delta.extract_adapter import extract_adapter as extract_adapter
    from ingot.delta.patch import patch as patch
    from ingot.errors import IngotError as IngotError
    from ingot.ext.ane.plan import plan as plan
    from ingot.ext.squish.compressed import load_compressed_model as load_compressed_model
    from ingot.inspect.compare import compare as compare
    from ingot.inspect.page.report import report as report
    from ingot.inspect.seal import seal as seal
    from ingot.inspect.verify import verify as verify
    from ingot.library.library import Library as Library
    from ingot.model.checkpoint import Checkpoint as Checkpoint
    from ingot.model.tensor import Tensor as Tensor
    from ingot.publishing.pull import pull as pull
    from ingot.publishing.push import push as push
    from ingot.runtime.calibration.calibrate import calibrate as calibrate
    from ingot.runtime.evaluation.evaluate import evaluate as evaluate
    from ingot.runtime.loading.transformers import load_model as load_model
    from ingot.runtime.quantize.run import quantize as quantize
    from ingot.runtime.sweep.run import sweep as sweep

__version__ = INGOT_VERSION

_NAMES = {
    "Checkpoint": "ingot.model.checkpoint",
    "IngotError": "ingot.errors",
    "Library": "ingot.library.library",
    "Tensor": "ingot.model.tensor",
    "append": "ingot.artifacts.append",
    "apply_delta": "ingot.delta.apply",
    "archive": "ingot.archives.archive",
    "calibrate": "ingot.runtime.calibration.calibrate",
    "compare": "ingot.inspect.compare",
    "convert": "ingot.conversion.run",
    "convert_adapter": "ingot.adapters.convert",
    "diff": "ingot.delta.diff",
    "evaluate": "ingot.runtime.evaluation.evaluate",
    "execute": "ingot.conversion.execute_plan",
    "extract_adapter": "ingot.delta.extract_adapter",
    "load_compressed_model": "ingot.ext.squish.compressed",
    "load_model": "ingot.runtime.loading.transformers",
    "merge": "ingot.conversion.merge",
    "open": "ingot.artifacts.open",
    "patch": "ingot.delta.patch",
    "plan": "ingot.ext.ane.plan",
    "pull": "ingot.publishing.pull",
    "push": "ingot.publishing.push",
    "quantize": "ingot.runtime.quantize.run",
    "report": "ingot.inspect.page.report",
    "restore": "ingot.archives.restore",
    "revert": "ingot.delta.apply",
    "save": "ingot.artifacts.save",
    "seal": "ingot.inspect.seal",
    "sweep": "ingot.runtime.sweep.run",
    "verify": "ingot.inspect.verify",
}
_MODULES = ("mlx", "numpy", "torch", "views")

__all__ = [
    "Checkpoint",
    "IngotError",
    "Library",
    "Tensor",
    "append",
    "apply_delta",
    "archive",
    "calibrate",
    "compare",
    "convert",
    "convert_adapter",
    "diff",
    "evaluate",
    "execute",
    "extract_adapter",
    "load_compressed_model",
    "load_model",
    "merge",
    "mlx",
    "numpy",
    "open",
    "patch",
    "plan",
    "pull",
    "push",
    "quantize",
    "report",
    "restore",
    "revert",
    "save",
    "seal",
    "sweep",
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
