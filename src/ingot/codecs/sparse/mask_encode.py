"""Encoding of ``sparse_mask``: options, masks, and the selected values or codes (``spec/sparse_mask.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np

from ingot.codecs.affine.encode import AffineEncoder
from ingot.codecs.base import Encoder, is_int_between, option_error, require_known, source_dtype
from ingot.codecs.dense.codec import DenseEncoder
from ingot.codecs.palette.encode import PaletteEncoder
from ingot.codecs.palette.fit import require_finite
from ingot.codecs.palette.rows import pack, unpack
from ingot.codecs.sparse.mask_params import CODES, ID
from ingot.codecs.sparse.mask_read import as_words, reader_of
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import FLOATS, cast
from ingot.core.runtime import native
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import ROWS_LSB, AffineLayout
from ingot.model.layouts.base import OtherLayout, resolve_codec
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.sparse import MASK, NONZEROS, WORD, MaskLayout
from ingot.model.part import memory_part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

_LOW = 16  # low bits of a magnitude, counted in the second pass


def magnitudes(values: Array) -> Array:
    """Return magnitudes as unsigned integers in the same order, NaN above infinity; f64 is rounded to f32."""
    plain = cast(values, "f32") if values.dtype == np.float64 else np.ascontiguousarray(values)
    width = 8 * plain.dtype.itemsize
    magnitude: Array = plain.view(f"u{plain.dtype.itemsize}") & np.array(
        (1 << (width - 1)) - 1, f"u{plain.dtype.itemsize}"
    )
    return magnitude


class Keep:
    """A selection of the elements to store: all that are not zero; with ``exact`` also -0.

    Subclasses drop more elements. ``kept_count`` is the number of selected elements after ``fit_passes`` passes of
    ``fit_pass``.
    """

    fit_passes = 1

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.kept_count = 0

    def fit_pass(self, rows: Array, last: bool) -> None:
        """Process the next rows of a pass; ``last`` marks the last rows of the pass."""
        self.kept_count += int(np.count_nonzero(self(rows)))

    def __call__(self, rows: Array) -> Array:
        """Return a mask of the selected elements of these rows."""
        selected: Array = rows.view(f"u{rows.dtype.itemsize}") != 0 if self.exact else rows != 0
        return selected


class Above(Keep):
    """A selection of magnitudes above a threshold, and NaN."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def __call__(self, rows: Array) -> Array:
        wide = rows if rows.dtype == np.float64 else cast(rows, "f32").astype(np.float64)
        selected: Array = super().__call__(rows) & ~(np.abs(wide) <= self._threshold)
        return selected


class Pattern(Keep):
    """A selection that drops the ``zeros`` smallest of every ``size`` consecutive elements of a row.

    If magnitudes are equal, the first elements are dropped.
    """

    def __init__(self, zeros: int, size: int) -> None:
        super().__init__()
        self._zeros = zeros
        self._size = size

    def __call__(self, rows: Array) -> Array:
        keep = super().__call__(rows).reshape(-1, self._size)
        order = np.argsort(magnitudes(rows).reshape(-1, self._size), axis=1, kind="stable")
        np.put_along_axis(keep, order[:, : self._zeros], False, axis=1)
        return keep.reshape(rows.shape)


class Largest(Keep):
    """A selection that drops all elements up to a limit of magnitude.

    The limit is the magnitude with which the fraction of dropped elements is nearest to ``share``; of two equally near
    limits, the lower one. Equal magnitudes are dropped together. 16-bit types need one fit pass. Other types need a
    pass over the high bits of all magnitudes, and a pass over the low bits of magnitudes whose high bits equal the
    limit's.
    """

    def __init__(self, share: float, size: int, dtype: str) -> None:
        super().__init__()
        self._wide = dtype in ("f32", "f64")
        self.fit_passes = 2 if self._wide else 1
        self._target_count = round(share * size)
        self._size = size
        self._below = 0
        self._high = -1
        self._counts = np.zeros(1 << 15, np.int64)
        self._limit = 0  # the largest dropped magnitude

    def fit_pass(self, rows: Array, last: bool) -> None:
        magnitude = magnitudes(rows).reshape(-1)
        if not self._wide:
            self._counts += np.bincount(magnitude, minlength=1 << 15)
        elif self._high < 0:
            self._counts += np.bincount(magnitude >> _LOW, minlength=1 << 15)
        else:
            low = magnitude[magnitude >> _LOW == self._high] & 0xFFFF
            self._counts += np.bincount(low, minlength=1 << 16)
        if last:
            self._end_of_pass()

    def _end_of_pass(self) -> None:
        sums = self._below + np.cumsum(self._counts)
        index = int(np.searchsorted(sums, self._target_count))
        if self._wide and self._high < 0:
            self._high = index
            self._below = int(sums[index - 1]) if index else 0
            self._counts = np.zeros(1 << 16, np.int64)
            return
        dropped = int(sums[index])
        before = int(sums[index - 1]) if index else self._below
        self._limit = index | (self._high << _LOW if self._wide else 0)
        if self._limit and self._target_count - before <= dropped - self._target_count:
            self._limit = self._limit - 1
            dropped = before
        self.kept_count = self._size - dropped

    def __call__(self, rows: Array) -> Array:
        selected: Array = magnitudes(rows) > self._limit
        return selected


OPTIONS = ("threshold", "sparsity", "n_m", "inner", "options", "row_alignment")
_option_error = partial(option_error, ID)
_SCRATCH = 8 << 20


class MaskEncoder(Encoder):
    """An encoder that counts selected elements in fit passes, then encodes chunks.

    Palettes, and codes of less than a byte, need all rows in one chunk.
    """

    codec = ID
    params: Mapping[str, Any]
    fit_passes: int
    lossless: bool

    def __init__(
        self, shape: tuple[int, ...], dtype: str, keep: Keep, inner: Encoder, *, aligned: bool = False
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._keep = keep
        self._inner = inner
        self._aligned = aligned
        self._rows, self._cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        self._bits = int(inner.params["bits"]) if inner.codec in CODES else 0
        # With option ``cut`` of affine, the inner matrix has other rows than the tensor.
        self._inner_cols = inner.cols if isinstance(inner, AffineEncoder) else self._cols
        self.single_chunk = inner.codec == PaletteLayout.codec or self._bits % 8 > 0 or self._inner_cols != self._cols
        layout = self._layout(None)
        self._padding = layout.padding(shape)
        self.step = 1 if aligned else 8 // gcd(8, max(self._cols, 1))
        self.fit_passes = keep.fit_passes
        self.lossless = keep.exact and type(keep) is Keep
        stored = inner.parts[0] if inner.codec == DenseLayout.codec else PartSpec(NONZEROS, "u8", None)
        params = tuple(part for part in inner.parts if part.role not in (*CODES.values(), DATA))
        limit = inner.parts[0].length
        self.parts: tuple[PartSpec, ...] = (
            PartSpec(MASK, "u8", layout.mask_length(shape)),
            PartSpec(NONZEROS, stored.dtype, None, stored.type, limit=limit),
            *params,
        )
        self._seen = 0
        self._pass = 0
        # Fit passes count the selected elements. Before that, the count is 0, so that no stored tensor seems equal.
        self.params = self._layout(None if type(keep) is Keep and self._rows else 0).attributes()

    def scratch_bytes(self) -> int:
        return _SCRATCH

    def observes(self) -> bool:
        return self._inner.observes()

    def observe(self, rows: Array, start: int) -> bool:
        """Pass all rows to the inner encoder: values that are dropped are smaller, so they do not change the result."""
        return self._inner.observe(rows, start)

    def wider_options(self) -> Mapping[str, Any]:
        inner = self._inner.wider_options()
        return {"options": inner} if inner else {}

    def underflow(self) -> str | None:
        return self._inner.underflow()

    def fit_pass(self, rows: Array) -> None:
        """Process the next rows of a fit pass."""
        self._seen += len(rows)
        self._keep.fit_pass(rows, self._seen == self._rows)
        if self._seen == self._rows:
            self._seen, self._pass = 0, self._pass + 1
            if self._pass == self.fit_passes:
                self.params = self._layout(self._keep.kept_count).attributes()

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``; raises the errors of the inner encoder."""
        if rows.ndim != 2 or rows.shape[1] != self._cols:
            raise ValueError(f"expected rows of {self._cols} columns, found {rows.shape}")
        keep = self._keep(rows)
        mask = np.packbits(keep.reshape(-1), bitorder="little")
        count = int(np.count_nonzero(keep))
        stored_mask = mask if not self._padding else self._pad_rows(keep)
        if self._inner.codec == DenseLayout.codec:
            stored = self._inner.encode(select(mask, rows, count).reshape(1, -1))["data"]
            return {MASK: stored_mask, NONZEROS: stored}
        if isinstance(self._inner, PaletteEncoder):
            require_finite(rows, start, self._cols)
            groups = self._inner.params["groups"]
            counts = keep.reshape(groups[0] if groups else 1, -1).sum(axis=1)
            parts = self._inner.encode_selected(select(mask, rows, count), [int(number) for number in counts])
        else:
            parts = self._inner.encode(np.where(keep, rows, np.zeros((), rows.dtype)), start)
            row_bytes = -(-self._inner_cols * self._bits // 8)
            packed = parts[CODES[AffineLayout.codec]].reshape(rows.size // max(self._inner_cols, 1), row_bytes)
            parts[CODES[AffineLayout.codec]] = pack(select(mask, self._unpack(packed), count), self._bits)
        codes = parts.pop(CODES[self._inner.codec])
        return {MASK: stored_mask, NONZEROS: codes, **parts}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        shape = self._shape if self.single_chunk else (len(out), self._cols)
        count = int(native.kernels.mask_count(parts[MASK].reshape(-1), 8 * parts[MASK].size))
        specs = {spec.role: spec for spec in self.parts}
        chunk_parts = {role: memory_part(array, specs[role].dtype, specs[role].type) for role, array in parts.items()}
        params = self._layout(count).attributes()
        reader = reader_of(Tensor("chunk", shape, str(params["dtype"]), ID, chunk_parts, params))
        reader.read_into(out)
        reader.finish()

    def _pad_rows(self, keep: Array) -> Array:
        """Return the mask as bytes, each row padded with zeros."""
        return np.packbits(np.pad(keep, ((0, 0), (0, self._padding))), bitorder="little")

    def _unpack(self, packed: Array) -> Array:
        """Return the codes of packed rows, one byte each."""
        rows = [unpack(row, self._bits, self._inner_cols) for row in packed] if self._bits < 8 else packed
        return np.ascontiguousarray(rows, np.uint8).reshape(-1)

    def _layout(self, nnz: int | None) -> MaskLayout:
        dtype = (
            self._inner.parts[0].type or self._inner.parts[0].dtype
            if self._inner.codec == DenseLayout.codec
            else self._dtype
        )
        return MaskLayout(dtype, nnz, OtherLayout(self._inner.codec, self._inner.params), self._aligned)


def select(mask: Array, values: Array, count: int) -> Array:
    """Return the ``count`` elements of ``values`` whose bit in ``mask`` is set, in order."""
    flat = np.ascontiguousarray(values).reshape(-1)
    out = np.empty(count, flat.dtype)
    native.kernels.mask_select(mask, as_words(flat), as_words(out))
    return out


def prepare(shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> MaskEncoder:
    """Return the encoder for a tensor of ``shape`` and source ``dtype``; see ``MaskCodec.encoder``."""
    source = source_dtype(ID, dtype, FLOATS)
    require_known(ID, options, OPTIONS)
    name = resolve_codec(options.get("inner", DenseLayout.codec))
    within = options.get("options", {})
    if name not in (DenseLayout.codec, *CODES):
        raise _option_error(f"inner {DenseLayout.codec}, {' or '.join(CODES)}", name)
    if not isinstance(within, Mapping):
        raise _option_error("options as a map", within)
    inner = CODECS[name].encoder(shape, source, within)
    _require_simple(name, inner, within)
    keep = _keep(options, shape, source)
    keep.exact = name == DenseLayout.codec and inner.lossless  # codes do not distinguish -0 from +0
    return MaskEncoder(shape, source, keep, inner, aligned=_is_aligned(options.get("row_alignment")))


def _require_simple(name: str, inner: Encoder, within: Mapping[str, Any]) -> None:
    """Raise an error if the inner encoder uses vectors, fit passes or another bit order.

    An encoder that gets only the selected elements cannot support these.
    """
    if name == PaletteLayout.codec:
        axis = next((axis for axis, count in enumerate(inner.params["groups"]) if count > 1), 0)
        if inner.params["vector_size"] > 1 or axis or within.get("importance") is not None:
            raise _option_error("a palette of single values, groups along axis 0 and no importance", within)
    elif name == AffineLayout.codec and (inner.fit_passes or inner.params["packing"] != ROWS_LSB):
        raise _option_error("codes with scales per group or row, low bits first", within)
    elif name == DenseLayout.codec and not isinstance(inner, DenseEncoder):
        raise TypeError(f"expected the encoder of codec {DenseLayout.codec}, found {type(inner).__name__}")


def _keep(options: Mapping[str, Any], shape: tuple[int, ...], dtype: str) -> Keep:
    requested = [key for key in OPTIONS[:3] if options.get(key) is not None]
    if not requested:
        return Keep()
    if len(requested) > 1:
        raise _option_error(f"one of {', '.join(OPTIONS[:3])}", requested)
    value = options[requested[0]]
    if requested[0] == "n_m":
        return Pattern(*_pattern(value, shape))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise _option_error(f"{requested[0]} as a number of at least 0", value)
    if requested[0] == "threshold":
        return Above(float(value))
    if value > 1:
        raise _option_error("sparsity from 0 to 1", value)
    return Largest(float(value), prod(shape), dtype) if value and prod(shape) else Keep()


def _pattern(value: object, shape: tuple[int, ...]) -> tuple[int, int]:
    good = isinstance(value, list | tuple) and len(value) == 2 and all(type(number) is int for number in value)
    if not good or not isinstance(value, list | tuple) or not 0 <= value[0] <= value[1] or value[1] < 1:
        raise _option_error("n_m as zeros and elements, such as [2, 4]", value)
    if (shape[-1] if shape else 1) % value[1]:
        raise UnsupportedError(
            f"expected a last dimension that is a multiple of {value[1]}, found {list(shape)}; keep this tensor dense",
            rule=f"{ID}.pattern",
        )
    return value[0], value[1]


def _is_aligned(value: object) -> bool:
    if value is not None and not is_int_between(value, WORD, WORD):
        raise _option_error(f"row_alignment {WORD}", value)
    return value is not None
