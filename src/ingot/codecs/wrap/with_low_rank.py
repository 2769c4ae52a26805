"""``with_low_rank``: a product of two thin matrices added to what another codec stores (``spec/with_low_rank.md``).

What a quantizer of few bits loses of a matrix is in good part of low rank; MiLo stores it so (arXiv:2504.02658).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Rows, decode_by_rows
from ingot.codecs.options import option_error, require_known, source_dtype
from ingot.codecs.table import CODECS, LOW_RANK
from ingot.codecs.wrap.low_rank import LowRankCodec, LowRankReader, factor_options, product_into
from ingot.codecs.wrap.low_rank_fit import factors
from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import LARGEST, cast, cast_into, float_name
from ingot.errors import CodecError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import matrix_shape
from ingot.model.layouts.corrected import FACTORS, INNER, LEFT, RIGHT, VERSION, CorrectedLayout
from ingot.model.layouts.ids import codec_named, file_id
from ingot.model.slices import pass_over
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = CorrectedLayout.codec
OPTIONS = ("rank", "error", "factors", "inner", "options")
_wrong = partial(option_error, ID)
RANK = 8
_SCRATCH = 1 << 16  # elements that stay in cache


def added_into(base: Array, correction: Array, out: Array) -> None:
    """Write ``base + correction``, both f32, into ``out``: one sum in f32, rounded once.

    Raises ``CodecError`` ``with_low_rank.overflow`` where finite numbers give a value past the range of ``out.dtype``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = base + correction
        cast_into(total, out)
    if float(np.abs(total).max(initial=0)) <= LARGEST[float_name(out)]:
        return
    sound = np.isfinite(base) & np.isfinite(correction)
    if bool((sound & ~np.isfinite(cast(out, "f32"))).any()):
        raise CodecError(f"{ID}.overflow", f"expected sums that {float_name(out)} can hold")


class CorrectedReader(Rows):
    """Sequential decoding: rows of the inner codec, and the product's."""

    def __init__(self, tensor: Tensor) -> None:
        inner, correction = _checked(tensor)
        self._inner, self._correction = CODECS[inner.codec].reader(inner), LowRankReader(correction)
        self._cols, self._where = tensor.matrix_shape[1], tensor.name
        self._step = max(1, _SCRATCH // max(self._cols, 1))

    def fill(self, out: Array) -> None:
        for start in range(0, len(out) if out.size else 0, self._step):
            target = out[start : start + self._step]
            base, correction = np.empty(target.shape, np.float32), np.empty(target.shape, np.float32)
            self._inner.read_into(base)
            self._correction.read_into(correction)
            try:
                added_into(base, correction, target)
            except CodecError as error:
                raise error.at(self._where) from None

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        pass_over(self._inner, count, self._cols, np.dtype(np.float32))
        self._correction.skip(count)

    def finish(self) -> None:
        self._inner.finish()
        self._correction.finish()


class CorrectedEncoder(Encoder):
    """Gives the matrix to an inner encoder, and factors what that loses; both are kept until they are written."""

    codec: str = ID
    fit_passes: int = 1
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def __init__(self, matrix: tuple[int, int], inner: Encoder, most: int, error: float | None, kind: str) -> None:
        self._inner, self._most, self._error, self._kind = inner, most, error, kind
        self._factors: tuple[Array, Array] | None = None
        self.params: Mapping[str, Any] = self._stated(None)
        (rows, cols), width = matrix, numpy_dtype(kind).itemsize
        self._scratch = inner.scratch_bytes() + 8 * (2 * (rows + cols) * (most + 8) + 512 * cols) + 8 * rows * cols
        self.parts: tuple[PartSpec, ...] = (
            *inner.parts,
            PartSpec(LEFT, kind, None, limit=rows * most * width),
            PartSpec(RIGHT, kind, None, limit=cols * most * width),
        )

    def _stated(self, rank: int | None) -> Mapping[str, Any]:
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
        """Encode, and factor the residual.

        Raises ``CodecError``: ``with_low_rank.non-finite``, ``with_low_rank.factor-overflow``, and what the inner
        encoder raises.
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
        left, right = factors(cast(rows, "f32") - decoded, self._most, self._error)
        with np.errstate(over="ignore"):
            self._factors = cast(left, self._kind), cast(right, self._kind)
        if not all(np.isfinite(cast(factor, "f32")).all() for factor in self._factors):
            raise CodecError(f"{ID}.factor-overflow", f"expected factors that {self._kind} can hold; take f32")
        self.params = self._stated(len(right))

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        if self._factors is None:
            raise ValueError("expected a fit pass before encoding")
        left, right = self._factors
        return {**self._inner.encode(rows, start), LEFT: left.copy(), RIGHT: right.copy()}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        base, correction = np.empty(out.shape, np.float32), np.empty(out.shape, np.float32)
        self._inner.decode({role: data for role, data in parts.items() if role not in (LEFT, RIGHT)}, base)
        left, right = (cast(parts[role], "f32") for role in (LEFT, RIGHT))
        product_into(left.reshape(len(out), -1), right.reshape(-1, out.shape[1]), correction)
        added_into(base, correction, out)


class CorrectedCodec(Codec):
    """Another codec's values, plus a product of two thin matrices."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rule ``with_low_rank.params``, those of ``low_rank`` and of the inner codec."""
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the sums in f32, f16 or bf16, rounded once from f32."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> CorrectedReader:
        return CorrectedReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> CorrectedEncoder:
        """Prepare to encode. Options, all with defaults:

        ``rank`` the largest (8), ``error`` as of ``low_rank`` (none), ``factors`` f32, f16 or bf16 (f32); ``inner`` the
        codec of the matrix (affine), ``options`` of that.
        """
        source_dtype(ID, dtype, FACTORS)
        require_known(ID, options, OPTIONS)
        most, error, kind = factor_options(ID, options, RANK, FACTORS, "f32")
        name, within = codec_named(options.get("inner", AffineLayout.codec)), options.get("options", {})
        if name not in INNER or not isinstance(within, Mapping):
            raise _wrong(f"inner {', '.join(INNER)} with a map of options", name)
        matrix = matrix_shape(shape)
        inner = CODECS[name].encoder(shape, dtype, within)
        return CorrectedEncoder(matrix, inner, min(most, *matrix), error, kind)


def _checked(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the inner codec stores and the product, as tensors of their own."""
    layout = CorrectedLayout.of(tensor)
    codec = CODECS[layout.inner.codec]
    parts = {role: part for role, part in tensor.parts.items() if role not in (LEFT, RIGHT)}
    inner = replace(tensor, codec=codec.id, params=tensor.params["inner_params"], parts=parts, decoder=codec)
    codec.check(inner)
    thin = {role: part for role, part in tensor.parts.items() if role in (LEFT, RIGHT)}
    stated = {"codec_version": VERSION, "rank": layout.rank, "dtype": "f32"}
    correction = replace(tensor, dtype="f32", codec=LOW_RANK, params=stated, parts=thin, decoder=LowRankCodec())
    LowRankCodec().check(correction)
    return inner, correction
