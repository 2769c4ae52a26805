"""Functions that encode, repack, compress and decode tensors in memory, in chunks of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ingot.codecs.base import Codec, Encoder, Repacked, row_step
from ingot.core.bytes import checksums, encodings
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.alternatives import family_alternatives
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Array, Tensor


class Unreadable:
    """A byte source that fails the test if it is read."""

    mapped = True
    name = "<unreadable>"

    def __init__(self, size: int) -> None:
        self.size = size

    def view(self, offset: int, length: int) -> memoryview:
        raise AssertionError(f"a read of {length} bytes at {offset}, but no byte may be read")

    def readinto(self, offset: int, out: memoryview) -> None:
        self.view(offset, out.nbytes)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass


def chunks(rows: int, cuts: Sequence[int]) -> list[slice]:
    """Return consecutive slices over ``rows``, divided at ``cuts``; one empty slice if there are no rows."""
    edges = sorted({0, rows, *(cut for cut in cuts if 0 < cut < rows)})
    return [slice(start, stop) for start, stop in pairwise(edges)] or [slice(0, 0)]


def encode_parts(codec: Codec, encoder: Encoder, array: Array, cuts: Sequence[int] = ()) -> dict[str, Array]:
    """Encode an array in chunks: run the fit passes, then encode; return the joined arrays by role."""
    matrix = array.reshape(prod(array.shape[:-1]), array.shape[-1]) if array.ndim else array.reshape(1, 1)
    step = row_step(codec, encoder, matrix.shape[1])
    slices = chunks(len(matrix), () if encoder.single_chunk else [cut - cut % step for cut in cuts])
    for _ in range(encoder.fit_passes):
        for rows in slices:
            encoder.fit_pass(matrix[rows])
    encoded = [encoder.encode(matrix[rows], rows.start) for rows in slices]
    return {spec.role: np.concatenate([chunk[spec.role].reshape(-1) for chunk in encoded]) for spec in encoder.parts}


def encode_tensor(
    codec: Codec, array: Array, options: Mapping[str, Any] | None = None, *, dtype: str, cuts: Sequence[int] = ()
) -> Tensor:
    """Encode ``array`` by ``codec``; return the tensor, with its parts in memory and the codec as decoder."""
    encoder = codec.encoder(array.shape, dtype, options or {})
    arrays = encode_parts(codec, encoder, array, cuts)
    parts = {spec.role: memory_part(arrays[spec.role], spec.dtype, spec.type) for spec in encoder.parts}
    first = encoder.parts[0]
    stored = (first.type or first.dtype) if len(parts) == 1 else dtype
    stored = str(encoder.params.get("dtype", "")) or stored
    return Tensor("tensor", array.shape, stored, encoder.codec, parts, dict(encoder.params), codec)


def repacks(codec: Codec, tensor: Tensor) -> list[Repacked]:
    """Return the repacking of ``tensor`` to each alternative layout of its codec, the most similar layout first."""
    layouts = family_alternatives(tensor.layout, tensor)
    return [codec.repack(tensor, layout) for layout in layouts if layout.codec == tensor.codec]


def repacked(repack: Repacked, tensor: Tensor, cuts: Sequence[int] = ()) -> Tensor:
    """Return a tensor repacked in chunks; a chunk begins at each of ``cuts``, rounded down to a multiple of
    ``step``."""
    reader = repack.reader()
    packed = dict[str, list[Array]]()
    for rows in chunks(repack.rows, [cut // repack.step * repack.step for cut in cuts]):
        for role, array in reader.read(rows.stop - rows.start).items():
            packed.setdefault(role, []).append(array.reshape(-1))
    reader.finish()
    parts = {part.role: memory_part(np.concatenate(packed[part.role]), part.dtype, part.type) for part in repack.parts}
    return replace(tensor, codec=repack.layout.codec, params=repack.layout.attributes(), parts=parts)


def with_parts(tensor: Tensor, parts: Mapping[str, Part]) -> Tensor:
    """Return ``tensor`` with the parts in ``parts`` instead of its parts of the same roles."""
    return replace(tensor, parts={**tensor.parts, **parts})


def zstd_part(part: Part) -> Part:
    """Return a part compressed by zstd, with a digest of the stored bytes, like writers do."""
    data = bytes(part.view())
    frames = [data[start : start + encodings.FRAME] for start in range(0, len(data), encodings.FRAME)] or [b""]
    stored = b"".join(encodings.compress_frame(frame) for frame in frames)
    return replace(
        part,
        source=MemorySource(stored),
        length=len(stored),
        encoding="zstd",
        uncompressed_length=len(data),
        digest=checksums.digest("crc32c", stored),
    )


def bits(array: Array) -> bytes:
    """Return the bytes of an array, for comparisons that include NaN payloads and the sign of zero."""
    return np.ascontiguousarray(array).tobytes()


def read_rows(codec: Codec, tensor: Tensor, dtype: str, cuts: Sequence[int] = ()) -> Array:
    """Decode a tensor by the codec's reader, in chunks divided at ``cuts``."""
    rows, cols = tensor.matrix_shape
    out = np.empty((rows, cols), numpy_dtype(dtype))
    reader = codec.reader(tensor)
    for chunk in chunks(rows, cuts):
        reader.read_into(out[chunk])
    reader.finish()
    return out.reshape(tensor.shape)


def round_once(values: Array, dtype: str) -> Array:
    """Round float64 values to the nearest values of a float type, ties to even, without casts of the code under test.

    The spacing of a type with ``m`` stored mantissa bits at a value of binary exponent ``e`` is ``2**(e - m)``, and not
    less than at its smallest normal number (IEEE 754-2019 section 3.3). The values must be in the range of the type.
    """
    limits: Any = np.finfo(numpy_dtype(dtype)) if dtype in ("f64", "f32", "f16") else _ml_finfo(dtype)
    exponent = np.frexp(values)[1] - 1
    spacing = np.maximum(exponent, limits.minexp) - limits.nmant
    return np.asarray(np.ldexp(np.rint(np.ldexp(values, -spacing)), spacing)).astype(numpy_dtype(dtype))


def _ml_finfo(dtype: str) -> Any:
    import ml_dtypes  # noqa: PLC0415 - an optional package, which only tests of these types need

    finfo: Any = ml_dtypes.finfo
    return finfo(numpy_dtype(dtype))
