"""Chunks of ``float_entropy``: parameters, decoding of runs of chunks. Spec page: ``spec/float_entropy.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.cast import cast_into
from ingot.codecs.chunks import LATER, MAX_CHUNK, MIN_CHUNK, STEP, VERSION, is_chunk, is_version, version_for
from ingot.core import native
from ingot.core.dtypes import DTYPES, numpy_dtype
from ingot.core.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.tensor import Array, Tensor

LEVELS = ("fast", "max")

_RULES = {1: "float_entropy.chunk", 2: "float_entropy.table", 3: "float_entropy.stream"}
_WORDS = {
    "float_entropy.chunk": "a known mode for every plane and as many bytes as they need, found others",
    "float_entropy.table": "code lengths or frequencies that make a whole code, found others",
    "float_entropy.stream": "streams that end with the last value, found one that does not",
}


@dataclass(frozen=True, slots=True)
class EntropyParams:
    """What the parts need to be read: ``level`` tells how they were made, ``chunk`` is in elements."""

    level: str
    chunk: int
    dtype: str

    @property
    def width(self) -> int:
        """Bytes of an element, which are planes of a chunk."""
        return DTYPES[self.dtype].bits // 8

    def chunks(self, size: int) -> int:
        """Chunks of a tensor of ``size`` elements."""
        return -(-size // self.chunk)

    def limit(self, size: int) -> int:
        """The most bytes of ``planes``: every plane raw behind its mode."""
        return self.width * (size + self.chunks(size))

    def attributes(self, size: int) -> dict[str, Any]:
        """Return the JSON-able attributes that ``params_of`` takes back, of a tensor of ``size`` elements."""
        return {
            "codec_version": version_for(self.chunk, size, rans=self.level == "max"),
            "level": self.level,
            "chunk": self.chunk,
            "dtype": self.dtype,
        }


def is_coded(name: str) -> bool:
    """Return whether the codec takes this element type: every float of whole bytes."""
    row = DTYPES.get(name)
    return row is not None and row.is_float and row.bits >= 8


def params_of(tensor: Tensor) -> EntropyParams:
    """Read a tensor's attributes.

    Raises
    ------
    CodecError
        ``float_entropy.params``: an attribute is missing, unknown or out of range, or not the tensor's dtype.
    """
    stated = tensor.params
    version, chunk, level, name = (stated.get(key) for key in ("codec_version", "chunk", "level", "dtype"))
    whole = isinstance(chunk, int) and not isinstance(chunk, bool) and isinstance(name, str)
    if not (whole and is_version(version) and level in LEVELS and is_coded(str(name))):
        raise _bad_params(
            tensor, f"codec_version {VERSION} or {LATER}, level {' or '.join(LEVELS)}, a chunk and the dtype of a float"
        )
    params = EntropyParams(str(level), int(str(chunk)), str(name))
    if not is_chunk(params.chunk):
        raise _bad_params(tensor, f"a chunk that is a power of two from {MIN_CHUNK} to {MAX_CHUNK}")
    if params.dtype != tensor.dtype:
        raise _bad_params(tensor, f"dtype {tensor.dtype}")
    return params


def _bad_params(tensor: Tensor, expected: str) -> CodecError:
    return CodecError(
        "float_entropy.params", f"expected {expected}, found {str(dict(tensor.params))[:120]!r}", where=tensor.name
    )


def check_sizes(params: EntropyParams, sizes: Array, size: int, nbytes: int, where: str) -> None:
    """Refuse sizes of chunks that no chunk can have or that do not add up to ``planes``: ``float_entropy.size``."""
    most = params.width * (params.chunk + 1)
    total, largest = int(sizes.sum(dtype=np.uint64)), int(sizes.max(initial=0))
    if total != nbytes or largest > most:
        raise CodecError(
            "float_entropy.size",
            f"expected {nbytes} bytes in {params.chunks(size)} chunks of at most {most}, found {total} and {largest}",
            where=where,
        )


def as_words(values: Array) -> Array:
    """View values as unsigned integers of their size, in C order and aligned."""
    plain = np.require(values, requirements=("C", "A"))
    return plain.reshape(-1).view(f"u{plain.dtype.itemsize}")


def decode_chunks(
    params: EntropyParams, planes: Array, sizes: Array, out: Array, *, where: str, workers: int | None = 0
) -> None:
    """Decode whole chunks, whose bytes are exactly ``planes``, into the flat ``out`` of any float type.

    Parameters
    ----------
    workers : int, optional
        As of ``for_ranges``; 0 stays in the calling thread.

    Raises
    ------
    CodecError
        ``float_entropy.chunk``, ``.table``, ``.stream``, or the rules of ``codecs.cast``.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    own = numpy_dtype(params.dtype)

    def decode(first: int, last: int) -> None:
        begin = int(ends[first - 1]) if first else 0
        piece = out[first * params.chunk : last * params.chunk]
        values = piece if piece.dtype == own else np.empty(piece.size, own)
        status, chunk = native.kernels.entropy_decode(
            planes[begin : int(ends[last - 1])], sizes[first:last], params.chunk, values.view(f"u{own.itemsize}")
        )
        if status:
            raise CodecError(_RULES[status], f"expected {_WORDS[_RULES[status]]} in chunk {first + chunk}", where=where)
        if values is not piece:
            cast_into(values, piece, where)

    for_ranges(len(sizes), max(1, STEP // params.chunk), decode, workers)
