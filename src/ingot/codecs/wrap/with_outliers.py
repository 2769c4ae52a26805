"""``with_outliers``: the largest elements of every row as separate values; another codec stores zeros instead of them.

The scale of a group then need not cover its largest values (``spec/with_outliers.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import (
    AddingReader,
    ChunkParts,
    Codec,
    Encoder,
    decode_by_rows,
    option_error,
    require_known,
    row_step,
    source_dtype,
)
from ingot.codecs.cast import cast
from ingot.codecs.delta.base import round_sum
from ingot.codecs.dense.codec import require_part
from ingot.codecs.range_probe import AUTO, RangeProbe
from ingot.codecs.table import CODECS, WITH_OUTLIERS
from ingot.core.numeric import dtypes as floats
from ingot.core.numeric.dtypes import float_name, from_file, numpy_dtype
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import codec_of, file_id, resolve_codec
from ingot.model.part import PartReader
from ingot.model.reading.slices import skip_elements
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = WITH_OUTLIERS
VERSION = 1
POSITIONS = "outlier_positions"
VALUES = "outlier_values"
FLOATS = ("f32", "f16", "bf16")
OPTIONS = ("fraction", "count", "values", "inner", "options")
_option_error = partial(option_error, ID)
FRACTION = 0.005
_SCRATCH = 1 << 20


def position_dtype(cols: int) -> str:
    """Return the dtype of the columns of outliers for a matrix of ``cols`` columns."""
    return "u16" if cols <= 1 << 16 else "u32"


def largest(rows: Array, count: int) -> Array:
    """Return the ascending columns of the ``count`` largest magnitudes of every row: [rows, count].

    NaN counts as the largest magnitude; of equal magnitudes, the first are selected.
    """
    magnitude = np.abs(rows.astype(np.float32))
    magnitude[np.isnan(magnitude)] = np.inf
    threshold = np.partition(magnitude, rows.shape[1] - count, axis=1)[:, rows.shape[1] - count, None]
    chosen = magnitude > threshold
    ties = magnitude == threshold
    chosen |= ties & (np.cumsum(ties, axis=1) <= count - chosen.sum(axis=1, keepdims=True))
    return np.nonzero(chosen)[1].reshape(len(rows), count)


@dataclass(frozen=True, slots=True)
class _Params:
    """The checked attributes of a tensor of codec ``with_outliers``."""

    count: int
    positions: str
    values: str
    inner: Tensor

    @property
    def codec(self) -> Codec:
        return CODECS[self.inner.codec]


class OutlierReader(AddingReader):
    """A sequential reader of the inner codec's rows, with the outliers put in."""

    def __init__(self, tensor: Tensor) -> None:
        self._params = _checked(tensor)
        self._cols = tensor.matrix_shape[1]
        self._tensor_name = tensor.name
        self._inner = self._params.codec.reader(self._params.inner)
        self._positions, self._values = (tensor.parts[role].reader() for role in (POSITIONS, VALUES))
        self._step = max(1, _SCRATCH // max(self._cols, 1))

    def fill(self, out: Array) -> None:
        for start in range(0, len(out) if out.size else 0, self._step):
            target = out[start : start + self._step]
            self._inner.read_into(target)
            columns, values = self._next(len(target))
            np.put_along_axis(target, columns, cast(values, float_name(out), self._tensor_name), axis=1)

    def add_into(self, base: Array, out: Array) -> None:
        for start in range(0, len(out) if out.size else 0, self._step):
            old = base[start : start + self._step]
            target = out[start : start + self._step]
            columns, values = self._next(len(target))
            total = floats.cast(values, "f32")
            with np.errstate(over="ignore", invalid="ignore"):  # a sum beyond the range is infinite, as in other codecs
                total += floats.cast(np.take_along_axis(old, columns, axis=1), "f32")
            if isinstance(self._inner, AddingReader):
                self._inner.add_into(old, target)
            else:
                decoded = np.empty(target.shape, np.float32)
                self._inner.read_into(decoded)
                round_sum(decoded, old, target)
            np.put_along_axis(target, columns, floats.cast(total, float_name(out)), axis=1)

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        stored = count // max(self._cols, 1) * self._params.count
        self._positions.skip(stored * numpy_dtype(self._params.positions).itemsize)
        self._values.skip(stored * numpy_dtype(self._params.values).itemsize)
        skip_elements(self._inner, count, self._cols, numpy_dtype(self._params.inner.dtype))

    def finish(self) -> None:
        self._inner.finish()
        self._positions.finish()
        self._values.finish()

    def _next(self, rows: int) -> tuple[Array, Array]:
        """Check the outliers of the next rows, and return their columns and values."""
        params = self._params
        shape = (rows, self._params.count)
        columns = _read(self._positions, params.positions, shape).astype(np.int64)
        if columns.size and not (bool((columns[:, 1:] > columns[:, :-1]).all()) and int(columns.max()) < self._cols):
            raise CodecError(
                f"{ID}.position", f"expected ascending columns below {self._cols} in each row", where=self._tensor_name
            )
        return columns, _read(self._values, params.values, shape)


class OutlierEncoder(Encoder):
    """An encoder that removes the largest elements of each row, and passes the other elements to an inner encoder."""

    codec: str = ID
    params: Mapping[str, Any]
    fit_passes: int
    lossless: bool

    def __init__(self, shape: tuple[int, int], dtype: str, count: int, values: str, inner: Encoder, step: int) -> None:
        rows, cols = shape
        wide = ("bf16", "f32") if values == AUTO else ()
        values = "f16" if values == AUTO else values
        self._reach = RangeProbe("values", values, wide, 1, dtype)
        self._cols = cols
        self._dtype = dtype
        self._count = count
        self._values = values
        self._inner = inner
        self._position_dtype = position_dtype(cols)
        self.fit_passes = inner.fit_passes
        self.single_chunk = inner.single_chunk
        self.step = step
        self.lossless = inner.lossless and values == dtype
        width = numpy_dtype(self._position_dtype).itemsize
        self.parts: tuple[PartSpec, ...] = (
            PartSpec(POSITIONS, self._position_dtype, rows * count * width),
            PartSpec(VALUES, values, rows * count * numpy_dtype(values).itemsize),
            *inner.parts,
        )
        self.params = self._params()

    def _params(self) -> Mapping[str, Any]:
        return {
            "codec_version": VERSION,
            "per_row": self._count,
            "inner": file_id(self._inner.codec),
            "inner_params": dict(self._inner.params),
            "dtype": self._dtype,
        }

    def retained_bytes(self) -> int:
        return self._inner.retained_bytes()

    def ready(self) -> None:
        self._inner.ready()

    def range_probe(self) -> RangeProbe:
        return self._reach

    def observe(self, rows: Array, start: int) -> bool:
        columns = self._columns(rows)
        values = self._reach.observe(np.take_along_axis(rows, columns, axis=1))
        inner = not self._inner.observes() or self._inner.observe(self._without(rows, columns), start)
        return inner and (values or not columns.size)

    def wider_options(self) -> Mapping[str, Any]:
        inner = self._inner.wider_options()
        return {**self._reach.wider_options(), **({"options": inner} if inner else {})}

    def underflow(self) -> str | None:
        return self._reach.underflow() or self._inner.underflow()

    def forget(self) -> None:
        self._inner.forget()

    def fit_pass(self, rows: Array) -> None:
        self._inner.fit_pass(self._without(rows, self._columns(rows)))
        self.params = self._params()

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``.

        Raises ``CodecError`` ``with_outliers.overflow`` if an outlier exceeds the range of its type, and the errors of
        the inner encoder. If a row has more than ``per_row`` values that are not finite, the inner encoder gets the
        ones that exceed this number.
        """
        columns = self._columns(rows)
        outliers = np.take_along_axis(rows, columns, axis=1)
        values = floats.cast(outliers, self._values)
        back = floats.cast(values, self._dtype)  # rounding up may exceed the range of the tensor's type
        if bool((np.isinf(back.astype(np.float32)) & np.isfinite(outliers)).any()):
            raise CodecError(f"{ID}.overflow", f"{self._values} cannot represent an outlier; use values=f32")
        chunk = ChunkParts({POSITIONS: columns.astype(numpy_dtype(self._position_dtype)), VALUES: values})
        chunk.start, chunk.within = start, self._inner.encode(self._without(rows, columns), start)
        chunk.update(chunk.within)
        return chunk

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        within = {role: part for role, part in parts.items() if role not in (POSITIONS, VALUES)}
        self._inner.decode(parts.within if isinstance(parts, ChunkParts) else within, out)
        shape = (len(out), self._count)
        columns = parts[POSITIONS].reshape(shape).astype(np.int64)
        np.put_along_axis(out, columns, cast(parts[VALUES].reshape(shape), float_name(out)), axis=1)

    def _columns(self, rows: Array) -> Array:
        return largest(rows, self._count) if self._count and len(rows) else np.empty((len(rows), self._count), np.int64)

    def _without(self, rows: Array, columns: Array) -> Array:
        inner_rows = rows.copy()
        np.put_along_axis(inner_rows, columns, np.zeros((), rows.dtype), axis=1)
        return inner_rows


class OutlierCodec(Codec):
    """A wrapper of another codec that stores the largest elements of every row as separate floats."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``with_outliers.params``, ``.inner``,
        ``.part-missing``, ``.size``, and the inner codec's.

        Readers check positions: rule ``with_outliers.position``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> OutlierReader:
        return OutlierReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> OutlierEncoder:
        """Return the encoder. Options, all with defaults:

        ``fraction`` of a row's elements that are outliers (0.005; at least one), or ``count``, their number; ``values``
        auto, f32, f16 or bf16 (auto: f16, or bf16 for small values); ``inner``, a codec id (``affine``); ``options`` of
        that codec.
        """
        source = source_dtype(ID, dtype, FLOATS)
        require_known(ID, options, OPTIONS)
        matrix = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        name = resolve_codec(options.get("inner", AffineLayout.codec))
        inner_options = options.get("options", {})
        if not isinstance(name, str) or name == ID or name not in CODECS or not CODECS[name].streams:
            raise _option_error("an inner codec that can be read in chunks", name)
        if not isinstance(inner_options, Mapping):
            raise _option_error("options as a map", inner_options)
        values = options.get("values", AUTO)
        if values not in (*FLOATS, AUTO):
            raise _option_error(f"values {', '.join(FLOATS)} or {AUTO}", values)
        inner = CODECS[name].encoder(shape, source, inner_options)
        if any(part.role in (POSITIONS, VALUES) for part in inner.parts):
            raise UnsupportedError(f"codec {name} already has parts for outliers", rule=f"{ID}.inner")
        step = row_step(CODECS[name], inner, matrix[1])
        return OutlierEncoder(matrix, source, _count(options, matrix[1]), values, inner, step)


def _count(options: Mapping[str, Any], cols: int) -> int:
    if "count" in options:
        count = options["count"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0 or "fraction" in options:
            raise _option_error("count of at least 0, and no fraction with it", count)
        return min(count, cols)
    fraction = options.get("fraction", FRACTION)
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 <= fraction <= 1:
        raise _option_error("fraction from 0 to 1", fraction)
    return min(max(1, int(fraction * cols)), cols) if fraction else 0


def _checked(tensor: Tensor) -> _Params:
    attributes = tensor.params
    name = tensor.name
    rows, cols = tensor.matrix_shape
    if attributes.get("codec_version") != VERSION or tensor.dtype not in FLOATS:
        raise _params_error(
            tensor, f"codec_version {VERSION} and dtype {', '.join(FLOATS)}", attributes.get("codec_version")
        )
    count = attributes.get("per_row")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= cols:
        raise _params_error(tensor, f"attribute per_row from 0 to {cols}", count)
    inner = attributes.get("inner")
    params = attributes.get("inner_params")
    inner = codec_of(inner) if isinstance(inner, str) else inner
    if not isinstance(inner, str) or inner == ID or inner not in CODECS or not CODECS[inner].streams:
        raise CodecError(f"{ID}.inner", f"expected a codec that can be read in chunks, found {inner!r:.80}", where=name)
    if not isinstance(params, Mapping) or not all(isinstance(key, str) for key in params):
        raise _params_error(tensor, "a map in inner_params", params)
    if attributes.get("dtype") != tensor.dtype or params.get("dtype", tensor.dtype) != tensor.dtype:
        raise _params_error(tensor, f"dtype {tensor.dtype} here and in inner_params", attributes.get("dtype"))
    positions = _check_part(tensor, POSITIONS, (position_dtype(cols),), rows * count)
    values = _check_part(tensor, VALUES, FLOATS, rows * count)
    parts = {role: part for role, part in tensor.parts.items() if role not in (POSITIONS, VALUES)}
    inner_tensor = replace(tensor, codec=inner, params=dict(params), parts=parts, decoder=CODECS[inner])
    CODECS[inner].check(inner_tensor)
    return _Params(count, positions, values, inner_tensor)


def _check_part(tensor: Tensor, role: str, dtypes: tuple[str, ...], count: int) -> str:
    part = require_part(tensor, role)
    nbytes = count * numpy_dtype(part.dtype).itemsize if part.dtype in dtypes else None
    if part.type not in (None, part.dtype) or part.nbytes != nbytes:
        raise CodecError(
            f"{ID}.size",
            f"expected {count} elements of {' or '.join(dtypes)} in part {role!r}, found {part.nbytes} bytes of "
            f"{part.type or part.dtype}",
            where=tensor.name,
        )
    return part.dtype


def _read(reader: PartReader, dtype: str, shape: tuple[int, int]) -> Array:
    raw = np.empty(prod(shape) * numpy_dtype(dtype).itemsize, np.uint8)
    reader.readinto(raw.data)
    return from_file(raw, dtype).reshape(shape)


def _params_error(tensor: Tensor, expected: str, value: object) -> CodecError:
    return CodecError(f"{ID}.params", f"expected {expected}, found {value!r:.80}", where=tensor.name)
