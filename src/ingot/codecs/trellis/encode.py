"""Encoding of trellises: scales from magnitudes, streams of least squared error, then scales that fit the streams."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, is_int_between, option_error, require_known
from ingot.codecs.range_probe import RangeProbe
from ingot.codecs.trellis.rows import decode_rows
from ingot.codecs.trellis.streams import band_for, bands_of, pack_band, values_of
from ingot.core.numeric.dtypes import cast, numpy_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.base import Shape, matrix_shape
from ingot.model.layouts.trellis import BITS, DTYPES_OF_VALUES, SCALES, STREAMS, TrellisLayout, inner_rows
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

ID = TrellisLayout.codec
OPTIONS = ("bits", "group", "scales")
_TURNS = 2  # alternations between choosing streams and choosing scales
_option_error = partial(option_error, ID)


def layout_for(shape: Shape, dtype: str, options: Mapping[str, Any]) -> TrellisLayout:
    """Return the layout that the options declare.

    Raises
    ------
    UsageError
        ``trellis.option``.
    UnsupportedError
        ``trellis.group``: the group does not divide the columns.
    """
    require_known(ID, options, OPTIONS)
    bits = options.get("bits", 4)
    group = options.get("group", 64)
    scales = options.get("scales", "f16")
    if not is_int_between(bits, BITS[0], BITS[-1]):
        raise _option_error("bits 2, 3 or 4", bits)
    if not is_int_between(group, 1, 2**31):
        raise _option_error("group as a positive number of columns", group)
    if scales not in DTYPES_OF_VALUES:
        raise _option_error(f"scales {', '.join(DTYPES_OF_VALUES)}", scales)
    cols = matrix_shape(shape)[1]
    if cols % group:
        raise UnsupportedError(
            f"codec {ID} expects columns that group {group} divides, found {cols}; use another group",
            rule=f"{ID}.group",
        )
    return TrellisLayout(bits, group, band_for(inner_rows(shape)), dtype, scales)


_SCRATCH = 8 << 20  # bytes that a search needs for each row


class TrellisEncoder(Encoder):
    """An encoder of independent bands of rows.

    A group's scale is first its root mean square. After the search for streams, it becomes the scale with the least
    squared error for these streams.
    """

    codec: str = ID
    fit_passes: int = 0
    single_chunk: bool = False
    lossless: bool = False

    def __init__(self, shape: Shape, layout: TrellisLayout) -> None:
        self._layout = layout
        self._inner = inner_rows(shape)
        self._reach = RangeProbe("scales", layout.scales, (), 1.0, layout.dtype)
        self.params: Mapping[str, Any] = layout.attributes()
        self.parts: tuple[PartSpec, ...] = layout.part_specs(shape)
        alone = matrix_shape(shape)[0] <= self._inner or self._inner % layout.band == 0
        self.step = layout.band if alone else max(self._inner, 1)

    def scratch_bytes(self) -> int:
        return _SCRATCH

    def range_probe(self) -> RangeProbe:
        return self._reach

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``.

        Raises ``CodecError`` ``trellis.non-finite``, or ``trellis.scale-overflow`` if a group's scale exceeds the range
        of its type.
        """
        wide = cast(rows, "f32")
        if not np.isfinite(wide).all():
            raise CodecError(
                f"{ID}.non-finite", "expected finite values, found NaN or infinity; keep this tensor dense"
            )
        streams = [np.empty(0, np.uint8)]
        scales = [np.empty(0, numpy_dtype(self._layout.scales))]
        for first, last in self._bands(len(wide) if wide.size else 0):
            windows, band_scales = encode_band(np.ascontiguousarray(wide[first:last].T), self._layout)
            streams.append(pack_band(windows, self._layout))
            scales.append(cast(np.ascontiguousarray(band_scales.T), self._layout.scales).reshape(-1))
        return {STREAMS: np.concatenate(streams), SCALES: np.concatenate(scales)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        layout = self._layout
        offset = 0
        scales = parts[SCALES].reshape(len(out), -1)
        for first, last in self._bands(len(out)):
            size = 2 * out.shape[1] * layout.stream_words(last - first)
            words = np.ascontiguousarray(parts[STREAMS][offset : offset + size])
            decode_rows(layout, words, last - first, scales[first:last], 0, out[first:last])
            offset += size

    def _bands(self, rows: int) -> list[tuple[int, int]]:
        """Return the first row and the row after the last of each band in a chunk of ``rows`` rows.

        A chunk must begin with a band, or with a matrix if bands differ in height.
        """
        inner = rows if self.step == self._layout.band else self._inner
        return list(bands_of(rows, inner, self._layout.band))


def encode_band(target: Array, layout: TrellisLayout) -> tuple[Array, Array]:
    """Encode a transposed band, f32 [cols, rows]: return windows (u16) and scales (f32 [groups, rows])."""
    cols, rows = target.shape
    grouped = target.reshape(cols // layout.group, layout.group, rows)
    windows = np.zeros(target.shape, np.uint16)
    weights = np.ones(rows, np.float32)
    values = values_of(layout.bits)
    scales = round_scales(np.sqrt(np.square(grouped, dtype=np.float64).mean(1)), layout.scales)
    for turn in range(_TURNS + 1):
        native.kernels.trellis_search(layout.bits, layout.group, values, weights, scales, windows, target, turn < 1)
        if turn == _TURNS:
            break
        decoded = values[windows].reshape(grouped.shape).astype(np.float64)
        squares = np.square(decoded).sum(1)
        better = (decoded * grouped).sum(1) / np.where(squares > 0, squares, 1)
        scales = np.where(scales == 0, np.float32(0), round_scales(better, layout.scales))
    return windows, scales


def round_scales(scales: Array, dtype: str) -> Array:
    """Return scales as f32, rounded to ``dtype``; raise ``CodecError`` ``trellis.scale-overflow``."""
    with np.errstate(over="ignore"):
        rounded = cast(cast(scales.astype(np.float32), dtype), "f32")
    if not np.isfinite(rounded).all():
        raise CodecError(f"{ID}.scale-overflow", f"{dtype} cannot represent a scale; use scales=bf16 or scales=f32")
    return rounded
