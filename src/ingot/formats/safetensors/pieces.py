"""The header entries of a tensor in a safetensors file: one for a dense tensor, two for a sparse patch.

Packed folder formats (``formats/packed_folders``) store tensors of other codecs in their own entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import UsageError
from ingot.formats.safetensors.patch import CODEC, keys_of
from ingot.model.spec import TensorSpec


class FileEntry(NamedTuple):
    """A header entry of a file: the role of the part that it stores, key, element type (Ingot's name), shape and bytes.

    If the entry stores no part of the tensor, ``content`` computes its bytes, and ``role`` is only used in messages.
    """

    role: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Callable[[], bytes] | None = None


class Carrier(Protocol):
    """A format's rules: which tensors a file can store, and their entries."""

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be stored; None if it can."""
        ...

    def file_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return the header entries of a supported tensor. Entries that store parts have the order of the parts."""
        ...


def file_entries(spec: TensorSpec) -> list[FileEntry]:
    """Return the header entries that store a tensor: one with all values of a dense tensor, or two of a sparse patch.

    A sparse patch stores the positions and the values of the elements that differ.

    Raises ``UsageError`` ``writer.length`` if the length of a part is unknown, because the header comes first.
    """
    if spec.codec != CODEC:
        return [FileEntry("data", spec.name, spec.dtype, spec.shape, DTYPES[spec.dtype].nbytes(spec.size))]
    entries = []
    for role, key in zip(("indices", "values"), keys_of(spec.name), strict=True):
        part = spec.part(role)
        if part.length is None:
            raise UsageError(
                "expected the number of elements that differ, but the spec does not state it",
                rule="writer.length",
                where=spec.name,
            )
        dtype = part.type or part.dtype
        entries.append(FileEntry(role, key, dtype, (part.length * 8 // DTYPES[dtype].bits,), part.length))
    return entries


def tensor_bytes(spec: TensorSpec, carrier: Carrier) -> int:
    """Return the number of bytes of a tensor in a file without the header."""
    return sum(entry.nbytes for entry in carrier.file_entries(spec))
