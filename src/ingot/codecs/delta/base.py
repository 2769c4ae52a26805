"""Differences between two versions of a tensor: the base classes of the codecs that store them.

Most codecs store ``fine-tune - base`` as f32 values, like ordinary codecs: the difference is applied by adding the
decoded values to the base and rounding once. ``delta_exact`` stores how the bits change, so that decoding needs the
base.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from ingot.codecs.base import AddingReader, BaseEncoder, Codec, Encoder, RowReader
from ingot.codecs.delta.flat import PairEncoder
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import as_bits, cast_into, float_name
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.registry import Instances
from ingot.core.runtime import native
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array, Tensor


class NeedsBase(Codec):
    """A codec whose parts have no values without the base, so that decoding raises an error."""

    id: ClassVar[str]
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    holds: ClassVar[str]
    rule: ClassVar[str]

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Raise ``UnsupportedError`` with the codec's ``rule``: a difference cannot be decoded without its base."""
        raise self._needs_base_error(tensor.name)

    def reader(self, tensor: Tensor) -> RowReader:
        """Raise ``UnsupportedError`` with the codec's ``rule``: a difference cannot be read without its base."""
        raise self._needs_base_error(tensor.name)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> Encoder:
        """Raise ``UnsupportedError`` with the codec's ``rule``."""
        raise self._needs_base_error(None)

    def _needs_base_error(self, location: str | None) -> UnsupportedError:
        return UnsupportedError(
            f"{self.id} stores {self.holds}: apply it to its base with `ingot patch`",
            rule=self.rule,
            where=location,
        )


class DeltaEncoder(BaseEncoder, ABC):
    """An encoder that is prepared for one difference; its methods get the same rows of base and fine-tune."""

    def fit_pass(self, base: Array, tuned: Array) -> None:
        """Process the next rows of a fit pass."""

    @abstractmethod
    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        """Return the next bytes of each part. Thread-safe, without side effects."""

    @abstractmethod
    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Apply a chunk's parts to its ``base`` and write the result to ``out``. Thread-safe, without side effects.

        Called only if the encoder is not ``lossless``.
        """


class Applier(Protocol):
    """A sequential applier of a difference, whose memory is limited by the chunk."""

    def apply(self, base: Array, out: Array) -> None:
        """Write the fine-tune's next rows to ``out`` [rows, cols], C order; ``out`` may be ``base``."""
        ...

    def finish(self) -> None:
        """Check lengths and digests of all parts after the last row."""
        ...


class DeltaCodec(ABC):
    """A codec of differences.

    Attributes
    ----------
    exact : bool
        Whether applying the difference restores the fine-tune bit for bit.
    elementwise : bool
        See ``model.tensor.Decoder``.
    """

    id: str
    exact: bool
    elementwise: bool

    @abstractmethod
    def check(self, tensor: Tensor) -> None:
        """Raise ``CodecError`` if parameters, parts and shape contradict each other; reads no part's bytes."""

    @abstractmethod
    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> DeltaEncoder:
        """Return an encoder for a difference between two tensors with ``shape`` and element type ``dtype``."""

    @abstractmethod
    def applier(self, tensor: Tensor, dtype: str) -> Applier:
        """Return a sequential applier of the delta ``tensor`` to a base with element type ``dtype``."""

    def fits(self, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Return whether the delta ``tensor`` can be applied to a base with ``shape``; by default if the shapes are
        equal.
        """
        return tensor.shape == shape


DELTAS: Instances[DeltaCodec] = Instances(
    "delta codec",
    (
        ("delta_exact", "ingot.codecs.delta.exact:ExactDelta"),
        ("delta_rows", "ingot.codecs.delta.rows:RowsDelta"),
        ("sparse_patch", "ingot.codecs.delta.sparse_patch:SparsePatchDelta"),
    ),
)


def delta_codec(id: str) -> DeltaCodec:
    """Return the delta codec ``id``: a registered codec, or one that adds the values of an ordinary codec."""
    return DELTAS[id] if id in DELTAS else Additive(CODECS.get_or_refuse(id))


class Additive(DeltaCodec):
    """A codec of f32 differences: ``fine-tune = round(base + difference)``, computed in f32."""

    exact = False

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.id = codec.id
        self.elementwise = codec.elementwise

    def check(self, tensor: Tensor) -> None:
        self._codec.check(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> DeltaEncoder:
        return AdditiveEncoder(self._codec.encoder(shape, "f32", options))

    def applier(self, tensor: Tensor, dtype: str) -> Applier:
        return AdditiveApplier(self._codec.reader(tensor))


class AdditiveEncoder(DeltaEncoder):
    """An encoder that passes ``tuned - base`` in f32 to an ordinary encoder."""

    fit_passes: int
    lossless = False

    def __init__(self, inner: Encoder) -> None:
        self._inner = inner
        self.codec = inner.codec
        self.parts = inner.parts
        self.fit_passes = inner.fit_passes
        self.step = inner.step
        self.single_chunk = inner.single_chunk
        self._pairs = inner if isinstance(inner, PairEncoder) else None

    @property
    def params(self) -> Mapping[str, Any]:
        return self._inner.params

    def observes(self) -> bool:
        return self._inner.observes()

    def observe(self, rows: Array, start: int) -> bool:
        """Observe ``rows`` of the difference; see ``BaseEncoder.observe``."""
        return self._inner.observe(rows, start)

    def wider_options(self) -> Mapping[str, Any]:
        return self._inner.wider_options()

    def underflow(self) -> str | None:
        return self._inner.underflow()

    def retained_bytes(self) -> int:
        return self._inner.retained_bytes()

    def scratch_bytes(self) -> int:
        return self._inner.scratch_bytes()

    def forget(self) -> None:
        self._inner.forget()

    def fit_pass(self, base: Array, tuned: Array) -> None:
        if self._pairs is not None and _plain(base, tuned):
            self._pairs.fit_pair(base, tuned)
        else:
            self._inner.fit_pass(difference(base, tuned))

    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        if self._pairs is not None and _plain(base, tuned):
            return self._pairs.encode_pair(base, tuned, start)
        return self._inner.encode(difference(base, tuned), start)

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        if self._pairs is not None and fusible(base, out):
            self._pairs.add_decoded(parts, base, out)
            return
        total = scratch(base.shape, np.float32)
        self._inner.decode(parts, total)
        round_sum(total, base, out)


_BATCH = 1 << 19  # elements that are added at a time, so that temporaries stay in a cache
_FUSED = ("f32", "f16", "bf16")


class AdditiveApplier:
    """An applier that adds the values of a reader to the base, in one pass if the reader supports it."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._adding = reader if isinstance(reader, AddingReader) else None

    def apply(self, base: Array, out: Array) -> None:
        if self._adding is not None and fusible(base, out):
            self._adding.add_into(base, out)
            return
        step = max(1, _BATCH // max(base.shape[-1], 1)) if base.ndim > 1 else max(len(base), 1)
        for start in range(0, len(base), step):
            rows = base[start : start + step]
            total = scratch(rows.shape, np.float32)
            self._reader.read_into(total)
            round_sum(total, rows, out[start : start + step])

    def finish(self) -> None:
        self._reader.finish()


def fusible(base: Array, out: Array) -> bool:
    """Return whether the fused kernels can add to ``base`` and write to ``out``.

    Both must have one supported dtype and C order, and be the same memory or not overlap.
    """
    start = base.ctypes.data
    out_start = out.ctypes.data
    disjoint = start + base.nbytes <= out_start or out_start + out.nbytes <= start
    return _plain(base, out) and (start == out_start or disjoint)


def _plain(first: Array, second: Array) -> bool:
    """Return whether two arrays are aligned, in C order, and of one dtype that the fused kernels support."""
    plain = all(array.flags.c_contiguous and array.flags.aligned for array in (first, second))
    return plain and first.dtype == second.dtype and resolve_dtype(first.dtype).name in _FUSED


def difference(base: Array, tuned: Array) -> Array:
    """Return ``tuned - base`` in f32; overflow becomes infinite, and differences of infinities become NaN."""
    wide = scratch(tuned.shape, np.float32)
    if _plain(base, tuned):
        native.kernels.differences(
            as_bits(tuned.reshape(-1)), as_bits(base.reshape(-1)), wide.reshape(-1), float_name(base)
        )
        return wide
    new = tuned.reshape(-1)
    old = base.reshape(-1)
    out = wide.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, out.size, _BATCH):
            batch = slice(start, start + _BATCH)
            np.subtract(as_f32(new[batch]), as_f32(old[batch]), out=out[batch])
    return wide


def round_sum(total: Array, base: Array, out: Array) -> None:
    """Round ``total + base``, computed in f32 in the memory of ``total``, to ``out``."""
    with np.errstate(over="ignore", invalid="ignore"):
        total += as_f32(base)
    cast_into(total, out)


def as_f32(rows: Array) -> Array:
    """Return rows as f32, without a copy if they are f32."""
    if rows.dtype == np.float32:
        return rows
    wide = scratch(rows.shape, np.float32)
    cast_into(rows, wide)
    return wide
