"""Specs of what an operation writes: of an encoded tensor, the least bytes of all, and what may stay as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ingot.codecs.base import Encoder
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder
from ingot.errors import CodecError
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor


def same_storage(tensor: Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor is stored already just as the spec says, so that its parts can move."""
    if (
        tensor.codec != spec.codec
        or tensor.dtype != spec.dtype
        or set(tensor.parts) != {part.role for part in spec.parts}
    ):
        return False
    if any(dict(tensor.params).get(key) != value for key, value in spec.params.items()):
        return False
    return all(
        part.encoding == tensor.parts[part.role].encoding
        and part.dtype == tensor.parts[part.role].dtype
        and part.nbytes in (None, tensor.parts[part.role].nbytes)
        for part in spec.parts
    )


def least_size(specs: Iterable[TensorSpec], size: int) -> int:
    """Return ``size``, a format's upper bound for these specs, less the parts whose length only their bytes tell."""
    return max(0, size - sum(part.at_most for spec in specs for part in spec.parts if part.length is None))


def encoded_spec(name: str, tensor: Tensor, encoder: Encoder | DeltaEncoder, encoding: str) -> TensorSpec:
    """Return the spec of a tensor that ``encoder`` will write, each part in ``encoding``."""
    parts = encoder.parts
    if encoding != "raw":
        if any(part.length is None for part in parts):
            raise CodecError(
                "convert.encoding",
                f"encoding {encoding} needs a codec whose part sizes are known beforehand, {encoder.codec}'s are not",
            )
        parts = tuple(replace(part, length=None, encoding=encoding, uncompressed_length=part.length) for part in parts)
    dtype = str(encoder.params.get("dtype", "")) or _stored_dtype(parts, tensor.dtype)
    return TensorSpec(name, tensor.shape, dtype, encoder.codec, parts, dict(encoder.params))


def difference_spec(tensor: Tensor, codec: DeltaCodec, encoder: DeltaEncoder, encoding: str) -> TensorSpec:
    """Return the spec of the difference that ``encoder`` of ``codec`` will write, of which ``tensor`` is the result."""
    return encoded_spec(tensor.name, replace(tensor, dtype=tensor.dtype if codec.exact else "f32"), encoder, encoding)


def _stored_dtype(parts: Sequence[PartSpec], default: str) -> str:
    return (parts[0].type or parts[0].dtype) if len(parts) == 1 else default
