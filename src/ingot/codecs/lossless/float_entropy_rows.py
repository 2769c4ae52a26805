"""Chunks of ``float_entropy``: parameters and decoding (``spec/float_entropy.md``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import LATER, MAX_CHUNK, MIN_CHUNK, STEP, VERSION, is_chunk, is_version, version_for
from ingot.codecs.cast import cast_into
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.tensor import Array, Tensor

LEVELS = ("fast", "max")

_RULES = {1: "float_entropy.chunk", 2: "float_entropy.table", 3: "float_entropy.stream"}
_EXPECTED = {
    "float_entropy.chunk": "a mode from 0 to 4 for every plane and the bytes that it needs",
    "float_entropy.table": "code lengths or frequencies that form a complete code",
    "float_entropy.stream": "streams that end with the last value",
}


@dataclass(frozen=True, slots=True)
class EntropyParams:
    """The parameters for reading the parts: the encoder's ``level``, and ``chunk`` in elements."""

    level: str
    chunk: int
    dtype: str

    @property
    def width(self) -> int:
        """The number of bytes of an element, which is also the number of planes of a chunk."""
        return DTYPES[self.dtype].bits // 8

    def chunks(self, size: int) -> int:
        """Return the number of chunks of a tensor of ``size`` elements."""
        return -(-size // self.chunk)

    def limit(self, size: int) -> int:
        """Return the largest possible number of bytes of ``planes``: every plane is raw, after the byte of its mode."""
        return self.width * (size + self.chunks(size))

    def attributes(self, size: int) -> dict[str, Any]:
        """Return the JSON-able attributes of a tensor of ``size`` elements; ``params_of`` reads them."""
        return {
            "codec_version": version_for(self.chunk, size, rans=self.level == "max"),
            "level": self.level,
            "chunk": self.chunk,
            "dtype": self.dtype,
        }


def is_coded(name: str) -> bool:
    """Return whether the codec supports this element type: floats of complete bytes."""
    row = DTYPES.get(name)
    return row is not None and row.is_float and row.bits >= 8


def params_of(tensor: Tensor) -> EntropyParams:
    """Return the parameters from a tensor's attributes.

    Raises
    ------
    CodecError
        ``float_entropy.params``: an attribute is missing, unknown or out of range, or differs from the tensor's dtype.
    """
    attributes = tensor.params
    version, chunk, level, name = (attributes.get(key) for key in ("codec_version", "chunk", "level", "dtype"))
    types_fit = isinstance(chunk, int) and not isinstance(chunk, bool) and isinstance(name, str)
    if not (types_fit and is_version(version) and level in LEVELS and is_coded(str(name))):
        raise _params_error(
            tensor, f"codec_version {VERSION} or {LATER}, level {' or '.join(LEVELS)}, a chunk and the dtype of a float"
        )
    params = EntropyParams(str(level), int(str(chunk)), str(name))
    if not is_chunk(params.chunk):
        raise _params_error(tensor, f"a chunk that is a power of two from {MIN_CHUNK} to {MAX_CHUNK}")
    if params.dtype != tensor.dtype:
        raise _params_error(tensor, f"dtype {tensor.dtype}")
    return params


def _params_error(tensor: Tensor, expected: str) -> CodecError:
    return CodecError(
        "float_entropy.params", f"expected {expected}, found {str(dict(tensor.params))[:120]!r}", where=tensor.name
    )


def check_sizes(params: EntropyParams, sizes: Array, size: int, nbytes: int, location: str) -> None:
    """Raise ``CodecError`` ``float_entropy.size`` if sizes of chunks are impossible or do not add up to ``planes``."""
    limit = params.width * (params.chunk + 1)
    total = int(sizes.sum(dtype=np.uint64))
    largest = int(sizes.max(initial=0))
    if total != nbytes or largest > limit:
        raise CodecError(
            "float_entropy.size",
            f"expected {nbytes} bytes in {params.chunks(size)} chunks of at most {limit}, found {total} and {largest}",
            where=location,
        )


def as_words(values: Array) -> Array:
    """Return flat unsigned integers with the bits of the values, in C order and aligned; a view if possible."""
    plain = np.require(values, requirements=("C", "A"))
    return plain.reshape(-1).view(f"u{plain.dtype.itemsize}")


def decode_chunks(
    params: EntropyParams, planes: Array, sizes: Array, out: Array, *, location: str, workers: int | None = 0
) -> None:
    """Decode full chunks, whose bytes are exactly ``planes``, into the flat ``out`` of any float type.

    Parameters
    ----------
    workers : int, optional
        The number of threads, as in ``for_ranges``; 0 uses the calling thread.

    Raises
    ------
    CodecError
        ``float_entropy.chunk``, ``.table``, ``.stream``, or the rules of ``codecs.cast``.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    stored_dtype = numpy_dtype(params.dtype)

    def decode(first: int, last: int) -> None:
        begin = int(ends[first - 1]) if first else 0
        target = out[first * params.chunk : last * params.chunk]
        values = target if target.dtype == stored_dtype else np.empty(target.size, stored_dtype)
        status, chunk = native.kernels.entropy_decode(
            planes[begin : int(ends[last - 1])],
            sizes[first:last],
            params.chunk,
            values.view(f"u{stored_dtype.itemsize}"),
        )
        if status:
            expected = _EXPECTED[_RULES[status]]
            raise CodecError(_RULES[status], f"expected {expected} in chunk {first + chunk}", where=location)
        if values is not target:
            cast_into(values, target, location)

    for_ranges(len(sizes), max(1, STEP // params.chunk), decode, workers)
