"""``float_entropy``: lossless floats with entropy-coded exponents (``spec/float_entropy.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import MAX_CHUNK, MIN_CHUNK, STEP, Codec, Encoder, Rows, is_chunk, result
from ingot.codecs.cast import cast_into, flat, require_cast
from ingot.codecs.lossless.float_entropy_rows import (
    LEVELS,
    EntropyParams,
    as_words,
    check_sizes,
    decode_chunks,
    is_coded,
    params_of,
)
from ingot.core.numeric.dtypes import dtype, from_file, numpy_dtype
from ingot.core.runtime import native
from ingot.core.runtime.parallel import default_workers
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

CHUNK = 1 << 17
# Types whose exponent is the eight bits below the sign; two mantissa bits may join it in a symbol.
_JOINT = ("bf16", "f32")


@dataclass(frozen=True, kw_only=True)
class EntropyEncoder(Encoder):
    """An encoder of independent chunks: the bytes of a chunk depend only on its values and the level."""

    layout: EntropyParams
    params: Mapping[str, Any]
    parts: tuple[PartSpec, ...]
    step: int
    codec: str = "float_entropy"
    fit_passes: int = 0
    single_chunk: bool = False
    lossless: bool = True

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        layout = self.layout
        words = as_words(rows)
        sizes = np.empty(layout.chunks(words.size), np.uint32)
        out = np.empty(layout.limit(words.size), np.uint8)
        total = native.kernels.entropy_encode(
            words, layout.chunk, layout.level == "max", layout.dtype in _JOINT, out, sizes
        )
        return {"sizes": sizes, "planes": out[:total]}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        decode_chunks(self.layout, parts["planes"], parts["sizes"], flat(out), location="")


class EntropyReader(Rows):
    """A sequential reader that accepts any number of rows per call.

    It buffers a few chunks. If rows end within a chunk, it also buffers the chunk's remaining values.

    Parameters
    ----------
    workers : int, optional
        The number of threads, as in ``for_ranges``; 0 uses the calling thread.
    """

    def __init__(self, tensor: Tensor, params: EntropyParams, workers: int | None = 0) -> None:
        self._tensor = tensor
        self._params = params
        self._workers = workers
        self._sizes_reader = tensor.parts["sizes"].reader()
        self._reader = tensor.parts["planes"].reader()
        threads = default_workers() if workers is None else max(workers, 1)
        self._batch = max(1, STEP // params.chunk) * threads
        self._sizes: Array | None = None
        self._next = 0  # the index of the next chunk
        self._remaining = tensor.size  # elements that are not yet decoded
        self._buffer = np.empty(0, numpy_dtype(params.dtype))  # decoded, but not yet requested

    def fill(self, out: Array) -> None:
        target = flat(out)
        params = self._params
        require_cast(params.dtype, dtype(out.dtype).name, self._tensor.name)
        filled = self._use_buffer(target)
        while filled < target.size:
            chunks = min((target.size - filled) // params.chunk, self._batch)
            if chunks == 0 and target.size - filled < self._remaining:
                values = np.empty(min(params.chunk, self._remaining), self._buffer.dtype)
                self._decode(1, values)
                self._buffer = values
                filled += self._use_buffer(target[filled:])
            else:  # full chunks, or the shorter last one
                count = chunks * params.chunk or self._remaining
                self._decode(max(chunks, 1), target[filled : filled + count])
                filled += count

    def skip(self, count: int) -> None:
        """Skip ``count`` values; the skipped beginning of a chunk is decoded."""
        buffered = min(count, self._buffer.size)
        self._buffer = self._buffer[buffered:]
        chunks, remainder = divmod(count - buffered, self._params.chunk)
        sizes = self._all_sizes()[self._next : self._next + chunks]
        self._reader.skip(int(sizes.sum(dtype=np.uint64)))
        self._next += chunks
        self._remaining -= chunks * self._params.chunk
        self.read_into(np.empty(remainder, self._buffer.dtype))

    def finish(self) -> None:
        """Check the digests, and that the sizes add up."""
        self._all_sizes()
        self._reader.finish()

    def _use_buffer(self, target: Array) -> int:
        count = min(self._buffer.size, target.size)
        if count:
            cast_into(self._buffer[:count], target[:count], self._tensor.name)
            self._buffer = self._buffer[count:]
        return count

    def _decode(self, chunks: int, out: Array) -> None:
        sizes = self._all_sizes()[self._next : self._next + chunks]
        planes = np.empty(int(sizes.sum(dtype=np.uint64)), np.uint8)
        self._reader.readinto(planes.data)
        decode_chunks(self._params, planes, sizes, out, location=self._tensor.name, workers=self._workers)
        self._next += chunks
        self._remaining -= out.size

    def _all_sizes(self) -> Array:
        if self._sizes is None:
            raw = np.empty(self._tensor.parts["sizes"].nbytes, np.uint8)
            self._sizes_reader.readinto(raw.data)
            self._sizes_reader.finish()
            self._sizes = from_file(raw, "u32")
            nbytes = self._tensor.parts["planes"].nbytes
            check_sizes(self._params, self._sizes, self._tensor.size, nbytes, self._tensor.name)
        return self._sizes


class EntropyCodec(Codec):
    """Floats of complete bytes, bit for bit; level ``fast`` or ``max``."""

    id: ClassVar[str] = "float_entropy"
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``float_entropy.params``, ``.part-missing``,
        ``.dtype``, ``.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in the tensor's dtype, bit for bit, or cast by the rules of ``codecs.cast``.

        Raw parts of a mapped file are not copied. Large tensors use several threads
        (``core.runtime.parallel.default_workers``).
        """
        params = _checked(tensor)
        require_cast(params.dtype, dtype, tensor.name)
        out = result(tensor, dtype, out)
        if all(part.encoding == "raw" and part.source.mapped for part in tensor.parts.values()):
            sizes = tensor.parts["sizes"].array()
            planes = tensor.parts["planes"].array()
            check_sizes(params, sizes, tensor.size, planes.size, tensor.name)
            sizes = np.require(sizes, requirements=("C", "A"))
            decode_chunks(params, planes, sizes, out.reshape(-1), location=tensor.name, workers=None)
        else:
            reader = EntropyReader(tensor, params, workers=None)
            reader.read_into(out)
            reader.finish()
        return out

    def reader(self, tensor: Tensor) -> EntropyReader:
        return EntropyReader(tensor, _checked(tensor))

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> EntropyEncoder:
        """Return the encoder. Options: ``level``, fast or max (fast); ``chunk``, elements, a power of two (2**17)."""
        layout = EntropyParams(*_options(options), _encodable(dtype))
        size = prod(shape)
        parts = (
            PartSpec("sizes", "u32", 4 * layout.chunks(size)),
            PartSpec("planes", "u8", None, limit=layout.limit(size)),
        )
        return EntropyEncoder(layout=layout, params=layout.attributes(size), parts=parts, step=layout.chunk)


def _encodable(name: str) -> str:
    row = dtype(name)
    if not is_coded(row.name):
        raise UnsupportedError(
            f"codec float_entropy stores floats of full bytes, found {row.name}", rule="float_entropy.dtype"
        )
    return row.name


def _options(options: Mapping[str, Any]) -> tuple[str, int]:
    unknown = sorted(set(options) - {"level", "chunk"})
    level = options.get("level", LEVELS[0])
    chunk = options.get("chunk", CHUNK)
    if unknown:
        raise _option_error("options level and chunk", unknown[0])
    if level not in LEVELS:
        raise _option_error(f"level {' or '.join(LEVELS)}", level)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not is_chunk(chunk):
        raise _option_error(f"a chunk that is a power of two from {MIN_CHUNK} to {MAX_CHUNK}", chunk)
    return str(level), chunk


def _option_error(expected: str, value: object) -> UsageError:
    return UsageError(f"codec float_entropy expects {expected}, found {str(value)[:80]!r}", rule="float_entropy.option")


def _checked(tensor: Tensor) -> EntropyParams:
    params = params_of(tensor)
    chunks = params.chunks(tensor.size)
    sizes = _part(tensor, "sizes", "u32")
    planes = _part(tensor, "planes", "u8")
    # A chunk has at least a mode per plane, and a byte for it or, for joint planes, a table.
    smallest = 2 * params.width * chunks
    largest = params.limit(tensor.size)
    if sizes.nbytes != 4 * chunks or not smallest <= planes.nbytes <= largest:
        raise CodecError(
            "float_entropy.size",
            f"expected {4 * chunks} bytes of sizes and {smallest} to {largest} of planes, found {sizes.nbytes} and "
            f"{planes.nbytes}",
            where=tensor.name,
        )
    return params


def _part(tensor: Tensor, role: str, storage: str) -> Part:
    if role not in tensor.parts:
        raise CodecError(
            "float_entropy.part-missing",
            f"expected parts sizes and planes, found {list(tensor.parts)}",
            where=tensor.name,
        )
    part = tensor.parts[role]
    if part.dtype != storage or part.type not in (None, storage):
        raise CodecError(
            "float_entropy.dtype",
            f"expected {storage} in part {role!r}, found {part.type or part.dtype}",
            where=tensor.name,
        )
    return part
