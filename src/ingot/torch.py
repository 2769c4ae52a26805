"""Drop-in for ``safetensors.torch`` over every format that Ingot opens."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ingot.adapters.torch import from_numpy
from ingot.model.tensor import Array
from ingot.ops.in_memory import open_bytes, save_bytes
from ingot.ops.load.owned import load_owned
from ingot.ops.open import open as open_checkpoint
from ingot.ops.save import save as save_checkpoint

__all__ = ["load", "load_file", "save", "save_file"]


def load_file(
    path: str | PathLike[str], device: Any = "cpu", *, io: str = "auto", max_decompressed: int | str | None = None
) -> dict[str, Any]:
    """Load all tensors of a checkpoint file or folder, decoded, as ``torch.Tensor`` on ``device``.

    Raises what ``ingot.open`` and ``Tensor.torch`` raise.
    """
    with open_checkpoint(path, io=io, max_decompressed=max_decompressed) as checkpoint:
        return _tensors(load_owned(checkpoint), device)


def load(data: bytes, device: Any = "cpu") -> dict[str, Any]:
    """Load all tensors of a checkpoint that is a bytes object."""
    return _tensors(load_owned(open_bytes(data)), device)


def save_file(tensors: Mapping[str, Any], path: str | PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save tensors; the suffix of ``path`` names the format. Raises what ``ingot.save`` raises."""
    save_checkpoint(path, tensors, metadata)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors as the bytes of a safetensors file."""
    return save_bytes(tensors, metadata)


def _tensors(arrays: dict[str, Array], device: Any) -> dict[str, Any]:
    """Hand the arrays over one by one, so that host and device never hold everything twice."""
    return {name: from_numpy(arrays.pop(name), device) for name in list(arrays)}
