"""Differences between two versions of a tensor: the contract, and the codecs that store one (design section 9.3).

Most are ordinary codecs that hold ``fine-tune - base`` as float32 values: applying one adds what it decodes to the
base and rounds once. ``delta_exact`` holds what turns the base's bits into the fine-tune's; alone it means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from ingot.codecs.base import Codec, Encoder, RowReader, forget, held
from ingot.codecs.base import scratch as scratch_of
from ingot.codecs.reach import Reaching
from ingot.codecs.table import CODECS
from ingot.core import native
from ingot.core.buffers import scratch
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.floats import as_bits, cast_into, float_name
from ingot.core.registry import Instances
from ingot.errors import UnsupportedError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


class NeedsBase:
    """The values of a codec that means nothing without the base it was made against: there are none."""

    id: ClassVar[str]
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    holds: ClassVar[str]
    rule: ClassVar[str]

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Refuse: ``rule``."""
        raise self._refused(tensor.name)

    def reader(self, tensor: Tensor) -> RowReader:
        """Refuse: ``rule``."""
        raise self._refused(tensor.name)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> Encoder:
        """Refuse: ``rule``."""
        raise self._refused(None)

    def _refused(self, where: str | None) -> UnsupportedError:
        return UnsupportedError(
            f"{self.id} holds {self.holds}: `ingot diff` makes it, `ingot patch` applies it",
            rule=self.rule,
            where=where,
        )


class DeltaEncoder(Protocol):
    """As ``codecs.base.Encoder``, over two arrays of the same rows: of the base, and of the fine-tune."""

    codec: str
    parts: tuple[PartSpec, ...]
    fit_passes: int
    step: int
    single_chunk: bool
    lossless: bool

    @property
    def params(self) -> Mapping[str, Any]: ...

    def fit_pass(self, base: Array, tuned: Array) -> None:
        """Take in the next rows of the present pass."""
        ...

    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's next bytes. Pure and thread-safe."""
        ...

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write what applying one chunk's ``parts`` to its ``base`` gives. Pure and thread-safe.

        Asked for only where the encoder is not ``lossless``.
        """
        ...


class Applier(Protocol):
    """Sequential application, in memory bounded by the chunk."""

    def apply(self, base: Array, out: Array) -> None:
        """Write the fine-tune's next rows into ``out`` ([rows, cols], C order); ``out`` may be ``base`` itself."""
        ...

    def finish(self) -> None:
        """Check lengths and digests of all parts after the last row."""
        ...


class DeltaCodec(Protocol):
    """How a difference is stored.

    ``exact`` tells whether applying gives the fine-tune bit for bit; ``elementwise`` as of ``Codec``.
    """

    @property
    def id(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    @property
    def elementwise(self) -> bool: ...

    def check(self, tensor: Tensor) -> None:
        """Raise ``CodecError`` unless parameters, parts and shape fit together; reads no part's bytes."""
        ...

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> DeltaEncoder:
        """Prepare to store a difference of two tensors of one shape and element type ``dtype``."""
        ...

    def applier(self, tensor: Tensor, dtype: str) -> Applier:
        """Return a sequential applier of the delta ``tensor`` to a base of element type ``dtype``."""
        ...


@runtime_checkable
class AnyShape(Protocol):
    """A ``DeltaCodec`` whose tensors need not state their base's shape."""

    def fits(self, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether the delta ``tensor`` may be applied to a base of ``shape``."""
        ...


def fits(codec: DeltaCodec, tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the delta ``tensor`` may be applied to a base of ``shape``: its own, unless its codec knows better."""
    return codec.fits(tensor, shape) if isinstance(codec, AnyShape) else tensor.shape == shape


DELTAS: Instances[DeltaCodec] = Instances(
    "delta codec",
    (
        ("delta_exact", "ingot.codecs.delta.exact:ExactDelta"),
        ("delta_rows", "ingot.codecs.delta.rows:RowsDelta"),
        ("sparse_patch", "ingot.codecs.delta.sparse_patch:SparsePatchDelta"),
    ),
)


def delta_codec(id: str) -> DeltaCodec:
    """Return how a delta tensor of codec ``id`` is made and applied: by its own rule, or by addition."""
    return DELTAS[id] if id in DELTAS else Additive(CODECS.get_or_refuse(id))


class Additive:
    """A codec of float32 differences: ``fine-tune = round(base + difference)``, computed in float32."""

    exact: ClassVar[bool] = False

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.id, self.elementwise = codec.id, codec.elementwise

    def check(self, tensor: Tensor) -> None:
        self._codec.check(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> DeltaEncoder:
        return AdditiveEncoder(self._codec.encoder(shape, "f32", options))

    def applier(self, tensor: Tensor, dtype: str) -> Applier:
        return AdditiveApplier(self._codec.reader(tensor))


@runtime_checkable
class AddingEncoder(Protocol):
    """An ``Encoder`` that adds while it decodes, as an ``AddingReader``."""

    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write ``base`` plus what ``decode`` gives of ``parts`` into ``out``, as of ``AddingReader.add_into``."""
        ...


@runtime_checkable
class Pairing(Protocol):
    """An ``Encoder`` of float32 differences that subtracts while it encodes, with no array of them between.

    Both arrays are f32, f16 or bf16, of one type, in C order; the bits are those of what ``difference`` gives.
    """

    def fit_pair(self, base: Array, tuned: Array) -> None: ...

    def encode_pair(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]: ...


class AdditiveEncoder:
    """Encodes ``tuned - base`` in float32 by an ordinary encoder."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.codec, self.parts, self.fit_passes = inner.codec, inner.parts, inner.fit_passes
        self.step, self.single_chunk, self.lossless = inner.step, inner.single_chunk, False
        # Asked once: protocols are slow to ask.
        self._pairing = inner if isinstance(inner, Pairing) else None
        self._adding = inner if isinstance(inner, AddingEncoder) else None

    @property
    def params(self) -> Mapping[str, Any]:
        params: Mapping[str, Any] = self._inner.params
        return params

    @property
    def looks(self) -> bool:
        """Whether it is for the values to say what they are stored in."""
        return isinstance(self._inner, Reaching)

    def look(self, rows: Array, start: int) -> bool:
        """As of ``codecs.reach.Reaching``, over rows of the difference."""
        return not isinstance(self._inner, Reaching) or self._inner.look(rows, start)

    def wider(self) -> Mapping[str, Any]:
        return self._inner.wider() if isinstance(self._inner, Reaching) else {}

    def lost(self) -> str | None:
        return self._inner.lost() if isinstance(self._inner, Reaching) else None

    @property
    def held(self) -> int:
        return held(self._inner)

    @property
    def scratch(self) -> int:
        return scratch_of(self._inner)

    def forget(self) -> None:
        forget(self._inner)

    def fit_pass(self, base: Array, tuned: Array) -> None:
        if self._pairing is not None and _plain(base, tuned):
            self._pairing.fit_pair(base, tuned)
        else:
            self._inner.fit_pass(difference(base, tuned))

    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        if self._pairing is not None and _plain(base, tuned):
            return self._pairing.encode_pair(base, tuned, start)
        parts: dict[str, Array] = self._inner.encode(difference(base, tuned), start)
        return parts

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        if self._adding is not None and fusible(base, out):
            self._adding.add_decoded(parts, base, out)
            return
        total = scratch(base.shape, np.float32)
        self._inner.decode(parts, total)
        added(total, base, out)


@runtime_checkable
class AddingReader(Protocol):
    """A ``RowReader`` that adds while it decodes, in one pass."""

    def add_into(self, base: Array, out: Array) -> None:
        """Write ``base`` plus the next rows into ``out``, both f32, f16 or bf16 in C order; ``out`` may be ``base``.

        The bits are those of decoding to f32, adding in f32, and rounding once.
        """
        ...


@runtime_checkable
class UndoingReader(AddingReader, Protocol):
    """An ``AddingReader`` that tells in the same pass how near subtracting comes to the base.

    Arrays are as of ``add_into``; ``back`` is apart from both others.
    """

    def add_back_into(self, base: Array, out: Array, back: Array) -> None:
        """As ``add_into``, and write ``out`` less the same rows, computed in f32 and rounded once, into ``back``."""
        ...

    def subtract_from(self, base: Array, out: Array) -> None:
        """Write ``base`` less the next rows, computed in f32 and rounded once, into ``out``."""
        ...


# Elements that are added at a time: what is made of them between stays in a cache.
_PIECE = 1 << 19
_FUSED = ("f32", "f16", "bf16")


class AdditiveApplier:
    """Adds what a reader decodes, in one pass where the reader can."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._adding = reader if isinstance(reader, AddingReader) else None  # asked once: protocols are slow to ask

    def apply(self, base: Array, out: Array) -> None:
        if self._adding is not None and fusible(base, out):
            self._adding.add_into(base, out)
            return
        step = max(1, _PIECE // max(base.shape[-1], 1)) if base.ndim > 1 else max(len(base), 1)
        for start in range(0, len(base), step):
            rows = base[start : start + step]
            total = scratch(rows.shape, np.float32)
            self._reader.read_into(total)
            added(total, rows, out[start : start + step])

    def finish(self) -> None:
        self._reader.finish()


def fusible(base: Array, out: Array) -> bool:
    """Whether both are of one type that kernels add to, in C order, and the same array or apart."""
    start, other = base.ctypes.data, out.ctypes.data
    return _plain(base, out) and (start == other or start + base.nbytes <= other or other + out.nbytes <= start)


def _plain(first: Array, other: Array) -> bool:
    """Whether both are of one type that kernels know, in C order."""
    plain = all(array.flags.c_contiguous and array.flags.aligned for array in (first, other))
    return plain and first.dtype == other.dtype and resolve_dtype(first.dtype).name in _FUSED


def difference(base: Array, tuned: Array) -> Array:
    """Return ``tuned - base`` in float32; what overflows is infinite, and infinities cancel to NaN."""
    wide = scratch(tuned.shape, np.float32)
    if _plain(base, tuned):
        native.kernels.differences(
            as_bits(tuned.reshape(-1)), as_bits(base.reshape(-1)), wide.reshape(-1), float_name(base)
        )
        return wide
    new, old, out = tuned.reshape(-1), base.reshape(-1), wide.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, out.size, _PIECE):
            piece = slice(start, start + _PIECE)
            np.subtract(widened(new[piece]), widened(old[piece]), out=out[piece])
    return wide


def added(total: Array, base: Array, out: Array) -> None:
    """Round ``total + base``, computed in float32 in place of ``total``, to ``out``."""
    with np.errstate(over="ignore", invalid="ignore"):
        total += widened(base)
    cast_into(total, out)


def widened(rows: Array) -> Array:
    """Return rows as float32: themselves where they are."""
    if rows.dtype == np.float32:
        return rows
    wide = scratch(rows.shape, np.float32)
    cast_into(rows, wide)
    return wide
