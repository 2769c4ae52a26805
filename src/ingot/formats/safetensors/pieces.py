"""Which entries of a safetensors header a tensor takes: one where it is dense, two where it is a sparse patch.

Dialects (``formats/dialects``) have tensors of other codecs, each with entries of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import UsageError
from ingot.formats.safetensors.patch import CODEC, keys_of
from ingot.model.spec import TensorSpec


class Piece(NamedTuple):
    """One entry: the part that it holds, its key in the header, element type (Ingot's name), shape and bytes.

    ``content`` makes the bytes of an entry that follows from the specs and is no part: then ``role`` is a name for
    messages alone.
    """

    role: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Callable[[], bytes] | None = None


class Carrier(Protocol):
    """What a file carries, and as which entries."""

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why a tensor cannot be carried; None if it can."""
        ...

    def pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """Return the entries of a tensor that is not refused, those of its parts in the order of the parts."""
        ...


def pieces(spec: TensorSpec) -> list[Piece]:
    """Return the entries of a dense tensor or of a sparse patch.

    Raises ``UsageError`` ``writer.length``: a part whose length is not known; the header comes before it.
    """
    if spec.codec != CODEC:
        return [Piece("data", spec.name, spec.dtype, spec.shape, DTYPES[spec.dtype].nbytes(spec.size))]
    pieces_of_spec = []
    for role, key in zip(("indices", "values"), keys_of(spec.name), strict=True):
        part = spec.part(role)
        if part.length is None:
            raise UsageError("expected to know how many elements differ", rule="writer.length", where=spec.name)
        dtype = part.type or part.dtype
        pieces_of_spec.append(Piece(role, key, dtype, (part.length * 8 // DTYPES[dtype].bits,), part.length))
    return pieces_of_spec


def tensor_bytes(spec: TensorSpec, carrier: Carrier) -> int:
    """Bytes that a tensor takes in a file, header excepted."""
    return sum(piece.nbytes for piece in carrier.pieces(spec))
