"""Encoding into palettes: options, and codebooks per tensor or per group of channels (``spec/palette.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import frexp, prod
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, column_weights, option_error, require_known, source_dtype
from ingot.codecs.cast import flat
from ingot.codecs.palette import fit
from ingot.codecs.palette.rows import Lookup, chunk_step, entry_values, expand_vectors, pack, tables
from ingot.codecs.range_probe import AUTO, RangeProbe
from ingot.core.numeric.dtypes import FLOATS, cast, float_name, numpy_dtype
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import UnsupportedError
from ingot.model.layouts.palette import (
    BITS,
    CODEBOOK,
    INDICES,
    SCALE_DTYPES,
    SCALES,
    VECTOR_SIZES,
    PaletteLayout,
)
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

OPTIONS = ("bits", "group", "axis", "vector", "vector_axis", "entries", "scales", "importance")
ENTRIES = ("f16", "bf16", "f32", "i8")
_WIDE = ("f32",)
_option_error = partial(option_error, PaletteLayout.codec)
_SCRATCH = 8 << 20  # bytes of a histogram, its points, and the solver's tables

# Arrays of at least this size use threads to encode groups. Chunks of a conversion are smaller, and already in threads.
_LARGE = 1 << 21


@dataclass(frozen=True, slots=True)
class Settings:
    """The encoder's settings, from options and a tensor's shape."""

    params: PaletteLayout
    shape: tuple[int, ...]
    scales: str
    axis: int
    importance: Array | None
    reach: RangeProbe

    @property
    def grouped(self) -> bool:
        """Whether there are several codebooks, or vectors, which a single histogram cannot fit."""
        return self.params.codebooks > 1 or self.params.vector_size > 1

    @property
    def sliced(self) -> bool:
        """Whether groups are consecutive rows, so that a few groups can be encoded at a time."""
        vectors = self.params.vector_size == 1 or self.params.vector_axis in (0, len(self.shape) - 1)
        return self.params.codebooks > 1 and self.axis == 0 and len(self.shape) > 1 and vectors

    @property
    def group_rows(self) -> int:
        """The number of matrix rows in a group of channels along the first dimension."""
        channels = self.shape[0] // self.params.groups[0]
        return channels * prod(self.shape[1:-1])


class PaletteEncoder(Encoder):
    """An encoder that chooses codebooks and then encodes chunks of rows.

    For a single codebook of single values, fit passes over the tensor choose the entries: one pass, or two for f32 and
    f64. Several codebooks are chosen chunk by chunk if groups are consecutive rows. Groups along other axes, and
    vectors of an entire tensor, need all rows in one chunk.
    """

    codec = PaletteLayout.codec
    fit_passes: int
    lossless = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        params = settings.params
        shape = settings.shape
        self._rows, self._cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        self.params: Mapping[str, Any] = params.attributes()
        self.parts: tuple[PartSpec, ...] = params.part_specs(shape)
        self.fit_passes = 0 if settings.grouped else 2 if params.dtype in ("f32", "f64") else 1
        self.single_chunk = settings.grouped and not settings.sliced
        # Points in f32, temporarily twice; if their sums are exact, also in cells.
        narrow = params.dtype in ("f16", "bf16")
        self._scratch_per_element = 0 if params.vector_size == 1 else 14 if narrow else 8
        self.step = chunk_step(settings.group_rows if settings.sliced else 1, self._cols, params)
        self._seen, self._amax, self._ranged = 0, 0.0, self.fit_passes == 1
        self._histogram: fit.Histogram | None = None
        self._fitted = fit.entries_of(np.zeros(params.entries), settings.params.codebook, settings.scales)

    def scratch_bytes(self) -> int:
        return _SCRATCH

    def scratch_bytes_per_element(self) -> float:
        return self._scratch_per_element

    def range_probe(self) -> RangeProbe:
        return self._settings.reach

    def fit_pass(self, rows: Array) -> None:
        """Process the next rows: for f32 and f64, the first pass finds their range; the last pass fills a histogram.

        Raises ``CodecError``: ``palette.non-finite``, ``palette.entry-overflow``.
        """
        if not self.fit_passes:
            return
        if not self._ranged:
            self._amax = max(self._amax, fit.require_finite(rows, self._seen, self._cols))
        else:
            if self._histogram is None:
                self._histogram = fit.Histogram(self._settings.params.dtype, self._amax)
            bad = self._histogram.add(rows, self._settings.importance)
            if bad < rows.size:
                raise fit.non_finite(rows, bad, self._seen, self._cols)
        self._seen += len(rows)
        if self._seen == self._rows:
            self._end_of_pass()

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``.

        Raises ``CodecError``: ``palette.non-finite``, ``palette.entry-overflow``.
        """
        if rows.ndim != 2 or rows.shape[1] != self._cols:
            raise ValueError(f"expected rows of {self._cols} columns, found {rows.shape}")
        if self._settings.grouped:
            return self._encode_groups(rows, start)
        codebook, scales, values = self._fitted
        codes = fit.assign(rows, values)
        parts = {INDICES: pack(codes, self._settings.params.bits), CODEBOOK: codebook if not start else codebook[:0]}
        return parts if scales is None else {**parts, SCALES: scales if not start else scales[:0]}

    def encode_selected(self, values: Array, counts: Sequence[int]) -> dict[str, Array]:
        """Return the parts for selected values: flat ``values`` in row-major order, ``counts[g]`` of them in group g.

        The encoder must have vectors of length 1 and groups along the first dimension. The part ``indices`` then has
        one index per value.
        """
        codes = np.empty(values.size, np.uint8)
        books: list[tuple[Array, Array | None]] = []
        histogram = fit.Histogram(self._settings.params.dtype)
        start = 0
        for count in counts:
            group_values = values[start : start + count].reshape(-1, 1)
            codes[start : start + count], codebook, scale = self._one_group(group_values, 0, histogram)
            books.append((codebook, scale))
            start += count
        parts = {
            INDICES: pack(codes, self._settings.params.bits),
            CODEBOOK: np.concatenate([codebook.reshape(-1) for codebook, _ in books]),
        }
        scales = [scale for _, scale in books if scale is not None]
        return {**parts, SCALES: np.concatenate(scales)} if scales else parts

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        settings = self._settings
        shape = self._chunk_shape(len(out))
        params = _of_chunk(settings, shape)
        codebook = parts[CODEBOOK]
        scales = parts.get(SCALES)
        if not settings.grouped:
            codebook, scales = self._fitted[:2]
        values = entry_values(codebook.reshape(params.codebook_shape()), scales)
        lookup = Lookup(params, shape, tables(values, float_name(out)))
        if params.vector_size == 1 or params.vector_axis == len(shape) - 1:
            lookup.all(parts[INDICES].reshape(-1), flat(out))
            return
        entries = np.empty((*params.index_shape(shape), params.vector_size), out.dtype)
        lookup.all(parts[INDICES].reshape(-1), entries.reshape(-1))
        out[...] = expand_vectors(entries, params.vector_axis).reshape(out.shape)

    def _end_of_pass(self) -> None:
        self._seen = 0
        if not self._ranged:
            self._ranged = True
            return
        assert self._histogram is not None
        settings = self._settings
        centroids = self._histogram.centroids(settings.params.entries)
        self._fitted = fit.entries_of(centroids, settings.params.codebook, settings.scales)

    def _chunk_shape(self, rows: int) -> tuple[int, ...]:
        if not self._settings.sliced:
            return self._settings.shape if self._settings.grouped else (rows, self._cols)
        dims = self._settings.shape[1:]
        if not prod(dims[:-1]):  # no rows, but channels with codebooks
            return self._settings.shape
        return (rows // prod(dims[:-1]), *dims)

    def _encode_groups(self, rows: Array, start: int) -> dict[str, Array]:
        """Choose the codebooks of full groups, and encode with them."""
        settings = self._settings
        shape = self._chunk_shape(len(rows))
        params = _of_chunk(settings, shape)
        axis = settings.axis
        count = params.codebooks
        index = params.index_shape(shape)
        blocks = (prod(index[:axis]), count, index[axis] // count if count else 0, prod(index[axis + 1 :]))
        points = _points(rows.reshape(shape), params).reshape(*blocks, params.vector_size)
        codes = np.empty(blocks, np.uint8)
        codebook = np.zeros((count, params.entries, params.vector_size), numpy_dtype(settings.params.codebook))
        scales = np.ones(count, numpy_dtype(settings.scales))
        threads = None if rows.size >= _LARGE else 1

        def run(first: int, stop: int) -> None:
            histogram = fit.Histogram(params.dtype)
            for group in range(first, stop):
                group_points = np.ascontiguousarray(points[:, group]).reshape(-1, params.vector_size)
                group_codes, entries, scale = self._one_group(
                    group_points, start, histogram, 1 if count > 1 else threads
                )
                codes[:, group] = group_codes.reshape(codes[:, group].shape)
                codebook[group] = entries.reshape(codebook[group].shape)
                if scale is not None:
                    scales[group] = scale[0]

        for_ranges(count, max(1, count // 16), run, threads)
        parts = {INDICES: pack(codes, params.bits), CODEBOOK: codebook}
        return {**parts, SCALES: scales} if settings.params.codebook == "i8" else parts

    def _one_group(
        self, points: Array, start: int, histogram: fit.Histogram, workers: int | None = 1
    ) -> tuple[Array, Array, Array | None]:
        """Return codes, entries and scale of one group's points [n, vector size]."""
        settings = self._settings
        params = self._settings.params
        amax = fit.require_finite(points, start, self._cols)
        if params.vector_size > 1:
            # scaled near 1, so that squares stay in the range of f32; a power of two changes no bit of the result
            exponent = frexp(amax)[1]
            points = _times_power(points, -exponent)
            cloud = fit.Cloud(points, workers, digits=fit.digits_of(points, params.dtype, exponent))
            centroids = np.ldexp(cloud.centroids(params.entries).astype(np.float64), exponent)
            codebook, scale, values = fit.entries_of(centroids, settings.params.codebook, settings.scales)
            return cloud.assign(np.ldexp(values, -exponent)), codebook, scale
        histogram.reset(amax)
        histogram.add(points, settings.importance)
        codebook, scale, values = fit.entries_of(
            histogram.centroids(params.entries), settings.params.codebook, settings.scales
        )
        return fit.assign(points, values), codebook, scale


def prepare(shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> PaletteEncoder:
    """Return the encoder for a tensor of ``shape`` and source ``dtype``; see ``PaletteCodec.encoder``."""
    source = source_dtype(PaletteLayout.codec, dtype, FLOATS)
    require_known(PaletteLayout.codec, options, OPTIONS)
    bits = _choice(options, "bits", BITS, 4)
    size = _choice(options, "vector", VECTOR_SIZES, 1)
    axis, vector_axis = (_axis(options, key, shape) for key in ("axis", "vector_axis"))
    if size > 1 and (not shape or shape[vector_axis] % size):
        raise UnsupportedError(
            f"expected {size} to divide dimension {vector_axis} of shape {list(shape)}; keep this tensor dense",
            rule="palette.vector-size",
        )
    index = PaletteLayout(bits, (), size, vector_axis, source).index_shape(shape)
    groups = [1] * len(shape)
    if shape:
        groups[axis] = _groups(options, index[axis], size if axis == vector_axis else 1)
    importance = column_weights(PaletteLayout.codec, options, shape[-1] if shape else 1)
    if importance is not None and (size > 1 or (axis and groups[axis] > 1)):
        raise _option_error("importance only with single values and groups along the first dimension", (size, axis))
    entries, scales = (
        _choice(options, "entries", (*ENTRIES, AUTO), AUTO),
        _choice(options, "scales", (*SCALE_DTYPES, AUTO), AUTO),
    )
    if entries == "i8":
        reach = RangeProbe("scales", scales if scales != AUTO else "f16", _WIDE if scales == AUTO else (), 127, "f64")
    else:
        reach = RangeProbe(
            "entries", entries if entries != AUTO else "f16", _WIDE if entries == AUTO else (), 1, source
        )
    codebook = "f16" if entries == AUTO else entries
    factor = "f16" if scales == AUTO else scales
    stored = factor if codebook == "i8" else None
    return PaletteEncoder(
        Settings(
            params=PaletteLayout(bits, tuple(groups), size, vector_axis, source, codebook, stored),
            shape=shape,
            scales=factor,
            axis=axis,
            importance=importance,
            reach=reach,
        )
    )


def _of_chunk(settings: Settings, shape: tuple[int, ...]) -> PaletteLayout:
    """Return the layout of a chunk with ``shape``, as if the chunk's groups were all groups of the tensor."""
    params = settings.params
    if not settings.sliced:
        return params if settings.grouped else replace(params, groups=(1,) * len(shape), vector_axis=0)
    channels = settings.shape[0] // params.groups[0]
    return replace(params, groups=(shape[0] // max(channels, 1), *params.groups[1:]))


def _points(values: Array, params: PaletteLayout) -> Array:
    """Return values as points [shape of indices, vector size]: vectors as new f32 arrays, single values unchanged."""
    size = params.vector_size
    axis = params.vector_axis
    if size == 1:
        return values
    shape = values.shape
    split = values.reshape(*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    moved = np.moveaxis(split, axis + 1, -1)
    points = np.empty(moved.shape, moved.dtype)
    for index in range(size):  # several times faster than one copy of everything
        points[..., index] = moved[..., index]
    return cast(points, "f32")


def _times_power(points: Array, exponent: int) -> Array:
    """Multiply ``points`` in place by ``2**exponent``, in two steps if f32 cannot represent the factor; return them."""
    points *= np.float32(2.0 ** min(exponent, 127))
    if exponent > 127:
        points *= np.float32(2.0 ** (exponent - 127))
    return points


def _choice(options: Mapping[str, Any], key: str, choices: tuple[Any, ...], default: Any) -> Any:
    value = options.get(key, default)
    if type(value) is not type(default) or value not in choices:
        raise _option_error(f"{key} {', '.join(map(str, choices))}", value)
    return value


def _axis(options: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> int:
    axis = options.get(key, 0)
    dimensions = max(len(shape), 1)
    if type(axis) is not int or not -dimensions <= axis < dimensions:
        raise _option_error(f"{key} within the {dimensions} dimensions", axis)
    return axis % dimensions


def _groups(options: Mapping[str, Any], length: int, size: int) -> int:
    """Return the smallest number of codebooks along an axis of ``length`` indices, of which each stands for ``size``
    channels.

    The option ``group`` is the largest number of channels that share a codebook.
    """
    group = options.get("group", "tensor")
    if group == "tensor" or not length:
        return 1
    if type(group) is not int or not size <= group < 2**63:
        raise _option_error("group 'tensor' or a number of channels, not less than vector", group)
    return codebooks_for(length, group // size)


def codebooks_for(length: int, max_span: int) -> int:
    """Return the smallest number of codebooks that divide ``length`` channels equally, at most ``max_span`` each."""
    span = max(1, min(max_span, length))
    while length % span:
        span -= 1
    return length // span
