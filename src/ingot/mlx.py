"""Loading and saving with MLX in all formats of Ingot: models like ``mlx_lm.load``, files like ``mx.load``."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.save import save as save_checkpoint
from ingot.core.border import bordered
from ingot.core.registry import Registry
from ingot.runtime.arrays.mlx import from_numpy, to_numpy
from ingot.runtime.loading.mlx_load import load_model

if TYPE_CHECKING:
    from ingot.ext.squish.compressed import load_compressed_mlx as load_compressed_model

__all__ = ["load_compressed_model", "load_file", "load_model", "save_file"]

_EXTENSIONS: Registry[Any] = Registry("function", group="ingot.mlx_functions")


def __getattr__(name: str) -> Any:
    """Return a function that an extension adds to this module."""
    if name.startswith("_") or name not in _EXTENSIONS:
        raise AttributeError(f"module 'ingot.mlx' has no attribute {name!r}")
    return _EXTENSIONS[name]


def __dir__() -> list[str]:
    return sorted(__all__)


@bordered
def load_file(
    path: str | PathLike[str], *, io: str = "auto", max_decompressed: int | str | None = None
) -> dict[str, Any]:
    """Load all tensors of a checkpoint file or folder, decoded, as ``mlx.core.array``.

    Raises the errors of ``ingot.open`` and ``Tensor.numpy``, and ``UnsupportedError`` ``adapter.dtype``.

    Examples
    --------
    >>> ingot.mlx.load_file("int4.zt")["model.norm.weight"].shape
    (192,)
    """
    with open_checkpoint(path, io=io, max_decompressed=max_decompressed) as checkpoint:
        checkpoint.require_whole()
        return {name: from_numpy(tensor.numpy()) for name, tensor in checkpoint.items()}


@bordered
def save_file(tensors: Mapping[str, Any], path: str | PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save ``mlx.core.array`` tensors in the format of the suffix of ``path``; raise the errors of ``ingot.save``.

    Examples
    --------
    >>> weights = ingot.mlx.load_file("int4.zt")
    >>> ingot.mlx.save_file(weights, "decoded.safetensors")
    """
    save_checkpoint(path, {name: to_numpy(array) for name, array in tensors.items()}, metadata)
