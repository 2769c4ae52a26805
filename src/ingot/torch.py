"""Drop-in for ``safetensors.torch`` over every format that Ingot opens."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.owned_arrays import load_arrays
from ingot.artifacts.save import save as save_checkpoint
from ingot.artifacts.state_dict import open_bytes, save_bytes
from ingot.core.border import bordered
from ingot.model.checkpoint import Checkpoint
from ingot.runtime.arrays.torch import from_numpy
from ingot.runtime.arrays.torch_device import decodes_on_device

__all__ = ["load", "load_file", "save", "save_file"]


@bordered
def load_file(
    path: str | PathLike[str], device: Any = "cpu", *, io: str = "auto", max_decompressed: int | str | None = None
) -> dict[str, Any]:
    """Load all tensors of a checkpoint file or folder, decoded, as ``torch.Tensor`` on ``device``.

    Quantized matrices go to another device than the CPU packed, and are decoded there, with the same bits.

    Raises what ``ingot.open`` and ``Tensor.torch`` raise.
    """
    with open_checkpoint(path, io=io, max_decompressed=max_decompressed) as checkpoint:
        return _loaded(checkpoint, device)


@bordered
def load(data: bytes, device: Any = "cpu") -> dict[str, Any]:
    """Load all tensors of a checkpoint that is a bytes object."""
    return _loaded(open_bytes(data), device)


@bordered
def save_file(tensors: Mapping[str, Any], path: str | PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save tensors; the suffix of ``path`` names the format. Raises what ``ingot.save`` raises."""
    save_checkpoint(path, tensors, metadata)


@bordered
def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors as the bytes of a safetensors file."""
    return save_bytes(tensors, metadata)


def _loaded(checkpoint: Checkpoint, device: Any) -> dict[str, Any]:
    """Hand the tensors over one by one, so that host and device never hold everything twice."""
    there = {name for name, tensor in checkpoint.items() if decodes_on_device(tensor, None, device)}
    if there:
        checkpoint.require_whole()
    arrays = load_arrays(checkpoint, [name for name in checkpoint if name not in there] if there else None)
    return {
        name: tensor.torch(device=device) if name in there else from_numpy(arrays.pop(name), device)
        for name, tensor in checkpoint.items()
    }
