"""``low_rank``: a matrix as the product of two thin ones, ``left @ right`` (``spec/low_rank.md``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Rows, decode_by_rows
from ingot.codecs.dense.codec import require_part
from ingot.codecs.options import is_int_between, option_error, require_known, source_dtype
from ingot.codecs.range_probe import AUTO, RangeProbe
from ingot.codecs.wrap.low_rank_fit import factors
from ingot.core.dtypes import from_file, numpy_dtype
from ingot.core.floats import LARGEST, cast, cast_into, float_name
from ingot.errors import CodecError
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = "low_rank"
VERSION = 1
FACTORS = ("f32", "f16", "bf16")
OPTIONS = ("rank", "error", "factors")
RANK = 64
_SCRATCH = 1 << 16  # elements whose sums stay in cache
Fit = Callable[[Array, int, float | None], tuple[Array, Array]]


def product_into(left: Array, right: Array, out: Array) -> None:
    """Write ``left @ right`` into ``out``: term by term in order, each product and sum rounded to f32, then once.

    Parameters
    ----------
    left, right : f32, [rows, r] and [r, cols]
    out : [rows, cols], C order, f32, f16 or bf16

    Raises
    ------
    CodecError
        ``low_rank.overflow``: finite factors give a value past the range of ``out.dtype``. Others decode as IEEE 754
        says.
    """
    rows, cols = out.shape
    step = max(1, _SCRATCH // max(cols, 1))
    risky = _may_overflow(left, right, float_name(out))
    for start in range(0, rows, step):
        target = out[start : start + step]
        total, term = np.zeros(target.shape, np.float32), np.empty(target.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            for column, row in zip(left[start : start + step].T, right, strict=True):
                np.multiply(column[:, None], row, out=term)
                total += term
        cast_into(total, target)
        if risky:
            _refuse_overflow(left[start : start + step], right, target)


def _may_overflow(left: Array, right: Array, dtype: str) -> bool:
    """Return whether the largest factors leave room for a sum past the range of ``dtype``, or are not finite."""
    most = float(np.abs(left).max(initial=0)) * float(np.abs(right).max(initial=0)) * len(right)
    return not most * (1 + len(right) * 2.0**-22) <= LARGEST[dtype]  # each term and each sum may be rounded up


def _refuse_overflow(left: Array, right: Array, out: Array) -> None:
    """Raise where ``out`` is not finite though its row of ``left`` and its column of ``right`` are."""
    sound = np.logical_and.outer(np.isfinite(left).all(axis=1), np.isfinite(right).all(axis=0))
    if bool((sound & ~np.isfinite(out)).any()):
        dtype = float_name(out)
        raise CodecError(
            f"{ID}.overflow",
            f"expected values that {dtype} can hold, found one past {LARGEST[dtype]:g}"
            + ("; decode to f32 or bf16" if dtype == "f16" else ""),
        )


class LowRankReader(Rows):
    """Sequential decoding: holds ``right`` and a chunk of ``left``."""

    def __init__(self, tensor: Tensor) -> None:
        self._rank = _checked(tensor)
        self._where = tensor.name
        self._rows, self._cols = tensor.matrix_shape
        self._left, self._right = (tensor.parts[role] for role in ("left", "right"))
        self._reader, self._after = self._left.reader(), self._right.reader()
        self._wide: Array | None = None
        self._row = 0

    def fill(self, out: Array) -> None:
        if out.ndim != 2 or out.shape[1] != self._cols or len(out) > self._rows - self._row:
            raise ValueError(f"expected at most {self._rows - self._row} rows of {self._cols}, found {out.shape}")
        self._row += len(out)
        if not out.size:
            return
        if self._wide is None:
            self._wide = _read(self._after, self._right.dtype, (self._rank, self._cols))
        step = max(1, (_SCRATCH << 4) // max(self._cols, self._rank, 1))
        for start in range(0, len(out), step):
            target = out[start : start + step]
            left = _read(self._reader, self._left.dtype, (len(target), self._rank))
            try:
                product_into(left, self._wide, target)
            except CodecError as error:
                raise error.at(self._where) from None

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        rows = count // max(self._cols, 1)
        self._row += rows
        self._reader.skip(rows * self._rank * numpy_dtype(self._left.dtype).itemsize)

    def finish(self) -> None:
        self._reader.finish()
        self._after.finish()


class LowRankEncoder(Encoder):
    """Finds the factors in one fit pass of the whole matrix, and keeps them until they are written."""

    codec: str = ID
    fit_passes: int = 1
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def __init__(self, matrix: tuple[int, int], dtype: str, most: int, error: float | None, kind: str) -> None:
        wide = ("bf16", "f32") if kind == AUTO else ()
        kind = "f16" if kind == AUTO else kind
        self._matrix, self._dtype, self._most, self._error, self._kind = matrix, dtype, most, error, kind
        self._reach = RangeProbe("factors", kind, wide, 32, "f64", power=0.5)
        self._found: tuple[Array, Array] | None = None
        self._fit: Fit = factors
        self.params: Mapping[str, Any] = {"codec_version": VERSION, "dtype": dtype}  # the fit pass adds the rank
        width, (rows, cols) = numpy_dtype(kind).itemsize, matrix
        self._scratch = 8 * (2 * (rows + cols) * (most + 8) + 512 * cols)
        self.parts: tuple[PartSpec, ...] = (
            PartSpec("left", kind, None, limit=rows * most * width),
            PartSpec("right", kind, None, limit=cols * most * width),
        )

    def fit_by(self, fit: Fit) -> None:
        """Have the factors found by ``fit``, which takes and returns what ``low_rank_fit.factors`` does."""
        self._fit = fit

    def scratch_bytes(self) -> int:
        return self._scratch

    def range_probe(self) -> RangeProbe:
        return self._reach

    def fit_pass(self, rows: Array) -> None:
        """Find the factors.

        Raises ``CodecError``: ``low_rank.non-finite``, ``low_rank.whole``, ``low_rank.overflow`` (the factors' type
        cannot hold them, or the tensor's type what they give).
        """
        if rows.shape != self._matrix:
            raise CodecError(f"{ID}.whole", f"expected all of {list(self._matrix)} in one chunk, found {rows.shape}")
        if not np.isfinite(rows).all():
            raise CodecError(
                f"{ID}.non-finite", "expected finite values, found NaN or infinity; keep this tensor dense"
            )
        left, right = self._fit(rows, self._most, self._error)
        with np.errstate(over="ignore"):
            self._found = cast(left, self._kind), cast(right, self._kind)
        if not all(np.isfinite(factor.astype(np.float32)).all() for factor in self._found):
            raise CodecError(f"{ID}.overflow", f"expected factors that {self._kind} can hold; use factors=bf16 or f32")
        self._refuse_overflow(*(cast(factor, "f32") for factor in self._found))
        self.params = {"codec_version": VERSION, "rank": len(self._found[1]), "dtype": self._dtype}

    def _refuse_overflow(self, left: Array, right: Array) -> None:
        """Try the product, a few rows at a time, where it may leave the range of the tensor's type."""
        if _may_overflow(left, right, self._dtype):
            step = max(1, _SCRATCH // max(right.shape[1], 1))
            for start in range(0, len(left), step):
                rows = left[start : start + step]
                product_into(rows, right, np.empty((len(rows), right.shape[1]), numpy_dtype(self._dtype)))

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        if self._found is None:
            raise ValueError("expected a fit pass before encoding")
        left, right = self._found
        return {"left": left.copy(), "right": right.copy()}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        rank = parts["right"].size // max(self._matrix[1], 1)
        left, right = (cast(parts[role].reshape(-1), "f32") for role in ("left", "right"))
        product_into(left.reshape(len(out), -1)[:, :rank], right.reshape(-1, out.shape[1])[:rank], out)


class LowRankCodec(Codec):
    """A product of two thin matrices: what a merged low-rank adapter adds to a weight."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``low_rank.params``, ``low_rank.part-missing``, ``low_rank.size``."""
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the product in f32, f16 or bf16, rounded once from f32 sums."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> LowRankReader:
        return LowRankReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> LowRankEncoder:
        """Prepare to factor. Options, all with defaults:

        ``rank`` the largest (64); ``error`` (none): the smallest rank is taken whose residual's norm is at most this
        share of the tensor's; ``factors`` auto, f32, f16 or bf16 (auto: f16, or bf16 for small values).
        """
        source = source_dtype(ID, dtype, FACTORS)
        require_known(ID, options, OPTIONS)
        most, error, kind = factor_options(ID, options, RANK, (*FACTORS, AUTO), AUTO)
        matrix = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        return LowRankEncoder(matrix, source, min(most, *matrix), error, kind)


def factor_options(
    codec: str, options: Mapping[str, Any], rank: int, kinds: Collection[str], kind: str
) -> tuple[int, float | None, str]:
    """Return the largest rank, the error and the factors' type, one of ``kinds``; ``rank`` and ``kind`` by default.

    Raises ``UsageError`` ``<codec>.option``.
    """
    most, error, kind = options.get("rank", rank), options.get("error"), options.get("factors", kind)
    if not is_int_between(most, 0, 2**31):
        raise option_error(codec, "rank of at least 0", most)
    if error is not None and (not isinstance(error, int | float) or isinstance(error, bool) or not 0 <= error < 1):
        raise option_error(codec, "error from 0 to below 1", error)
    if kind not in kinds:
        raise option_error(codec, f"factors {' or '.join(kinds)}", kind)
    return most, error, kind


def _checked(tensor: Tensor) -> int:
    """Return the rank."""
    rows, cols = tensor.matrix_shape
    params = tensor.params
    if params.get("codec_version") != VERSION or params.get("dtype") != tensor.dtype or tensor.dtype not in FACTORS:
        raise _bad(tensor, f"codec_version {VERSION} and a float dtype, that of the tensor", dict(params))
    rank = params.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank <= min(rows, cols):
        raise _bad(tensor, f"a rank from 0 to {min(rows, cols)}", rank)
    _check_part(tensor, require_part(tensor, "left"), rows * rank)
    _check_part(tensor, require_part(tensor, "right"), cols * rank)
    return rank


def _check_part(tensor: Tensor, part: Part, count: int) -> None:
    wanted = count * numpy_dtype(part.dtype).itemsize if part.dtype in FACTORS else None
    if part.type not in (None, part.dtype) or part.nbytes != wanted:
        raise CodecError(
            f"{ID}.size",
            f"expected {count} values of {', '.join(FACTORS)}, found {part.nbytes} bytes of {part.type or part.dtype}",
            where=tensor.name,
        )


def _read(reader: Any, dtype: str, shape: tuple[int, int]) -> Array:
    """Return the reader's next values as f32."""
    raw = np.empty(prod(shape) * numpy_dtype(dtype).itemsize, np.uint8)
    reader.readinto(raw.data)
    return cast(from_file(raw, dtype), "f32").reshape(shape)


def _bad(tensor: Tensor, expected: str, found: object) -> CodecError:
    return CodecError(f"{ID}.params", f"expected {expected}, found {str(found)[:80]!r}", where=tensor.name)
