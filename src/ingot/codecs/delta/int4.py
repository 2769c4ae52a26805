"""``delta_int4``: differences as 4-bit codes over one range, except the largest, which are stored in f16.

This is strategy ``int4`` of ``.wdelta``. Spec page: ``spec/wdelta.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ingot.codecs.base import ChunkParts, Codec, decode_by_rows
from ingot.codecs.cast import cast, flat
from ingot.codecs.delta.flat import (
    BATCH,
    Addition,
    BatchAddingReader,
    Differences,
    F16Scales,
    SingleChunkEncoder,
    check_parts,
    matrix_rows,
    require_count,
    require_options,
    require_source,
    scale_reach,
    share_option,
    to_f16,
)
from ingot.codecs.delta.readers import Codes, ElementReader, PositionReader, cast_like
from ingot.codecs.delta.top import RestObserver, RestRange, StreamedEncoder, grid_of, streams
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.dtypes import as_bits, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError, UsageError
from ingot.model.layouts.delta import Int4DeltaLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = Int4DeltaLayout.codec
PARTS = {
    "outlier_idx": ("i64", "i32"),
    "outlier_vals": ("f16", "f32"),
    "scale": ("f16", "f32", "f64"),
    "zero_point": ("f16", "f32", "f64"),
    "packed": ("u8",),
}
LAYOUTS = (1, 2)

# Values whose range is smaller than this count as equal (deltatensors 0.2.0, compress_int4).
_FLAT = 1e-8
_NOTHING = np.empty(0, np.int64)


def outliers(size: int, fraction: float) -> int:
    """Return how many of ``size`` differences are outliers: at least one if ``size`` is not 0."""
    return min(size, max(1, int(size * fraction)))


def table(scale: Array, zero: Array, location: str | None = None) -> Array:
    """Return the values of the sixteen codes q: ``q / 15 * (scale * 15) + zero``, each step rounded to f32.

    Raises ``CodecError`` ``delta_int4.scale`` if the scale or zero point is not finite.
    """
    factor = float(scale[0])
    offset = float(zero[0])
    if not np.isfinite([factor, offset]).all():
        raise CodecError(
            "delta_int4.scale", f"expected finite numbers, found {factor:g} and {offset:g}", where=location
        )
    values: Array = np.arange(16, dtype=np.float32) / np.float32(15) * np.float32(factor * 15) + np.float32(offset)
    return values


class Scale(NamedTuple):
    """The scale and zero point that map values to 4-bit codes.

    ``pair`` contains the scale and the zero point in f16, as the file stores them. ``arguments`` are three numbers
    (l, d, f) for the encoding kernel: the code of x is ``(x - l) / d * f``, rounded and limited to 0 to 15. If ``flat``
    is set, all codes are 0.
    """

    flat: bool
    pair: Array
    arguments: tuple[float, float, float]


def scale_of(low: float, high: float, layout: int) -> Scale:
    """Return the scale of values from ``low`` to ``high``. Raises ``CodecError`` ``delta_int4.overflow``."""
    spread = high - low
    flat = spread < _FLAT
    pair = to_f16(np.array([1.0 if flat else spread / 15.0, low], np.float64), ID)
    if layout == 2 and pair[0] == 0:  # the range is too small for f16
        flat, pair[0] = True, 1.0
    return Scale(flat, pair, (low, spread, 15.0) if layout == 1 else (float(pair[1]), float(pair[0]), 1.0))


def codes_of(differences: Differences, skipped: Array, scale: Scale, before: float | None = None) -> Array:
    """Return 4-bit codes, two per byte, of all differences except those at the positions ``skipped``.

    If ``before`` is not None, it is an earlier difference, whose code comes first. The last byte is padded with code 0.
    """
    packed = np.zeros((differences.size + (before is not None) - skipped.size + 1) // 2, np.uint8)
    if not scale.flat:
        native.kernels.int4_encode(*differences, before, skipped, *scale.arguments, packed)
    return packed


class _Chunk(ChunkParts):
    """The encoded parts of a chunk, with the data that decoding this chunk alone needs.

    Positions in ``within`` count from the chunk's first element. ``packed`` begins with ``first`` codes of earlier
    elements.
    """

    first: int = 0


class _Decoding:
    """A base class of both encoders that decodes the parts of a chunk, to measure the error."""

    layout: int

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        parts, first = _alone(parts)
        codes = cast(table(parts["scale"], parts["zero_point"]), float_name(out))
        apart = parts["outlier_idx"].astype(np.int64, copy=False), parts["outlier_vals"]
        _expand((parts["packed"], first), codes, apart, self.layout == 1, flat(out))

    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        parts, first = _alone(parts)
        positions = parts["outlier_idx"].astype(np.int64, copy=False)
        values = parts["outlier_vals"].astype(np.float32)
        codes = table(parts["scale"], parts["zero_point"])
        target = Addition(base.reshape(-1), flat(out), None, less=False)
        native.kernels.int4_add(parts["packed"], first, codes, positions, values, self.layout == 1, *target.arguments)


def _alone(parts: Mapping[str, Array]) -> tuple[Mapping[str, Array], int]:
    """Return a chunk's parts with positions within the chunk, and the number of codes before the chunk's first."""
    return (parts.within, parts.first) if isinstance(parts, _Chunk) else (parts, 0)


@dataclass(kw_only=True, eq=False)
class Int4Encoder(_Decoding, F16Scales, SingleChunkEncoder):
    """An encoder that stores ``count`` outliers in f16 and all other differences as codes.

    In layout 2, outliers have codes too.
    """

    codec: str = ID
    count: int
    layout: int
    index_dtype: str
    reach: RangeProbe = field(default_factory=scale_reach)

    def encode_differences(self, differences: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the parts that store these differences.

        Raises ``CodecError`` ``delta_int4.non-finite``, or ``delta_int4.overflow`` beyond the range of f16.
        """
        positions, largest, range_arguments = self.largest(differences, self.count)
        low, high = differences.range_without(positions, *range_arguments) if self.count < self.size else (0.0, 0.0)
        scale = scale_of(low, high, self.layout)
        return {
            "outlier_idx": positions.astype(self.index_dtype, copy=False),
            "outlier_vals": to_f16(largest, self.codec),
            "scale": scale.pair[:1],
            "zero_point": scale.pair[1:],
            "packed": codes_of(differences, positions if self.layout == 1 else _NOTHING, scale),
        }


@dataclass(kw_only=True, eq=False)
class StreamedInt4Encoder(_Decoding, F16Scales, StreamedEncoder):
    """An encoder that returns the same bytes as ``Int4Encoder`` in chunks, after a fit pass that finds outliers and
    range.

    A byte contains two codes, and belongs to the chunk of its second code. The element of its first code may be far
    before the chunk, so the fit pass records that element's value.
    """

    codec: str = ID
    layout: int
    index_dtype: str
    reach: RangeProbe = field(default_factory=scale_reach)
    _observer: RestRange | None = None
    _scale: Scale | None = None

    def make_observer(self) -> RestObserver:
        self._observer = RestRange(self.size, self.step, self.layout == 1)
        return self._observer

    def finish_fit(self, values: Array) -> Array:
        """Return the outliers rounded to f16, and compute the scale; raise ``delta_int4.overflow``."""
        assert self._observer is not None
        low, high = (self._observer.low, self._observer.high) if self.count < self.size else (0.0, 0.0)
        self._scale = scale_of(low, high, self.layout)
        return to_f16(values, self.codec)

    def forget(self) -> None:
        super().forget()
        self._observer = self._scale = None

    def encode_differences(self, differences: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the parts of these rows; raise ``CodecError`` ``delta_int4.whole`` if the fit pass is incomplete."""
        cut = self.cut(differences.size, rows, start)
        assert self._observer is not None
        assert self._scale is not None
        gaps = self.layout == 1
        skipped = cut.positions if gaps else _NOTHING
        codes = cut.first - (cut.before if gaps else 0)
        stop = codes + differences.size - skipped.size
        has_carry = codes % 2
        packed = codes_of(
            differences, skipped, self._scale, self._observer.last_before(cut.first) if has_carry else None
        )
        last = cut.first + differences.size == self.size
        once = slice(0, 1 if start == 0 else 0)
        pair = self._scale.pair
        chunk = _Chunk(
            outlier_idx=(cut.positions + cut.first).astype(self.index_dtype, copy=False),
            outlier_vals=cut.largest,
            scale=pair[:1][once],
            zero_point=pair[1:][once],
            packed=packed[: (stop + last) // 2 - codes // 2],
        )
        chunk.start = start
        chunk.first = has_carry
        chunk.within = {
            **chunk,
            "outlier_idx": cut.positions,
            "scale": pair[:1],
            "zero_point": pair[1:],
            "packed": packed,
        }
        return chunk


def _expand(packed: tuple[Array, int], codes: Array, apart: tuple[Array, Array], gaps: bool, out: Array) -> None:
    """Decode differences into the flat ``out``.

    ``packed`` is a pair: bytes of codes, and the number of codes to skip at their beginning. ``codes`` are the sixteen
    values in the dtype of ``out``. ``apart`` is a pair: the positions of outliers in ``out``, and their values.
    ``gaps`` states that outliers have no codes.
    """
    positions, values = apart
    values = as_bits(cast_like(values, out))
    native.kernels.int4_decode(packed[0], packed[1], as_bits(codes), positions, values, gaps, written(out))


class Int4Reader(BatchAddingReader):
    """A sequential reader that buffers the outliers of a batch."""

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        self._gaps = tensor.params["layout"] == 1
        parts = tensor.parts
        self._apart = PositionReader(tensor, "outlier_idx", "outlier_vals")
        self._single = ElementReader(parts["scale"]), ElementReader(parts["zero_point"])
        self._packed = Codes(parts["packed"], 4)
        self._table = table(self._single[0].next(1), self._single[1].next(1), tensor.name)
        self._next = 0

    def fill(self, out: Array) -> None:
        flat = out.reshape(-1)
        codes = cast(self._table, float_name(out), self._name)
        for start in range(0, flat.size, BATCH):
            batch = flat[start : start + BATCH]
            packed, positions, values = self._take(batch.size)
            _expand(packed, codes, (positions, values), self._gaps, batch)

    def add(self, addition: Addition) -> None:
        (packed, first), positions, values = self._take(addition.base.size)
        wide = values.astype(np.float32)
        native.kernels.int4_add(packed, first, self._table, positions, wide, self._gaps, *addition.arguments)

    def _take(self, count: int) -> tuple[tuple[Array, int], Array, Array]:
        """Return the next codes, and positions and values of the outliers among them.

        Positions count from the first returned code.
        """
        positions, values = self._apart.all_until(self._next + count)
        packed = self._packed.next(count - (positions.size if self._gaps else 0))
        positions = positions - self._next
        self._next += count
        return packed, positions, values

    def skip(self, count: int) -> None:
        """Skip ``count`` differences."""
        apart = self._apart.skip(self._next + count)
        self._packed.skip(count - (apart if self._gaps else 0))
        self._next += count

    def finish(self) -> None:
        self._apart.finish()
        self._packed.finish()
        for part in self._single:
            part.finish()


class DeltaInt4(Codec):
    """Codes of 4 bits over the range of a tensor's differences, except outliers, which are stored in f16."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_int4.dtype``, ``.parts``, ``.part-dtype``,
        ``.size``, ``.layout``.
        """
        layout = Int4DeltaLayout.from_tensor(tensor).layout
        counts = check_parts(tensor, PARTS)
        apart = counts["outlier_idx"]
        if apart > tensor.size:
            raise CodecError(
                "delta_int4.size", f"expected at most {tensor.size} outliers, found {apart}", where=tensor.name
            )
        require_count(tensor, "outlier_vals", counts["outlier_vals"], apart)
        for role in ("scale", "zero_point"):
            require_count(tensor, role, counts[role], 1)
        codes = tensor.size - (apart if layout == 1 else 0)
        require_count(tensor, "packed", counts["packed"], (codes + 1) // 2)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the differences in f32, f16 or bf16, rounded once. Rules ``.index``, ``.duplicate``, ``.scale``."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> Int4Reader:
        self.check(tensor)
        return Int4Reader(tensor)

    def encoder(
        self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]
    ) -> Int4Encoder | StreamedInt4Encoder:
        """Return the encoder.

        Options: ``outlier_fraction``, the fraction of differences stored in f16 (0.01); ``layout`` 1 (codes for all
        differences except outliers) or 2 (codes for all), default 1.
        """
        require_options(self.id, options, ("outlier_fraction", "layout"))
        require_source(self.id, dtype)
        fraction = share_option(self.id, options, "outlier_fraction", 0.01, below=1)
        layout = options.get("layout", 1)
        if isinstance(layout, bool) or layout not in LAYOUTS:
            raise UsageError(f"codec delta_int4 expects layout 1 or 2, found {layout!r}", rule="delta_int4.option")
        size = prod(shape)
        count = outliers(size, fraction)
        index = "i32" if layout == 2 and size < 2**31 else "i64"
        parts = (
            PartSpec("outlier_idx", index, (4 if index == "i32" else 8) * count),
            PartSpec("outlier_vals", "f16", 2 * count),
            PartSpec("scale", "f16", 2),
            PartSpec("zero_point", "f16", 2),
            PartSpec("packed", "u8", (size - (count if layout == 1 else 0) + 1) // 2),
        )
        params = {"outlier_fraction": fraction, "layout": layout}
        index_dtype = "int32" if index == "i32" else "int64"
        fields: dict[str, Any] = {"size": size, "count": count, "parts": parts, "params": params}
        if streams(size):
            step = grid_of(*matrix_rows(shape))
            return StreamedInt4Encoder(**fields, step=step, layout=layout, index_dtype=index_dtype)
        return Int4Encoder(**fields, layout=layout, index_dtype=index_dtype)
