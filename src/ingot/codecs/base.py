"""The base classes and protocols of codecs.

A codec treats a tensor as a matrix ``rows x cols`` (``Tensor.matrix_shape``: the last dimension is the columns). It
works on *chunks* of full rows, so that a tensor may be larger than memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.buffers import fresh
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime.memory import available_ram
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Layout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Decoder, Tensor, require_writable

IMPORTANCE = "importance"


def option_error(codec: str, expected: str, value: object) -> UsageError:
    """Return the ``UsageError`` ``<codec>.option`` for an invalid value of an option."""
    return UsageError(f"codec {codec} expects {expected}, found {value!r:.80}", rule=f"{codec}.option")


def require_known(codec: str, options: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ``UsageError`` ``<codec>.option`` if an option's name is not in ``names``."""
    unknown = sorted(str(key) for key in options if key not in names)
    if unknown:
        raise option_error(codec, f"the options {', '.join(names)}", unknown[0])


def source_dtype(codec: str, dtype: str, supported: Collection[str]) -> str:
    """Return the name of the weights' dtype; raise ``UnsupportedError`` ``<codec>.dtype`` if it is not supported."""
    source = resolve_dtype(dtype).name
    if source not in supported:
        raise UnsupportedError(
            f"expected weights of type {', '.join(supported)}, found {source}; keep this tensor dense",
            rule=f"{codec}.dtype",
        )
    return source


def is_int_between(value: object, low: int, high: int) -> bool:
    """Return whether ``value`` is an integer from ``low`` to ``high``; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def column_weights(codec: str, options: Mapping[str, Any], cols: int) -> Array | None:
    """Return the weight of each column's squared errors (f64, [cols]); None if option ``importance`` is not set.

    Raises ``UsageError`` ``<codec>.option`` unless the option has a finite number of at least 0 for each column, one of
    them above 0.
    """
    importance = options.get(IMPORTANCE)
    if importance is None:
        return None
    if not isinstance(importance, Sequence | np.ndarray) or isinstance(importance, str | bytes):
        raise option_error(codec, "importance as a list of numbers", importance)
    try:
        weights = np.ascontiguousarray(importance, np.float64)
    except (TypeError, ValueError):
        raise option_error(codec, "importance as a list of numbers", importance) from None
    if weights.shape != (cols,) or not (np.isfinite(weights) & (weights >= 0)).all():
        raise option_error(codec, f"{cols} importance weights, finite and not negative", weights.shape)
    if not weights.any():
        raise option_error(codec, "an importance above 0", 0)
    return weights


MIN_CHUNK = 1 << 8
MAX_CHUNK = 1 << 20
# Elements per call: enough that the call's cost is negligible, few enough to use all threads.
STEP = 1 << 20
VERSION = 1
LATER = 2  # chunks may be coded by rANS; encoders use it from RANS_CHUNK elements on
RANS_CHUNK = 1 << 16


def is_chunk(chunk: int) -> bool:
    """Return whether ``chunk``, a number of elements, is a power of two within the limits."""
    return MIN_CHUNK <= chunk <= MAX_CHUNK and chunk & (chunk - 1) == 0


def version_for(chunk: int, size: int, *, rans: bool = True) -> int:
    """Return ``codec_version`` of a tensor of ``size`` elements.

    ``rans`` states whether the tensor's encoder may use rANS.
    """
    return LATER if rans and min(chunk, size) >= RANS_CHUNK else VERSION


def is_version(version: object) -> bool:
    """Return whether ``version`` is a ``codec_version`` that can be read."""
    return version in (VERSION, LATER) and not isinstance(version, bool)


_LARGE = 1 << 28
_BLOCK = 1 << 16  # elements that are decoded at a time before they are copied to a strided output


class RowReader(Protocol):
    """A sequential reader of a tensor's decoded rows; it buffers about a chunk if ``Codec.streams`` is set."""

    def read_into(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out`` [rows, cols], rounding once to ``out.dtype``."""
        ...

    def finish(self) -> None:
        """Check lengths and digests of all parts; called after the last row."""
        ...


class Rows(ABC):
    """The base class of most readers: ``read_into`` fills any writable array, if necessary through a small buffer."""

    @abstractmethod
    def fill(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out``: writable, aligned, native byte order, C order."""

    def read_into(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out``, strided or not; raise ``tensor.out`` if it is read-only."""
        require_writable(out)
        if out.flags.carray and out.dtype.isnative:
            self.fill(out)
            return
        rows = out if out.ndim else out.reshape(1)
        step = max(1, _BLOCK // max(1, prod(rows.shape[1:])))
        for start in range(0, max(1, len(rows)), step):
            target = rows[start : start + step]
            block = np.empty(target.shape, out.dtype.newbyteorder("="))
            self.fill(block)
            target[...] = block


class AddingReader(Rows):
    """A reader that can add decoded values to a base in the same pass."""

    @abstractmethod
    def add_into(self, base: Array, out: Array) -> None:
        """Write ``base`` plus the next rows to ``out``, both f32, f16 or bf16 in C order; they may be one array.

        The bits are those of decoding to f32, adding in f32, and rounding once.
        """


class BaseEncoder:
    """The base class of ``Encoder`` and ``codecs.delta.base.DeltaEncoder``.

    An encoder is prepared for one tensor: everything except the bytes is decided. The defaults here suit an encoder
    that needs no memory, no package and no observed values.

    Attributes
    ----------
    codec : str
        Identifier of the codec.
    params : mapping
        The parameters that the file declares; the decoder receives no others. Entries that fit passes determine are
        missing before the last pass ends.
    parts : tuple of PartSpec
        The parts, in file order.
    fit_passes : int
        The number of passes over all rows that ``fit_pass`` must process before ``encode``.
    step : int
        Each chunk begins at a multiple of this number of rows (elements, if the codec is ``elementwise``); see
        ``row_step``.
    single_chunk : bool
        Whether all rows must be in one chunk.
    lossless : bool
        Whether these options preserve every value.
    """

    codec: str
    parts: tuple[PartSpec, ...]
    step: int
    single_chunk: bool

    if TYPE_CHECKING:
        # Some encoders compute these. A property here would become the default of a dataclass field.

        @property
        def params(self) -> Mapping[str, Any]: ...

        @property
        def fit_passes(self) -> int: ...

        @property
        def lossless(self) -> bool: ...

    def scratch_bytes(self) -> int:
        """Return the bytes of memory that a thread needs to encode, besides its chunk."""
        return 0

    def scratch_bytes_per_element(self) -> float:
        """Return the bytes of memory per element of a chunk for encoding, besides rows and parts."""
        return 0

    def retained_bytes(self) -> int:
        """Return the bytes of memory for results of fit passes, which ``forget`` releases."""
        return 0

    def range_probe(self) -> RangeProbe | None:
        """Return the probe that decides whether the declared types represent small values; None if they always do."""
        return None

    def observes(self) -> bool:
        """Return whether values should be passed to ``observe`` before encoding."""
        return self.range_probe() is not None

    def observe(self, rows: Array, start: int) -> bool:
        """Use rows from the index ``start`` on to determine ``wider_options`` and ``underflow``.

        Returns True if further rows cannot change the results of these methods.
        """
        probe = self.range_probe()
        return probe is None or probe.observe(rows)

    def wider_options(self) -> Mapping[str, Any]:
        """Return options with wider types that preserve all bits of the observed values; empty if none must change."""
        probe = self.range_probe()
        return {} if probe is None else probe.wider_options()

    def underflow(self) -> str | None:
        """Return why the declared types would round all observed values to 0; None if they do not."""
        probe = self.range_probe()
        return None if probe is None else probe.underflow()

    def ready(self) -> None:
        """Raise ``MissingExtraError`` if ``encode`` needs an optional package that is missing.

        Plans and listings prepare encoders without the package; the engine calls this before it reads any byte.
        """

    def forget(self) -> None:
        """Release the results of the fit passes; called after the tensor is written."""


class Encoder(BaseEncoder, ABC):
    """An encoder that is prepared for one tensor."""

    def fit_pass(self, rows: Array) -> None:
        """Process the next rows of a fit pass, in order; the result must not depend on the chunks."""

    @abstractmethod
    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the next bytes of each part for these rows: role to C-order array. Thread-safe, without side effects.

        ``start`` is the index of the first row. Parts of the full tensor are returned with row 0.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        """Decode the parts that ``encode`` returned for one chunk into ``out``, to measure the error.

        Thread-safe, without side effects.
        """


class Codec(Decoder):
    """A codec, which converts numbers to parts and back.

    Attributes
    ----------
    id : str
    lossless : bool
        Whether decoding returns the encoded values, whatever the options.
    streams : bool
        Whether a reader buffers at most a chunk and its stored bytes, never the full tensor.
    checks_stored : bool
        Whether ``stored`` checks a tensor without computing the omitted zeros.
    """

    id: ClassVar[str]
    lossless: ClassVar[bool]
    streams: ClassVar[bool]
    checks_stored: ClassVar[bool] = False

    @abstractmethod
    def check(self, tensor: Tensor) -> None:
        """Raise ``CodecError`` if parameters, parts and shape contradict each other; reads no part's bytes."""

    @abstractmethod
    def reader(self, tensor: Tensor) -> RowReader:
        """Return a sequential reader of a tensor's rows; digests are checked at its end."""

    @abstractmethod
    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> Encoder:
        """Prepare to encode a tensor of ``shape`` and source ``dtype``.

        Raises
        ------
        UsageError
            An option is unknown, or its value is out of range.
        UnsupportedError
            The codec cannot encode this dtype or shape.
        """

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking of ``tensor`` into another layout, or the reason why it is impossible.

        Small parts may be read, and their digests checked. By default a codec has only one layout.
        """
        return cannot(layout, f"codec {self.id} has one layout only")

    def stored(self, tensor: Tensor) -> Iterator[Array]:
        """Yield a tensor's stored values in chunks, without the omitted zeros.

        Positions are checked first, digests at the end. Called if ``checks_stored`` is set; raises the errors of
        ``reader``.
        """
        raise NotImplementedError


class ChunkParts(dict[str, Array]):
    """The parts of a chunk, for encoders whose ``decode`` needs further data.

    ``start`` is the index of the chunk's first row. ``within`` are the parts that an inner encoder returned for the
    chunk; that encoder's ``decode`` gets them. If ``decode`` gets a mapping of another type, this contains the parts of
    an entire tensor.
    """

    start: int = 0
    within: Mapping[str, Array]


class RepackReader(Protocol):
    """A sequential reader that returns a tensor's parts in another layout, in chunks of rows."""

    def read(self, rows: int) -> dict[str, Array]:
        """Return the next bytes of each part for ``rows`` rows; parts of the full tensor come with the first chunk."""
        ...

    def finish(self) -> None:
        """Check lengths and digests of all source parts; called after the last row."""
        ...


INTEGERS, SCALES, IN_F32, IN_TYPE = GRADES = ("integers", "scales", "f32", "type")
"""Grades of equality between a repacked tensor and its source (``spec/interop.md``, "Grades").

They compare integers, scales, values in f32, and values in the target's type as the target's programs compute them.
"""


@dataclass(frozen=True, slots=True)
class Repacked:
    """The repacking of a stored tensor into another layout: integers and scales are copied, not quantized again.

    Parameters
    ----------
    layout : Layout
    parts : tuple of PartSpec
        All parts of the result.
    rows, step, memory : int
        Rows to process, in chunks that begin at multiples of ``step``; a chunk needs ``memory`` bytes per row. If the
        layout is stored by columns, a "row" is the smallest number of columns that can be written separately.
    why_not : str or None
        Why a value would change, or why the codec cannot repack into this layout; None if every value keeps its bits.
        It is determined before any byte is written.
    reader : callable
        Starts a pass over the tensor; may be called only if ``exact`` is true.
    rounded : bool
        Whether integers and scales are the same, but some values are equal only after rounding to the tensor's type.
    extra_memory : int
        Bytes of memory that a chunk needs in addition to its rows.
    again : bool
        Whether each chunk reads the entire tensor, so that fewer chunks are faster.
    """

    layout: Layout
    parts: tuple[PartSpec, ...]
    rows: int
    step: int
    memory: int
    why_not: str | None
    reader: Callable[[], RepackReader]
    rounded: bool = False
    extra_memory: int = 0
    again: bool = False

    @property
    def exact(self) -> bool:
        """Whether every value decodes to the same bits, at least in the tensor's type."""
        return self.why_not is None

    def equal(self, *, steps: bool) -> tuple[str, ...]:
        """Return the ``GRADES`` in which result and tensor are equal; a grade that does not apply counts as equal.

        ``steps`` states that the target's runtime rounds each step of ``s * q + o`` to the type of the scales; Ingot
        computes in f32 and rounds once.
        """
        if not self.exact:
            return ()
        in_steps = isinstance(self.layout, AffineLayout) and self.layout.rounds_products
        lacking = {IN_F32: self.rounded, IN_TYPE: steps and in_steps}
        return tuple(grade for grade in GRADES if not lacking.get(grade))


def cannot(layout: Layout, why: str) -> Repacked:
    """Return the result for a ``layout`` into which a codec cannot repack, with the reason."""

    def refuse() -> RepackReader:
        raise ValueError(f"expected a layout that keeps every value: {why}")

    return Repacked(layout, (), 0, 1, 0, why, refuse)


def row_step(codec: Codec, encoder: Encoder, cols: int) -> int:
    """Return the row alignment of chunks: each chunk of rows with ``cols`` columns must begin at a multiple of it."""
    if not codec.elementwise:
        return encoder.step
    return encoder.step // gcd(encoder.step, cols) if cols else 1


def empty(shape: tuple[int, ...], dtype: str, location: str) -> Array:
    """Allocate an array for decoded values; raise ``CodecError`` ``codec.too-large`` if memory is insufficient.

    A few bytes of a sparse or compressed tensor may declare any size, and the system grants more memory than it has.
    Therefore the size of a large array is compared with the free memory first.
    """
    nbytes = prod(shape) * numpy_dtype(dtype).itemsize
    reason: Exception | None = None
    if nbytes <= _LARGE or nbytes <= available_ram():
        try:
            return fresh(shape, numpy_dtype(dtype))
        except (MemoryError, ValueError) as error:
            reason = error
    raise CodecError(
        "codec.too-large", f"cannot allocate an array of shape {list(shape)} in {dtype}", where=location
    ) from reason


def result(tensor: Tensor, dtype: str, out: Array | None) -> Array:
    """Return ``out``, or a new array for the decoded values of ``tensor`` if ``out`` is None."""
    return empty(tensor.shape, dtype, tensor.name) if out is None else out


def decode_by_rows(codec: Codec, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
    """Decode a tensor with ``codec.reader``: check it, allocate the result once, and read it in one pass."""
    if dtype not in FLOAT_TARGETS:
        raise UnsupportedError(
            f"expected a target dtype {', '.join(FLOAT_TARGETS)} for codec {codec.id}, found {dtype}", where=tensor.name
        )
    out = result(tensor, dtype, out)
    reader = codec.reader(tensor)
    if out.size:
        reader.read_into(out.reshape(tensor.matrix_shape))
    reader.finish()
    return out


FLOAT_TARGETS = ("f32", "f16", "bf16")
