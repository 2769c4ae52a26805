"""A drop-in replacement for ``safetensors.torch`` that reads all formats of Ingot."""

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

    For devices other than the CPU, quantized matrices are copied packed and decoded on the device, with the same bits.

    Raises the errors of ``ingot.open`` and ``Tensor.torch``.

    Examples
    --------
    >>> ingot.torch.load_file("int4.zt")["model.norm.weight"].dtype
    torch.bfloat16
    """
    with open_checkpoint(path, io=io, max_decompressed=max_decompressed) as checkpoint:
        return _loaded(checkpoint, device)


@bordered
def load(data: bytes, device: Any = "cpu") -> dict[str, Any]:
    """Load all tensors of a checkpoint that is a bytes object.

    Examples
    --------
    >>> ingot.torch.load(ingot.numpy.save({"w": np.zeros(3, "f4")}))["w"]
    tensor([0., 0., 0.])
    """
    return _loaded(open_bytes(data), device)


@bordered
def save_file(tensors: Mapping[str, Any], path: str | PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save tensors in the format of the suffix of ``path``; raise the errors of ``ingot.save``.

    Examples
    --------
    >>> weights = ingot.torch.load_file("int4.zt")
    >>> ingot.torch.save_file(weights, "decoded.safetensors", {"format": "pt"})
    """
    save_checkpoint(path, tensors, metadata)


@bordered
def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file with these tensors.

    Examples
    --------
    >>> type(ingot.torch.save(ingot.torch.load_file("int4.zt")))
    <class 'bytes'>
    """
    return save_bytes(tensors, metadata)


def _loaded(checkpoint: Checkpoint, device: Any) -> dict[str, Any]:
    """Return all tensors on ``device``; they are copied one by one, so that memory never contains two copies of all
    tensors.
    """
    on_device = {name for name, tensor in checkpoint.items() if decodes_on_device(tensor, None, device)}
    if on_device:
        checkpoint.require_whole()
    arrays = load_arrays(checkpoint, [name for name in checkpoint if name not in on_device] if on_device else None)
    return {
        name: tensor.torch(device=device) if name in on_device else from_numpy(arrays.pop(name), device)
        for name, tensor in checkpoint.items()
    }
