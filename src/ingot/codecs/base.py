"""The contract of a codec.

A codec sees a tensor as a matrix ``rows x cols`` (``Tensor.matrix_shape``: the last dimension is the columns) and
works on *chunks* of whole rows, so that a tensor larger than memory passes through in pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ingot.codecs.range_probe import RangeProbe
from ingot.core.buffers import fresh
from ingot.core.dtypes import numpy_dtype
from ingot.core.memory import available_ram
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Layout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Decoder, Tensor, require_writable

_LARGE = 1 << 28
_PIECE = 1 << 16  # elements that are decoded at a time on their way into a strided output


class RowReader(Protocol):
    """Sequential decoding, in memory bounded by the chunk."""

    def read_into(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out`` ([rows, cols], writable), rounding once to ``out.dtype``."""
        ...

    def finish(self) -> None:
        """Check lengths and digests of all parts after the last row."""
        ...


class Rows(ABC):
    """What the readers of codecs share: ``read_into`` fills any writable array, through a small buffer if need be."""

    @abstractmethod
    def fill(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out``: writable, aligned, native byte order, C order."""

    def read_into(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out``, strided or not; rule ``tensor.out`` where it is read-only."""
        require_writable(out)
        if out.flags.carray and out.dtype.isnative:
            self.fill(out)
            return
        rows = out if out.ndim else out.reshape(1)
        step = max(1, _PIECE // max(1, prod(rows.shape[1:])))
        for start in range(0, max(1, len(rows)), step):
            target = rows[start : start + step]
            piece = np.empty(target.shape, out.dtype.newbyteorder("="))
            self.fill(piece)
            target[...] = piece


class AddingReader(Rows):
    """A reader that adds while it decodes, in one pass."""

    @abstractmethod
    def add_into(self, base: Array, out: Array) -> None:
        """Write ``base`` plus the next rows into ``out``, both f32, f16 or bf16 in C order; ``out`` may be ``base``.

        The bits are those of decoding to f32, adding in f32, and rounding once.
        """


class BaseEncoder:
    """The part of the contract that ``Encoder`` and ``codecs.delta.base.DeltaEncoder`` share.

    An encoder is prepared for one tensor: everything but the bytes is decided. The methods here have defaults for an
    encoder that needs no memory, no package and no look at the values beforehand.

    Attributes
    ----------
    codec : str
        Identifier of the codec.
    params : mapping
        What the artifact states, and all that the decoder gets. Entries that fit passes determine are missing until
        the last pass is over.
    parts : tuple of PartSpec
        In file order.
    fit_passes : int
        The number of passes over all rows that must go through ``fit_pass`` before ``encode``.
    step : int
        The number of rows (of elements, if the codec is ``elementwise``) at whose multiples chunks may begin; see
        ``row_step``.
    single_chunk : bool
        Whether all rows must come in one chunk.
    lossless : bool
        Whether every value survives these options.
    """

    codec: str
    parts: tuple[PartSpec, ...]
    step: int
    single_chunk: bool

    if TYPE_CHECKING:
        # Some encoders compute these. At run time a property here would become the default of a dataclass field.

        @property
        def params(self) -> Mapping[str, Any]: ...

        @property
        def fit_passes(self) -> int: ...

        @property
        def lossless(self) -> bool: ...

    def scratch_bytes(self) -> int:
        """Return the bytes that one thread needs to encode, besides its chunk."""
        return 0

    def scratch_bytes_per_element(self) -> float:
        """Return the bytes that encoding takes for each element of a chunk, besides its rows and parts."""
        return 0

    def retained_bytes(self) -> int:
        """Return the bytes that the encoder keeps from its fit passes until ``forget``."""
        return 0

    def range_probe(self) -> RangeProbe | None:
        """Return the probe that decides whether the stated types reach small values; None if any value fits."""
        return None

    def observes(self) -> bool:
        """Return whether the values should go through ``observe`` before the encoder is used."""
        return self.range_probe() is not None

    def observe(self, rows: Array, start: int) -> bool:
        """Take in a run of rows, ``start`` rows after the first.

        Returns True once further rows can change neither ``wider_options`` nor ``underflow``.
        """
        probe = self.range_probe()
        return probe is None or probe.observe(rows)

    def wider_options(self) -> Mapping[str, Any]:
        """Return options for an encoder whose types keep all bits of the observed values; empty if these types do."""
        probe = self.range_probe()
        return {} if probe is None else probe.wider_options()

    def underflow(self) -> str | None:
        """Return why the stated types lose all observed values; None if they do not."""
        probe = self.range_probe()
        return None if probe is None else probe.underflow()

    def ready(self) -> None:
        """Raise ``MissingExtraError`` if an optional package is missing that ``encode`` needs.

        Plans and listings prepare encoders without the package; the engine calls this before it reads the first byte.
        """

    def forget(self) -> None:
        """Release what fit passes found; called when the tensor is written."""


class Encoder(BaseEncoder, ABC):
    """The prepared encoding of one tensor."""

    def fit_pass(self, rows: Array) -> None:
        """Take in the next rows of the present pass, in order; the result may not depend on how rows are chunked."""

    @abstractmethod
    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's next bytes for these rows (role to a C-order array). Pure and thread-safe.

        ``start`` is the number of rows before these. Parts that a tensor has once go with row 0.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        """Decode what ``encode`` returned for one chunk into ``out``, to measure the error. Pure and thread-safe."""


class Codec(Decoder):
    """Numbers to parts and back.

    Attributes
    ----------
    id : str
    lossless : bool
        Whether decoding gives the encoded values back whatever the options.
    streams : bool
        Whether a reader holds a chunk and its share of the stored bytes at most, never the whole tensor.
    checks_stored : bool
        Whether ``stored`` checks a tensor without making the values that are left out.
    """

    id: ClassVar[str]
    lossless: ClassVar[bool]
    streams: ClassVar[bool]
    checks_stored: ClassVar[bool] = False

    @abstractmethod
    def check(self, tensor: Tensor) -> None:
        """Raise ``CodecError`` with a rule unless parameters, parts and shape fit together; reads no part's bytes."""

    @abstractmethod
    def reader(self, tensor: Tensor) -> RowReader:
        """Return a sequential reader of ``tensor``'s rows, digests checked at its end."""

    @abstractmethod
    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> Encoder:
        """Prepare to encode a tensor of ``shape`` and source ``dtype``.

        Raises
        ------
        UsageError
            An option that the codec does not know or a value out of range.
        UnsupportedError
            A dtype or shape that the codec cannot encode.
        """

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return ``tensor`` in another layout of the codec, or why not; may read small parts, checking their digests.

        By default the codec has one layout only.
        """
        return cannot(layout, f"codec {self.id} has one layout only")

    def stored(self, tensor: Tensor) -> Iterator[Array]:
        """Yield the stored values, in chunks, after checking their positions; digests are checked at the end.

        Called if ``checks_stored`` is set; raises what ``reader`` raises.
        """
        raise NotImplementedError


class ChunkParts(dict[str, Array]):
    """What ``encode`` returns where a chunk's bytes alone do not tell ``decode`` what they stand for.

    ``start`` is the number of rows before the chunk, ``within`` what ``decode`` goes by: parts that stand for the chunk
    alone, or those that the encoder within returned. Any other mapping holds the parts of a whole tensor.
    """

    start: int = 0
    within: Mapping[str, Array]


class RepackReader(Protocol):
    """Sequential repacking, in memory bounded by the chunk."""

    def read(self, rows: int) -> dict[str, Array]:
        """Return each part's next bytes for the next ``rows`` rows. What a tensor has once goes with the first."""
        ...

    def finish(self) -> None:
        """Check lengths and digests of all source parts after the last row."""
        ...


INTEGERS, SCALES, IN_F32, IN_TYPE = GRADES = ("integers", "scales", "f32", "type")
"""In what a repacked tensor can equal its source (``spec/interop.md``, "Grades"): integers, scales, values in f32,
values in the target's type as its programs compute them."""


@dataclass(frozen=True, slots=True)
class Repacked:
    """A stored tensor in another layout of its codec: the same integers and scales, no value goes through floats.

    Parameters
    ----------
    layout : Layout
    parts : tuple of PartSpec
        Of the result, complete.
    rows, step, memory : int
        Rows to go through, in chunks that begin at multiples of ``step``; a chunk takes ``memory`` bytes per row. Where
        the layout lies column by column, rows are as many columns as can be written alone.
    why_not : str or None
        Why a value would not decode to the same bits, or why the family has no way into this layout; None if every
        value keeps its bits. Known before anything is written.
    reader : callable
        Begins a pass over the tensor; for an exact one only.
    rounded : bool
        Indices and scales are the same, and values are once they are rounded to the tensor's type; in f32 not all are.
    held : int
        Bytes that a chunk takes beside its rows.
    again : bool
        Every chunk reads the whole tensor: the fewer chunks, the better.
    """

    layout: Layout
    parts: tuple[PartSpec, ...]
    rows: int
    step: int
    memory: int
    why_not: str | None
    reader: Callable[[], RepackReader]
    rounded: bool = False
    held: int = 0
    again: bool = False

    @property
    def exact(self) -> bool:
        """Whether every value decodes to the same bits, in the tensor's own type at least."""
        return self.why_not is None

    def equal(self, *, steps: bool) -> tuple[str, ...]:
        """Return the ``GRADES`` in which the result equals the tensor; what there is none of is equal.

        ``steps``: who reads it rounds each step of ``s * q + o`` to the type of the scales, where values here are
        those of f32 rounded once.
        """
        if not self.exact:
            return ()
        in_steps = isinstance(self.layout, AffineLayout) and self.layout.in_steps
        lacking = {IN_F32: self.rounded, IN_TYPE: steps and in_steps}
        return tuple(grade for grade in GRADES if not lacking.get(grade))


def cannot(layout: Layout, why: str) -> Repacked:
    """Return the answer of a family that has no way into ``layout``."""

    def refuse() -> RepackReader:
        raise ValueError(f"expected a layout that keeps every value: {why}")

    return Repacked(layout, (), 0, 1, 0, why, refuse)


def row_step(codec: Codec, encoder: Encoder, cols: int) -> int:
    """Return the number of rows of ``cols`` columns at whose multiples chunks may begin."""
    if not codec.elementwise:
        return encoder.step
    return encoder.step // gcd(encoder.step, cols) if cols else 1


def empty(shape: tuple[int, ...], dtype: str, where: str) -> Array:
    """Allocate the result of a decode; what cannot be had becomes a ``CodecError`` that says how much was wanted.

    A few bytes of a sparse or compressed tensor may stand for any size, and the system grants more than it has: a large
    array is compared with what is free before it is asked for.
    """
    nbytes = prod(shape) * numpy_dtype(dtype).itemsize
    reason: Exception | None = None
    if nbytes <= _LARGE or nbytes <= available_ram():
        try:
            return fresh(shape, numpy_dtype(dtype))
        except (MemoryError, ValueError) as error:
            reason = error
    raise CodecError(
        "codec.too-large", f"cannot allocate an array of shape {list(shape)} in {dtype}", where=where
    ) from reason


def result(tensor: Tensor, dtype: str, out: Array | None) -> Array:
    """Return what ``decode`` writes to: ``out`` if given, else memory of its own (``empty``)."""
    return empty(tensor.shape, dtype, tensor.name) if out is None else out


def decode_by_rows(codec: Codec, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
    """Implement ``decode`` by ``reader``: the checks, one allocation, one pass."""
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
