"""Chunks of ``delta_exact``: parameters, encoding and applying (``spec/delta_exact.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import LATER, MAX_CHUNK, MIN_CHUNK, STEP, VERSION, is_chunk, is_version, version_for
from ingot.codecs.cast import flat
from ingot.core.numeric.dtypes import DTYPES, dtype, numpy_dtype
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.tensor import Array, Tensor

CHUNK = 1 << 17

# Stored mantissa bits. The context of a float is its bits above the mantissa: the exponent (the lower eight bits in
# f64). Other types are integers, whose context is the highest byte; f8_e8m0fnu, which has no sign, is treated as one.
_MANTISSA = {
    "f64": 52,
    "f32": 23,
    "f16": 10,
    "bf16": 7,
    "f8_e4m3fn": 3,
    "f8_e5m2": 2,
    "f8_e4m3fnuz": 3,
    "f8_e5m2fnuz": 2,
}

_RULES = {1: "delta_exact.chunk", 2: "delta_exact.table", 3: "delta_exact.stream"}
_EXPECTED = {
    "delta_exact.chunk": "a mode from 0 to 2 and the bytes that it needs",
    "delta_exact.table": "code lengths or frequencies that form a complete code",
    "delta_exact.stream": "streams and gaps that end with the last element",
}


@dataclass(frozen=True, slots=True)
class ExactParams:
    """The parameters for reading the parts; ``chunk`` is in elements."""

    chunk: int
    dtype: str

    @property
    def width(self) -> int:
        """The number of bytes of an element."""
        return DTYPES[self.dtype].bits // 8

    @property
    def word(self) -> np.dtype[Any]:
        """The unsigned integer type of elements in kernels."""
        return np.dtype(f"u{self.width}")

    @property
    def element(self) -> tuple[bool, int]:
        """Whether elements are floats (sign and magnitude), and the lowest bit of the coder's context.

        The context consists of the bits from that bit on: the exponent of a float, or the high byte of an integer.
        """
        return self.dtype in _MANTISSA, _MANTISSA.get(self.dtype, 8 * self.width - 8)

    def chunks(self, size: int) -> int:
        """Return the number of chunks of a tensor of ``size`` elements."""
        return -(-size // self.chunk)

    def limit(self, size: int) -> int:
        """Return the largest possible number of bytes of ``planes``: every chunk is raw, after the byte of its mode."""
        return self.width * size + self.chunks(size)

    def attributes(self, size: int) -> dict[str, Any]:
        """Return the JSON-able attributes of a tensor of ``size`` elements; ``params_of`` reads them."""
        return {"codec_version": version_for(self.chunk, size), "chunk": self.chunk, "dtype": self.dtype}


def is_coded(name: str) -> bool:
    """Return whether the codec supports this element type: floats, integers and booleans of complete bytes."""
    row = DTYPES.get(name)
    return row is not None and row.category != "c" and row.bits >= 8


def params_for(name: str, chunk: object = CHUNK) -> ExactParams:
    """Return the parameters of a new difference between tensors with element type ``name``.

    Raises
    ------
    UnsupportedError
        ``delta_exact.dtype``: complex numbers, or elements smaller than a byte.
    UsageError
        ``delta_exact.option``: a chunk that is no power of two in the allowed range.
    """
    row = dtype(name)
    if not is_coded(row.name):
        raise UnsupportedError(
            f"codec delta_exact stores floats, integers and booleans of full bytes, found {row.name}",
            rule="delta_exact.dtype",
        )
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not is_chunk(chunk):
        raise refuse_option(f"a chunk that is a power of two from {MIN_CHUNK} to {MAX_CHUNK}", chunk)
    return ExactParams(chunk, row.name)


def refuse_option(expected: str, value: object) -> UsageError:
    """Return the error for an invalid value of an option."""
    return UsageError(f"codec delta_exact expects {expected}, found {str(value)[:80]!r}", rule="delta_exact.option")


def params_of(tensor: Tensor) -> ExactParams:
    """Return the parameters from a tensor's attributes.

    Raises
    ------
    CodecError
        ``delta_exact.params``: an attribute is missing, unknown or out of range, or differs from the tensor's dtype.
    """
    attributes = tensor.params
    version, chunk, name = (attributes.get(key) for key in ("codec_version", "chunk", "dtype"))
    chunk_fits = isinstance(chunk, int) and not isinstance(chunk, bool) and is_chunk(chunk)
    dtype_fits = isinstance(name, str) and is_coded(name) and name == tensor.dtype
    if not (chunk_fits and dtype_fits and is_version(version)):
        raise CodecError(
            "delta_exact.params",
            f"expected codec_version {VERSION} or {LATER}, dtype {tensor.dtype}, and a chunk that is a power of two "
            f"from {MIN_CHUNK} to {MAX_CHUNK}; found {str(dict(attributes))[:120]!r}",
            where=tensor.name,
        )
    return ExactParams(int(str(chunk)), str(name))


def as_words(values: Array, params: ExactParams, location: str = "") -> Array:
    """Return values as flat unsigned integers, in C order and aligned; a view if possible.

    Raises
    ------
    CodecError
        ``delta_exact.base``: the values have another element type.
    """
    if values.dtype != numpy_dtype(params.dtype):
        raise CodecError(
            "delta_exact.base", f"expected values of {params.dtype}, found {values.dtype}", where=location or None
        )
    return flat(np.require(values, requirements=("C", "A"))).view(params.word)


def encode_chunks(params: ExactParams, base: Array, tuned: Array) -> dict[str, Array]:
    """Return the parts ``sizes`` and ``planes`` for the flat words ``base`` and ``tuned``, whose first word begins a
    chunk.
    """
    sizes = np.empty(params.chunks(base.size), np.uint32)
    out = np.empty(params.limit(base.size), np.uint8)
    total = native.kernels.delta_encode(base, tuned, params.chunk, *params.element, out, sizes)
    return {"sizes": sizes, "planes": out[:total]}


def apply_chunks(
    params: ExactParams, parts: Mapping[str, Array], base: Array, out: Array, *, last: int, location: str
) -> None:
    """Apply the chunks in ``parts`` to ``base``; write flat words to ``out``, which may be ``base``.

    The part ``planes`` must have exactly the bytes of these chunks.

    Parameters
    ----------
    last : int
        Elements of the last chunk; ``base`` and ``out`` may end within it.

    Raises
    ------
    CodecError
        ``delta_exact.chunk``, ``.table``, ``.stream``. Some elements of ``out`` may be written before the error.
    """
    status, chunk = native.kernels.delta_apply(
        parts["planes"], parts["sizes"], params.chunk, last, *params.element, base, out
    )
    if status:
        rule = _RULES[status]
        raise CodecError(rule, f"expected {_EXPECTED[rule]} in chunk {chunk} of this run", where=location or None)


def check_sizes(params: ExactParams, sizes: Array, size: int, nbytes: int, location: str) -> None:
    """Raise ``CodecError`` ``delta_exact.size`` if sizes of chunks are impossible or do not add up to ``planes``."""
    limit = params.width * params.chunk + 1
    total = int(sizes.sum(dtype=np.uint64))
    largest = int(sizes.max(initial=0))
    if len(sizes) != params.chunks(size) or total != nbytes or largest > limit:
        raise CodecError(
            "delta_exact.size",
            f"expected {nbytes} bytes in {params.chunks(size)} chunks of at most {limit}, found {total} in "
            f"{len(sizes)}, the largest {largest}",
            where=location or None,
        )


def pack(base: Array, tuned: Array, *, chunk: int = CHUNK, workers: int | None = None) -> dict[str, Array]:
    """Return the difference from ``base`` to ``tuned``, which have one shape and element type, as parts ``sizes`` and
    ``planes``.

    Parameters
    ----------
    chunk : int
        Elements of a chunk, a power of two; chunks are independent.
    workers : int, optional
        The number of threads, as in ``for_ranges``.

    Raises
    ------
    UnsupportedError, UsageError
        The errors of ``params_for``; ``delta_exact.shape``: the arrays have different shapes.
    """
    params = params_for(str(dtype(base.dtype).name), chunk)
    _require_shape(base, tuned)
    old, new = as_words(base, params), as_words(tuned, params)
    step = max(STEP // chunk, 1) * chunk
    packed: dict[int, dict[str, Array]] = {}

    def encode(start: int, stop: int) -> None:
        packed[start] = encode_chunks(params, old[start:stop], new[start:stop])

    for_ranges(old.size, step, encode, workers)
    nothing: dict[str, Array] = {"sizes": np.empty(0, np.uint32), "planes": np.empty(0, np.uint8)}
    runs = [packed[start] for start in sorted(packed)] or [nothing]
    return {role: np.concatenate([run[role] for run in runs]) for role in nothing}


def unpack(
    parts: Mapping[str, Array], base: Array, out: Array, *, chunk: int = CHUNK, workers: int | None = None
) -> None:
    """Apply the parts that ``pack`` returned: write the fine-tune to ``out``, in C order, which may be ``base``.

    Raises
    ------
    CodecError
        ``delta_exact.size``, ``.chunk``, ``.table``, ``.stream``: the parts do not fit this shape, or are damaged. Some
        elements of ``out`` may be written.
    """
    params = params_for(str(dtype(base.dtype).name), chunk)
    _require_shape(base, out)
    sizes, planes = parts["sizes"], parts["planes"]
    check_sizes(params, sizes, base.size, planes.size, "")
    old = as_words(base, params)
    new = flat(out).view(params.word)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])

    def apply(first: int, stop: int) -> None:
        chunks = {"sizes": sizes[first:stop], "planes": planes[ends[first] : ends[stop]]}
        run = slice(first * chunk, min(stop * chunk, old.size))
        apply_chunks(params, chunks, old[run], new[run], last=min(chunk, old.size - (stop - 1) * chunk), location="")

    for_ranges(len(sizes), max(STEP // chunk, 1), apply, workers)


def _require_shape(base: Array, tuned: Array) -> None:
    if base.shape != tuned.shape:
        raise UsageError(
            f"expected arrays of one shape, found {list(base.shape)} and {list(tuned.shape)}", rule="delta_exact.shape"
        )
