"""Which entries of a safetensors header a tensor takes.

One where it is dense, two where it is a sparse patch, three where it is a quantized layer of MLX.
"""

from __future__ import annotations

from typing import NamedTuple

from ingot.core.dtypes import DTYPES
from ingot.errors import UsageError
from ingot.formats.safetensors.patch import CODEC, keys_of
from ingot.model.layouts.affine import AffineLayout
from ingot.model.spec import TensorSpec

WEIGHT, SCALES, BIASES = ".weight", ".scales", ".biases"


class Piece(NamedTuple):
    """One entry: the part that it holds, its key in the header, element type (Ingot's name), shape and bytes."""

    role: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def pieces(spec: TensorSpec) -> list[Piece]:
    """Return the entries of a tensor that the format does not refuse.

    Raises ``UsageError`` ``writer.length``: a part whose length is not known; the header comes before it.
    """
    if spec.codec == AffineLayout.codec:
        return _layer(spec)
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


def _layer(spec: TensorSpec) -> list[Piece]:
    """``X.weight`` as words of 32 bits, ``X.scales``, ``X.biases`` (spec/mlx.md)."""
    stem, lead, cols = spec.name.removesuffix(WEIGHT), spec.shape[:-1], spec.shape[-1]
    layout = AffineLayout.of(spec)
    packed, scales, zeros = layout.part_specs(spec.shape)
    groups = (*lead, *layout.scale_shape(1, cols)[1:])
    words = (*lead, layout.row_bytes(cols) // 4)
    return [
        Piece(packed.role, spec.name, "u32", words, packed.length or 0),
        Piece(scales.role, stem + SCALES, scales.dtype, groups, scales.length or 0),
        Piece(zeros.role, stem + BIASES, zeros.dtype, groups, zeros.length or 0),
    ]


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes that a tensor takes in a file, header excepted."""
    return sum(piece.nbytes for piece in pieces(spec))
