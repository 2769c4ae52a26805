"""``low_rank``: a matrix as the product of two thin ones, ``left @ right`` (``spec/low_rank.md``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import (
    Codec,
    Encoder,
    Rows,
    decode_by_rows,
    is_int_between,
    option_error,
    require_known,
    source_dtype,
)
from ingot.codecs.dense.codec import require_part
from ingot.codecs.range_probe import AUTO, RangeProbe
from ingot.codecs.wrap.low_rank_fit import factors
from ingot.core.numeric.dtypes import LARGEST, cast, cast_into, float_name, from_file, numpy_dtype
from ingot.errors import CodecError
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = "low_rank"
VERSION = 1
FACTORS = ("f32", "f16", "bf16")
OPTIONS = ("rank", "error", "factors")
RANK = 64
_SCRATCH = 1 << 16  # elements whose sums stay in the cache
Fit = Callable[[Array, int, float | None], tuple[Array, Array]]


def product_into(left_factor: Array, right: Array, out: Array) -> None:
    """Write ``left_factor @ right`` to ``out``: terms in order, each product and sum in f32, rounded once.

    Parameters
    ----------
    left_factor, right : f32, [rows, r] and [r, cols]
    out : [rows, cols], C order, f32, f16 or bf16

    Raises
    ------
    CodecError
        ``low_rank.overflow``: finite factors give a value beyond the range of ``out.dtype``. Factors that are not
        finite decode by the rules of IEEE 754.
    """
    rows, cols = out.shape
    step = max(1, _SCRATCH // max(cols, 1))
    risky = _may_overflow(left_factor, right, float_name(out))
    for start in range(0, rows, step):
        target = out[start : start + step]
        total = np.zeros(target.shape, np.float32)
        term = np.empty(target.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            for column, row in zip(left_factor[start : start + step].T, right, strict=True):
                np.multiply(column[:, None], row, out=term)
                total += term
        cast_into(total, target)
        if risky:
            _refuse_overflow(left_factor[start : start + step], right, target)


def _may_overflow(left_factor: Array, right: Array, dtype: str) -> bool:
    """Return whether the largest factors allow a sum beyond the range of ``dtype``, or are not finite."""
    bound = float(np.abs(left_factor).max(initial=0)) * float(np.abs(right).max(initial=0)) * len(right)
    return not bound * (1 + len(right) * 2.0**-22) <= LARGEST[dtype]  # each term and each sum may be rounded up


def _refuse_overflow(left_factor: Array, right: Array, out: Array) -> None:
    """Raise ``CodecError`` if a value of ``out`` is not finite although all factors of its row and column are."""
    sound = np.logical_and.outer(np.isfinite(left_factor).all(axis=1), np.isfinite(right).all(axis=0))
    if bool((sound & ~np.isfinite(out)).any()):
        dtype = float_name(out)
        raise CodecError(
            f"{ID}.overflow",
            f"expected values in the range of {dtype}, found one beyond {LARGEST[dtype]:g}"
            + ("; decode to f32 or bf16" if dtype == "f16" else ""),
        )


class LowRankReader(Rows):
    """A sequential reader that buffers ``right`` and a chunk of ``left``."""

    def __init__(self, tensor: Tensor) -> None:
        self._rank = _checked(tensor)
        self._tensor_name = tensor.name
        self._rows, self._cols = tensor.matrix_shape
        self._left_part, self._right_part = (tensor.parts[role] for role in ("left", "right"))
        self._left_reader, self._right_reader = self._left_part.reader(), self._right_part.reader()
        self._wide: Array | None = None
        self._row = 0

    def fill(self, out: Array) -> None:
        if out.ndim != 2 or out.shape[1] != self._cols or len(out) > self._rows - self._row:
            raise ValueError(f"expected at most {self._rows - self._row} rows of {self._cols}, found {out.shape}")
        self._row += len(out)
        if not out.size:
            return
        if self._wide is None:
            self._wide = _read_f32(self._right_reader, self._right_part.dtype, (self._rank, self._cols))
        step = max(1, (_SCRATCH << 4) // max(self._cols, self._rank, 1))
        for start in range(0, len(out), step):
            target = out[start : start + step]
            factor = _read_f32(self._left_reader, self._left_part.dtype, (len(target), self._rank))
            try:
                product_into(factor, self._wide, target)
            except CodecError as error:
                raise error.add_location(self._tensor_name) from None

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        rows = count // max(self._cols, 1)
        self._row += rows
        self._left_reader.skip(rows * self._rank * numpy_dtype(self._left_part.dtype).itemsize)

    def finish(self) -> None:
        self._left_reader.finish()
        self._right_reader.finish()


class LowRankEncoder(Encoder):
    """An encoder that finds the factors in one fit pass of the matrix, and stores them until they are written."""

    codec: str = ID
    fit_passes: int = 1
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def __init__(
        self, matrix: tuple[int, int], dtype: str, max_rank: int, error: float | None, factor_dtype: str
    ) -> None:
        wide = ("bf16", "f32") if factor_dtype == AUTO else ()
        factor_dtype = "f16" if factor_dtype == AUTO else factor_dtype
        self._matrix = matrix
        self._dtype = dtype
        self._max_rank = max_rank
        self._error = error
        self._factor_dtype = factor_dtype
        self._reach = RangeProbe("factors", factor_dtype, wide, 32, "f64", power=0.5)
        self._factors: tuple[Array, Array] | None = None
        self._fit: Fit = factors
        self.params: Mapping[str, Any] = {"codec_version": VERSION, "dtype": dtype}  # the fit pass adds the rank
        width, (rows, cols) = numpy_dtype(factor_dtype).itemsize, matrix
        self._scratch = 8 * (2 * (rows + cols) * (max_rank + 8) + 512 * cols)
        self.parts: tuple[PartSpec, ...] = (
            PartSpec("left", factor_dtype, None, limit=rows * max_rank * width),
            PartSpec("right", factor_dtype, None, limit=cols * max_rank * width),
        )

    def fit_by(self, fit: Fit) -> None:
        """Set the function that finds the factors; it has the arguments and results of ``low_rank_fit.factors``."""
        self._fit = fit

    def scratch_bytes(self) -> int:
        return self._scratch

    def range_probe(self) -> RangeProbe:
        return self._reach

    def fit_pass(self, rows: Array) -> None:
        """Find the factors of the matrix ``rows``, which must be complete.

        Raises ``CodecError`` ``low_rank.non-finite``, ``low_rank.whole``, or ``low_rank.overflow`` if a factor exceeds
        the range of its type, or a product that of the tensor's.
        """
        if rows.shape != self._matrix:
            raise CodecError(f"{ID}.whole", f"expected all of {list(self._matrix)} in one chunk, found {rows.shape}")
        if not np.isfinite(rows).all():
            raise CodecError(
                f"{ID}.non-finite", "expected finite values, found NaN or infinity; keep this tensor dense"
            )
        left_factor, right = self._fit(rows, self._max_rank, self._error)
        with np.errstate(over="ignore"):
            self._factors = cast(left_factor, self._factor_dtype), cast(right, self._factor_dtype)
        if not all(np.isfinite(factor.astype(np.float32)).all() for factor in self._factors):
            raise CodecError(
                f"{ID}.overflow", f"{self._factor_dtype} cannot represent a factor; use factors=bf16 or factors=f32"
            )
        self._refuse_overflow(*(cast(factor, "f32") for factor in self._factors))
        self.params = {"codec_version": VERSION, "rank": len(self._factors[1]), "dtype": self._dtype}

    def _refuse_overflow(self, left_factor: Array, right: Array) -> None:
        """Raise ``CodecError`` ``low_rank.overflow`` if the product exceeds the range of the tensor's type.

        If the largest factors allow an overflow, the product is computed, a few rows at a time.
        """
        if _may_overflow(left_factor, right, self._dtype):
            step = max(1, _SCRATCH // max(right.shape[1], 1))
            for start in range(0, len(left_factor), step):
                rows = left_factor[start : start + step]
                product_into(rows, right, np.empty((len(rows), right.shape[1]), numpy_dtype(self._dtype)))

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        if self._factors is None:
            raise ValueError("expected a fit pass before encoding")
        left_factor, right = self._factors
        return {"left": left_factor.copy(), "right": right.copy()}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        rank = parts["right"].size // max(self._matrix[1], 1)
        left_factor, right = (cast(parts[role].reshape(-1), "f32") for role in ("left", "right"))
        product_into(left_factor.reshape(len(out), -1)[:, :rank], right.reshape(-1, out.shape[1])[:rank], out)


class LowRankCodec(Codec):
    """A product of two thin matrices, such as the change of a weight by a merged low-rank adapter."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``low_rank.params``, ``low_rank.part-missing``,
        ``low_rank.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the product in f32, f16 or bf16, rounded once from f32 sums."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> LowRankReader:
        return LowRankReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> LowRankEncoder:
        """Return the encoder. Options, all with defaults:

        ``rank``, the largest rank (64); ``error``: if set, the smallest rank is used with which the norm of the
        residual is at most this fraction of the tensor's norm; ``factors`` auto, f32, f16 or bf16 (auto: f16, or bf16
        for small values).
        """
        source = source_dtype(ID, dtype, FACTORS)
        require_known(ID, options, OPTIONS)
        max_rank, error, factor_dtype = factor_options(ID, options, RANK, (*FACTORS, AUTO), AUTO)
        matrix = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        return LowRankEncoder(matrix, source, min(max_rank, *matrix), error, factor_dtype)


def factor_options(
    codec: str, options: Mapping[str, Any], rank: int, dtypes: Collection[str], dtype: str
) -> tuple[int, float | None, str]:
    """Return the largest rank, the largest error and the factors' type, from the options ``rank``, ``error`` and
    ``factors``.

    The parameters ``rank`` and ``dtype`` are the defaults of rank and type. The type must be one of ``dtypes``. Raises
    ``UsageError`` ``<codec>.option``.
    """
    max_rank = options.get("rank", rank)
    error = options.get("error")
    dtype = options.get("factors", dtype)
    if not is_int_between(max_rank, 0, 2**31):
        raise option_error(codec, "rank of at least 0", max_rank)
    if error is not None and (not isinstance(error, int | float) or isinstance(error, bool) or not 0 <= error < 1):
        raise option_error(codec, "error from 0 to below 1", error)
    if dtype not in dtypes:
        raise option_error(codec, f"factors {' or '.join(dtypes)}", dtype)
    return max_rank, error, dtype


def _checked(tensor: Tensor) -> int:
    """Check the tensor, and return its rank."""
    rows, cols = tensor.matrix_shape
    params = tensor.params
    if params.get("codec_version") != VERSION or params.get("dtype") != tensor.dtype or tensor.dtype not in FACTORS:
        raise _params_error(tensor, f"codec_version {VERSION} and a float dtype, that of the tensor", dict(params))
    rank = params.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank <= min(rows, cols):
        raise _params_error(tensor, f"a rank from 0 to {min(rows, cols)}", rank)
    _check_part(tensor, require_part(tensor, "left"), rows * rank)
    _check_part(tensor, require_part(tensor, "right"), cols * rank)
    return rank


def _check_part(tensor: Tensor, part: Part, count: int) -> None:
    nbytes = count * numpy_dtype(part.dtype).itemsize if part.dtype in FACTORS else None
    if part.type not in (None, part.dtype) or part.nbytes != nbytes:
        raise CodecError(
            f"{ID}.size",
            f"expected {count} values of {', '.join(FACTORS)}, found {part.nbytes} bytes of {part.type or part.dtype}",
            where=tensor.name,
        )


def _read_f32(reader: Any, dtype: str, shape: tuple[int, int]) -> Array:
    """Return the reader's next values as f32."""
    raw = np.empty(prod(shape) * numpy_dtype(dtype).itemsize, np.uint8)
    reader.readinto(raw.data)
    return cast(from_file(raw, dtype), "f32").reshape(shape)


def _params_error(tensor: Tensor, expected: str, value: object) -> CodecError:
    return CodecError(f"{ID}.params", f"expected {expected}, found {str(value)[:80]!r}", where=tensor.name)
