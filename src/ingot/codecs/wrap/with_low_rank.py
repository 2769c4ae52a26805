"""``with_low_rank``: a product of two thin matrices added to another codec's values (``spec/with_low_rank.md``).

The error of a quantizer with few bits is largely of low rank; MiLo stores it in this manner (arXiv:2504.02658).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Rows, decode_by_rows, option_error, require_known, source_dtype
from ingot.codecs.table import CODECS, LOW_RANK
from ingot.codecs.wrap.low_rank import LowRankCodec, LowRankReader, factor_options, product_into
from ingot.codecs.wrap.low_rank_fit import factors
from ingot.core.numeric.dtypes import LARGEST, cast, cast_into, float_name, numpy_dtype
from ingot.errors import CodecError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import file_id, matrix_shape, resolve_codec
from ingot.model.layouts.low_rank import FACTORS, INNER, LEFT_FACTOR, RIGHT_FACTOR, VERSION, CorrectedLayout
from ingot.model.reading.slices import skip_elements
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = CorrectedLayout.codec
OPTIONS = ("rank", "error", "factors", "inner", "options")
_option_error = partial(option_error, ID)
RANK = 8
_SCRATCH = 1 << 16  # elements that stay in cache


def write_sum(base: Array, correction: Array, out: Array) -> None:
    """Write ``base + correction``, both f32, to ``out``, rounded once.

    Raises ``CodecError`` ``with_low_rank.overflow`` if finite numbers give a value beyond the range of ``out.dtype``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = base + correction
        cast_into(total, out)
    if float(np.abs(total).max(initial=0)) <= LARGEST[float_name(out)]:
        return
    sound = np.isfinite(base) & np.isfinite(correction)
    if bool((sound & ~np.isfinite(cast(out, "f32"))).any()):
        raise CodecError(f"{ID}.overflow", f"expected sums in the range of {float_name(out)}")


class CorrectedReader(Rows):
    """A sequential reader that adds the rows of the product to the rows of the inner codec."""

    def __init__(self, tensor: Tensor) -> None:
        inner, correction = _checked(tensor)
        self._inner = CODECS[inner.codec].reader(inner)
        self._correction = LowRankReader(correction)
        self._cols = tensor.matrix_shape[1]
        self._tensor_name = tensor.name
        self._step = max(1, _SCRATCH // max(self._cols, 1))

    def fill(self, out: Array) -> None:
        for start in range(0, len(out) if out.size else 0, self._step):
            target = out[start : start + self._step]
            base = np.empty(target.shape, np.float32)
            correction = np.empty(target.shape, np.float32)
            self._inner.read_into(base)
            self._correction.read_into(correction)
            try:
                write_sum(base, correction, target)
            except CodecError as error:
                raise error.add_location(self._tensor_name) from None

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        skip_elements(self._inner, count, self._cols, np.dtype(np.float32))
        self._correction.skip(count)

    def finish(self) -> None:
        self._inner.finish()
        self._correction.finish()


class CorrectedEncoder(Encoder):
    """An encoder that passes the matrix to an inner encoder, and stores the inner encoder's error as two factors.

    A fit pass finds the factors, which are retained until the tensor is written.
    """

    codec: str = ID
    fit_passes: int = 1
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def __init__(
        self, matrix: tuple[int, int], inner: Encoder, max_rank: int, error: float | None, factor_dtype: str
    ) -> None:
        self._inner = inner
        self._max_rank = max_rank
        self._error = error
        self._factor_dtype = factor_dtype
        self._factors: tuple[Array, Array] | None = None
        self.params: Mapping[str, Any] = self._params(None)
        (rows, cols), width = matrix, numpy_dtype(factor_dtype).itemsize
        self._scratch = inner.scratch_bytes() + 8 * (2 * (rows + cols) * (max_rank + 8) + 512 * cols) + 8 * rows * cols
        self.parts: tuple[PartSpec, ...] = (
            *inner.parts,
            PartSpec(LEFT_FACTOR, factor_dtype, None, limit=rows * max_rank * width),
            PartSpec(RIGHT_FACTOR, factor_dtype, None, limit=cols * max_rank * width),
        )

    def _params(self, rank: int | None) -> Mapping[str, Any]:
        return {
            "codec_version": VERSION,
            **({} if rank is None else {"rank": rank}),
            "inner": file_id(self._inner.codec),
            "inner_params": dict(self._inner.params),
            "dtype": str(self._inner.params["dtype"]),
        }

    def scratch_bytes(self) -> int:
        return self._scratch

    def retained_bytes(self) -> int:
        return self._inner.retained_bytes()

    def ready(self) -> None:
        self._inner.ready()

    def forget(self) -> None:
        self._factors = None
        self._inner.forget()

    def fit_pass(self, rows: Array) -> None:
        """Encode ``rows`` with the inner encoder, and find the factors of its error.

        Raises ``CodecError`` ``with_low_rank.non-finite``, ``with_low_rank.factor-overflow``, or the errors of the
        inner encoder.
        """
        if not np.isfinite(cast(rows, "f32")).all():
            raise CodecError(
                f"{ID}.non-finite", "expected finite values, found NaN or infinity; keep this tensor dense"
            )
        for _ in range(self._inner.fit_passes):
            self._inner.fit_pass(rows)
        decoded = np.empty(rows.shape, np.float32)
        if rows.size:
            self._inner.decode(self._inner.encode(rows), decoded)
        left_factor, right = factors(cast(rows, "f32") - decoded, self._max_rank, self._error)
        with np.errstate(over="ignore"):
            self._factors = cast(left_factor, self._factor_dtype), cast(right, self._factor_dtype)
        if not all(np.isfinite(cast(factor, "f32")).all() for factor in self._factors):
            raise CodecError(f"{ID}.factor-overflow", f"{self._factor_dtype} cannot store a factor; use factors=f32")
        self.params = self._params(len(right))

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        if self._factors is None:
            raise ValueError("expected a fit pass before encoding")
        left_factor, right = self._factors
        return {**self._inner.encode(rows, start), LEFT_FACTOR: left_factor.copy(), RIGHT_FACTOR: right.copy()}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        base = np.empty(out.shape, np.float32)
        correction = np.empty(out.shape, np.float32)
        self._inner.decode(
            {role: data for role, data in parts.items() if role not in (LEFT_FACTOR, RIGHT_FACTOR)}, base
        )
        left_factor, right = (cast(parts[role], "f32") for role in (LEFT_FACTOR, RIGHT_FACTOR))
        product_into(left_factor.reshape(len(out), -1), right.reshape(-1, out.shape[1]), correction)
        write_sum(base, correction, out)


class CorrectedCodec(Codec):
    """The values of another codec, plus a product of two thin matrices."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rule ``with_low_rank.params``, and the rules of ``low_rank``
        and of the inner codec.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values of the inner codec plus the product of the two factors.

        The sums are computed in f32, and rounded once to ``dtype``: f32, f16 or bf16.
        """
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> CorrectedReader:
        return CorrectedReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> CorrectedEncoder:
        """Return the encoder. Options, all with defaults:

        ``rank``, the largest (8); ``error``, as in ``low_rank`` (none); ``factors`` f32, f16 or bf16 (f32); ``inner``,
        the codec of the matrix (affine), and its ``options``.
        """
        source_dtype(ID, dtype, FACTORS)
        require_known(ID, options, OPTIONS)
        max_rank, error, factor_dtype = factor_options(ID, options, RANK, FACTORS, "f32")
        name = resolve_codec(options.get("inner", AffineLayout.codec))
        within = options.get("options", {})
        if name not in INNER or not isinstance(within, Mapping):
            raise _option_error(f"inner {', '.join(INNER)} with a map of options", name)
        matrix = matrix_shape(shape)
        inner = CODECS[name].encoder(shape, dtype, within)
        return CorrectedEncoder(matrix, inner, min(max_rank, *matrix), error, factor_dtype)


def _checked(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Check a tensor, and return two tensors: that of the inner codec, and the product as a tensor of ``low_rank``."""
    layout = CorrectedLayout.from_tensor(tensor)
    codec = CODECS[layout.inner.codec]
    parts = {role: part for role, part in tensor.parts.items() if role not in (LEFT_FACTOR, RIGHT_FACTOR)}
    inner = replace(tensor, codec=codec.id, params=tensor.params["inner_params"], parts=parts, decoder=codec)
    codec.check(inner)
    thin = {role: part for role, part in tensor.parts.items() if role in (LEFT_FACTOR, RIGHT_FACTOR)}
    params = {"codec_version": VERSION, "rank": layout.rank, "dtype": "f32"}
    correction = replace(tensor, dtype="f32", codec=LOW_RANK, params=params, parts=thin, decoder=LowRankCodec())
    LowRankCodec().check(correction)
    return inner, correction
