"""Chunks of ``delta_exact``: parameters, making and applying runs of chunks. Spec page: ``spec/delta_exact.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.cast import flat
from ingot.codecs.chunks import LATER, MAX_CHUNK, MIN_CHUNK, STEP, VERSION, is_chunk, is_version, version_for
from ingot.core import native
from ingot.core.dtypes import DTYPES, dtype, numpy_dtype
from ingot.core.parallel import for_ranges
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.tensor import Array, Tensor

CHUNK = 1 << 17

# Stored mantissa bits: a context is what stands above them, the exponent (its lower eight bits in f64). All others are
# integers, whose context is their highest byte; f8_e8m0fnu, which has no sign, is one.
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
_WORDS = {
    "delta_exact.chunk": "a known mode and as many bytes as it needs, found others",
    "delta_exact.table": "code lengths or frequencies that make a whole code, found others",
    "delta_exact.stream": "streams and gaps that end with the last element, found some that do not",
}


@dataclass(frozen=True, slots=True)
class ExactParams:
    """What the parts need to be read: ``chunk`` is in elements."""

    chunk: int
    dtype: str

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].bits // 8

    @property
    def word(self) -> np.dtype[Any]:
        """The unsigned integers as which kernels see elements."""
        return np.dtype(f"u{self.width}")

    @property
    def element(self) -> tuple[bool, int]:
        """Whether elements are sign and magnitude, and the lowest bit of what gives the context."""
        return self.dtype in _MANTISSA, _MANTISSA.get(self.dtype, 8 * self.width - 8)

    def chunks(self, size: int) -> int:
        """Chunks of a tensor of ``size`` elements."""
        return -(-size // self.chunk)

    def limit(self, size: int) -> int:
        """The most bytes of ``planes``: every chunk as it is behind its mode."""
        return self.width * size + self.chunks(size)

    def attributes(self, size: int) -> dict[str, Any]:
        """Return the JSON-able attributes that ``params_of`` takes back, of a tensor of ``size`` elements."""
        return {"codec_version": version_for(self.chunk, size), "chunk": self.chunk, "dtype": self.dtype}


def is_coded(name: str) -> bool:
    """Return whether the codec takes this element type: floats, integers and booleans of whole bytes."""
    row = DTYPES.get(name)
    return row is not None and row.kind != "c" and row.bits >= 8


def params_for(name: str, chunk: object = CHUNK) -> ExactParams:
    """Return the parameters of new differences between tensors of element type ``name``.

    Raises
    ------
    UnsupportedError
        ``delta_exact.dtype``: complex numbers, or elements smaller than a byte.
    UsageError
        ``delta_exact.option``: a chunk that is no power of two in range.
    """
    row = dtype(name)
    if not is_coded(row.name):
        raise UnsupportedError(
            f"delta_exact takes floats, integers and booleans of whole bytes, found {row.name}",
            rule="delta_exact.dtype",
        )
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not is_chunk(chunk):
        raise refuse_option(f"a chunk that is a power of two from {MIN_CHUNK} to {MAX_CHUNK}", chunk)
    return ExactParams(chunk, row.name)


def refuse_option(expected: str, found: object) -> UsageError:
    """Return the error of an option."""
    return UsageError(f"codec delta_exact expected {expected}, found {str(found)[:80]!r}", rule="delta_exact.option")


def params_of(tensor: Tensor) -> ExactParams:
    """Read a tensor's attributes.

    Raises
    ------
    CodecError
        ``delta_exact.params``: an attribute is missing, unknown or out of range, or not the tensor's dtype.
    """
    stated = tensor.params
    version, chunk, name = (stated.get(key) for key in ("codec_version", "chunk", "dtype"))
    whole = isinstance(chunk, int) and not isinstance(chunk, bool) and is_chunk(chunk)
    known = isinstance(name, str) and is_coded(name) and name == tensor.dtype
    if not (whole and known and is_version(version)):
        raise CodecError(
            "delta_exact.params",
            f"expected codec_version {VERSION} or {LATER}, dtype {tensor.dtype}, and a chunk that is a power of two "
            f"from {MIN_CHUNK} to {MAX_CHUNK}; found {str(dict(stated))[:120]!r}",
            where=tensor.name,
        )
    return ExactParams(int(str(chunk)), str(name))


def as_words(values: Array, params: ExactParams, where: str = "") -> Array:
    """View values as flat words, in C order and aligned.

    Raises
    ------
    CodecError
        ``delta_exact.base``: values of another element type.
    """
    if values.dtype != numpy_dtype(params.dtype):
        raise CodecError(
            "delta_exact.base", f"expected values of {params.dtype}, found {values.dtype}", where=where or None
        )
    return flat(np.require(values, requirements=("C", "A"))).view(params.word)


def encode_chunks(params: ExactParams, base: Array, tuned: Array) -> dict[str, Array]:
    """Return ``sizes`` and ``planes`` of flat words that begin with a chunk."""
    sizes = np.empty(params.chunks(base.size), np.uint32)
    out = np.empty(params.limit(base.size), np.uint8)
    total = native.kernels.delta_encode(base, tuned, params.chunk, *params.element, out, sizes)
    return {"sizes": sizes, "planes": out[:total]}


def apply_chunks(
    params: ExactParams, parts: Mapping[str, Array], base: Array, out: Array, *, last: int, where: str
) -> None:
    """Apply chunks, whose bytes are exactly ``planes``, to flat words; ``out`` may be ``base``.

    Parameters
    ----------
    last : int
        Elements of the last chunk, of which there may be fewer in ``base`` and ``out``.

    Raises
    ------
    CodecError
        ``delta_exact.chunk``, ``.table``, ``.stream``. Of ``out``, some elements may have been written by then.
    """
    status, chunk = native.kernels.delta_apply(
        parts["planes"], parts["sizes"], params.chunk, last, *params.element, base, out
    )
    if status:
        rule = _RULES[status]
        raise CodecError(rule, f"expected {_WORDS[rule]} in chunk {chunk} of those at hand", where=where or None)


def check_sizes(params: ExactParams, sizes: Array, size: int, nbytes: int, where: str) -> None:
    """Refuse sizes of chunks that no chunk can have or that do not add up to ``planes``: ``delta_exact.size``."""
    most = params.width * params.chunk + 1
    total, largest = int(sizes.sum(dtype=np.uint64)), int(sizes.max(initial=0))
    if len(sizes) != params.chunks(size) or total != nbytes or largest > most:
        raise CodecError(
            "delta_exact.size",
            f"expected {nbytes} bytes in {params.chunks(size)} chunks of at most {most}, found {total} in "
            f"{len(sizes)}, the largest {largest}",
            where=where or None,
        )


def pack(base: Array, tuned: Array, *, chunk: int = CHUNK, workers: int | None = None) -> dict[str, Array]:
    """Return what turns ``base`` into ``tuned``, of one shape and element type, as parts ``sizes`` and ``planes``.

    Parameters
    ----------
    chunk : int
        Elements of an independent piece, a power of two.
    workers : int, optional
        As of ``for_ranges``.

    Raises
    ------
    UnsupportedError, UsageError
        As of ``params_for``; ``delta_exact.shape``: the arrays are of different shapes.
    """
    params = params_for(str(dtype(base.dtype).name), chunk)
    _require_shape(base, tuned)
    old, new = as_words(base, params), as_words(tuned, params)
    step = max(STEP // chunk, 1) * chunk
    packed: dict[int, dict[str, Array]] = {}

    def encode(start: int, stop: int) -> None:
        packed[start] = encode_chunks(params, old[start:stop], new[start:stop])

    for_ranges(old.size, step, encode, workers)
    none: dict[str, Array] = {"sizes": np.empty(0, np.uint32), "planes": np.empty(0, np.uint8)}
    pieces = [packed[start] for start in sorted(packed)] or [none]
    return {role: np.concatenate([piece[role] for piece in pieces]) for role in none}


def unpack(
    parts: Mapping[str, Array], base: Array, out: Array, *, chunk: int = CHUNK, workers: int | None = None
) -> None:
    """Apply what ``pack`` returned: write the fine-tune into ``out``, in C order, which may be ``base`` itself.

    Raises
    ------
    CodecError
        ``delta_exact.size``, ``.chunk``, ``.table``, ``.stream``: parts that are not of this shape, or damaged; ``out``
        may be written in part by then.
    """
    params = params_for(str(dtype(base.dtype).name), chunk)
    _require_shape(base, out)
    sizes, planes = parts["sizes"], parts["planes"]
    check_sizes(params, sizes, base.size, planes.size, "")
    old = as_words(base, params)
    new = flat(out).view(params.word)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])

    def apply(first: int, stop: int) -> None:
        piece = {"sizes": sizes[first:stop], "planes": planes[ends[first] : ends[stop]]}
        run = slice(first * chunk, min(stop * chunk, old.size))
        apply_chunks(params, piece, old[run], new[run], last=min(chunk, old.size - (stop - 1) * chunk), where="")

    for_ranges(len(sizes), max(STEP // chunk, 1), apply, workers)


def _require_shape(base: Array, other: Array) -> None:
    if base.shape != other.shape:
        raise UsageError(
            f"expected arrays of one shape, found {list(base.shape)} and {list(other.shape)}", rule="delta_exact.shape"
        )
