"""A drop-in replacement for ``safetensors.numpy`` that reads all formats of Ingot."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.owned_arrays import load_arrays
from ingot.artifacts.save import save as save_checkpoint
from ingot.artifacts.state_dict import open_bytes, save_bytes
from ingot.core.border import bordered
from ingot.model.tensor import Array

__all__ = ["load", "load_file", "save", "save_file"]


@bordered
def load_file(
    path: str | PathLike[str], *, io: str = "auto", max_decompressed: int | str | None = None
) -> dict[str, Array]:
    """Load all tensors of a checkpoint file or folder, decoded, as writable arrays that own their memory.

    Raises the errors of ``ingot.open`` and ``Tensor.numpy``.

    Examples
    --------
    >>> ingot.numpy.load_file("int4.zt")["model.norm.weight"].shape
    (192,)
    """
    with open_checkpoint(path, io=io, max_decompressed=max_decompressed) as checkpoint:
        return load_arrays(checkpoint)


@bordered
def load(data: bytes) -> dict[str, Array]:
    """Load all tensors of a checkpoint that is a bytes object.

    Examples
    --------
    >>> ingot.numpy.load(ingot.numpy.save({"w": np.zeros(3, "f4")}))["w"]
    array([0., 0., 0.], dtype=float32)
    """
    return load_arrays(open_bytes(data))


@bordered
def save_file(tensors: Mapping[str, Any], path: str | PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save arrays in the format of the suffix of ``path``; raise the errors of ``ingot.save``.

    Examples
    --------
    >>> ingot.numpy.save_file({"w": np.zeros(3, "f4")}, "zeros.safetensors")
    """
    save_checkpoint(path, tensors, metadata)


@bordered
def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file with these arrays.

    Examples
    --------
    >>> type(ingot.numpy.save({"w": np.zeros(3, "f4")}))
    <class 'bytes'>
    """
    return save_bytes(tensors, metadata)
