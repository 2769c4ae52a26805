"""``delta_rows``: the difference of the rows that exist in base and fine-tune, and the values of added rows.

The leading rows that exist in both are *shared* rows. All other rows of the fine-tune are *added* rows: lossy codecs of
differences would lose their values (``spec/delta_rows.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import ChunkParts, Codec, is_int_between, option_error, require_known, row_step
from ingot.codecs.delta.base import DELTAS, AdditiveApplier, AdditiveEncoder, DeltaCodec, DeltaEncoder, NeedsBase
from ingot.codecs.dense.codec import require_part
from ingot.codecs.table import CODECS, DELTA_ROWS
from ingot.core.numeric.dtypes import DTYPES, FLOATS, from_file, numpy_dtype
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.base import codec_of, file_id, resolve_codec
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = DELTA_ROWS
VERSION = 1
ADDED = "added_rows"
OPTIONS = ("rows", "inner", "options")
_option_error = partial(option_error, ID)
_CHUNK = 1 << 20


class RowsEncoder(DeltaEncoder):
    """An encoder that passes shared rows to an encoder of differences, and stores added rows unchanged."""

    codec = ID
    fit_passes: int
    lossless = False

    def __init__(self, shape: tuple[int, ...], dtype: str, rows: int, inner: AdditiveEncoder, step: int) -> None:
        row = DTYPES[dtype]
        cols = prod(shape[1:])
        per_row = prod(shape[1:-1])
        self._inner = inner
        self._rows = rows
        self._width = shape[-1]
        # rows of the matrix
        self._shared = rows * per_row
        self._total = shape[0] * per_row
        self._seen = 0
        self.step = step
        self.single_chunk = inner.single_chunk
        self.fit_passes = inner.fit_passes
        size = (shape[0] - rows) * cols * row.bits // 8
        added = PartSpec(ADDED, row.storage, size, None if row.is_storage else row.name)
        self.parts: tuple[PartSpec, ...] = (*inner.parts, added)

    @property
    def params(self) -> Mapping[str, Any]:
        return {
            "codec_version": VERSION,
            "rows": self._rows,
            "inner": file_id(self._inner.codec),
            "inner_params": dict(self._inner.params),
        }

    def retained_bytes(self) -> int:
        return self._inner.retained_bytes()

    def scratch_bytes(self) -> int:
        return self._inner.scratch_bytes()

    def observes(self) -> bool:
        """Return True, because the inner encoder must observe the differences of the shared rows."""
        return True

    def observe(self, rows: Array, start: int) -> bool:
        return self._inner.observe(rows, start)

    def wider_options(self) -> Mapping[str, Any]:
        inner = self._inner.wider_options()
        return {"options": inner} if inner else {}

    def underflow(self) -> str | None:
        return self._inner.underflow()

    def forget(self) -> None:
        self._inner.forget()

    def fit_pass(self, base: Array, tuned: Array) -> None:
        """Pass the shared rows among the next rows to the inner encoder.

        Added rows are ignored, so the caller may pad ``base`` with zeros there.
        """
        shared = self._shared - self._seen
        if shared > 0:
            self._inner.fit_pass(base[:shared], tuned[:shared])
        self._seen = (self._seen + len(tuned)) % self._total

    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        shared = min(max(self._shared - start, 0), len(tuned))
        chunk = ChunkParts({ADDED: np.ascontiguousarray(tuned[shared:]).reshape(-1)})
        chunk.start = start
        chunk.within = {}
        if shared:
            chunk.within = self._inner.encode(base[:shared], tuned[:shared], start)
            chunk.update(chunk.within)
        return chunk

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        added = parts[ADDED].reshape(-1, self._width)
        shared = len(out) - len(added)
        if shared:
            within = parts.within if isinstance(parts, ChunkParts) else parts
            self._inner.rebuild(within, base[:shared], out[:shared])
        out[shared:] = added


class RowsApplier:
    """An applier that applies the difference to shared rows, and reads added rows."""

    def __init__(self, tensor: Tensor) -> None:
        params = _checked(tensor)
        self._name = tensor.name
        self._shared_remaining = prod(params.inner.shape[:-1])
        self._inner = AdditiveApplier(params.codec.reader(params.inner))
        self._added = tensor.parts[ADDED].reader()
        self._storage = params.storage
        self._dtype = params.dtype

    def apply(self, base: Array, out: Array) -> None:
        if out.dtype != numpy_dtype(self._dtype):
            raise CodecError(
                f"{ID}.dtype",
                f"expected a result in {self._dtype}, the dtype of the added rows, found {out.dtype}",
                where=self._name,
            )
        shared = min(self._shared_remaining, len(out))
        if shared:
            self._inner.apply(base[:shared], out[:shared])
        self._shared_remaining -= shared
        added = out[shared:]
        if added.size:
            raw = np.empty(added.nbytes, np.uint8)
            self._added.readinto(raw.data)
            added[...] = from_file(raw, self._storage).view(added.dtype).reshape(added.shape)

    def finish(self) -> None:
        self._inner.finish()
        self._added.finish()


class RowsDelta(DeltaCodec):
    """The difference of the leading rows that exist in base and fine-tune, and the added rows of the fine-tune
    unchanged.
    """

    id = ID
    exact = False
    elementwise = False

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_rows.params``, ``.inner``, ``.part-missing``,
        ``.dtype``, ``.size``.

        The inner codec checks its parts too.
        """
        _checked(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> RowsEncoder:
        """Return the encoder.

        Options: ``rows``, the number of shared rows; ``inner``, the codec of the difference; ``options`` of that codec.
        """
        require_known(ID, options, OPTIONS)
        source = resolve_dtype(dtype).name
        if source not in FLOATS:
            raise UnsupportedError(f"expected rows of {', '.join(FLOATS)}, found {source}", rule=f"{ID}.dtype")
        rows = options.get("rows")
        inner = resolve_codec(options.get("inner"))
        more = options.get("options", {})
        if len(shape) < 2 or not isinstance(rows, int) or not is_int_between(rows, 1, shape[0] - 1):
            raise _option_error(f"fewer rows than the first dimension of a matrix of shape {list(shape)}", rows)
        if not _fits_within(inner):
            raise _option_error("an inner codec of differences that can be read in chunks", inner)
        if not isinstance(more, Mapping):
            raise _option_error("options as a map", more)
        encoder = CODECS[inner].encoder((rows, *shape[1:]), "f32", more)
        if any(part.role == ADDED for part in encoder.parts):
            raise UnsupportedError(f"codec {inner} already has a part {ADDED}", rule=f"{ID}.inner")
        step = row_step(CODECS[inner], encoder, shape[-1])
        return RowsEncoder(shape, source, rows, AdditiveEncoder(encoder), step)

    def applier(self, tensor: Tensor, dtype: str) -> RowsApplier:
        """Return a sequential applier; the base may have any float type."""
        return RowsApplier(tensor)


class RowsCodec(NeedsBase):
    """The difference of the rows that exist in base and fine-tune, stored by another codec, and the added rows."""

    id: ClassVar[str] = ID
    rule: ClassVar[str] = f"{ID}.base"
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    checks_stored: ClassVar[bool] = True
    holds: ClassVar[str] = "differences of shared rows, which cannot be decoded without their base"

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_rows.params``, ``.inner``, ``.part-missing``,
        ``.dtype``, ``.size``.

        The inner codec checks its parts too.
        """
        _checked(tensor)

    def stored(self, tensor: Tensor) -> Iterator[Array]:
        """Yield the decoded differences of shared rows; the values of added rows are left out."""
        params = _checked(tensor)
        rows, cols = params.inner.matrix_shape
        reader = params.codec.reader(params.inner)
        step = max(1, _CHUNK // max(cols, 1))
        for start in range(0, rows, step):
            out = np.empty((min(step, rows - start), cols), np.float32)
            reader.read_into(out)
            yield out
        reader.finish()


@dataclass(frozen=True, slots=True)
class _Params:
    """The checked attributes of a tensor: the difference as a tensor, and both types of added rows.

    ``dtype`` is the logical type of added rows, and ``storage`` the type in which they are stored.
    """

    inner: Tensor
    dtype: str
    storage: str

    @property
    def codec(self) -> Codec:
        return CODECS[self.inner.codec]


def added_dtype(tensor: Tensor) -> str:
    """Return the element type of the added rows of a checked tensor, which is also that of the result."""
    part = tensor.parts[ADDED]
    return part.type or part.dtype


def _fits_within(codec: object) -> bool:
    return isinstance(codec, str) and codec in CODECS and codec not in DELTAS and CODECS[codec].streams


def _checked(tensor: Tensor) -> _Params:
    attributes = tensor.params
    shape = tensor.shape
    if attributes.get("codec_version") != VERSION or tensor.dtype != "f32":
        raise _invalid(tensor, f"codec_version {VERSION} and dtype f32", attributes.get("codec_version"))
    rows = attributes.get("rows")
    if len(shape) < 2 or not isinstance(rows, int) or not is_int_between(rows, 1, shape[0] - 1):
        raise _invalid(tensor, f"fewer rows than shape {list(shape)[:8]} has", rows)
    inner = attributes.get("inner")
    params = attributes.get("inner_params")
    inner = codec_of(inner) if isinstance(inner, str) else inner
    if not isinstance(inner, str) or not _fits_within(inner):
        raise CodecError(
            f"{ID}.inner", f"expected a codec that can be read in chunks, found {inner!r:.80}", where=tensor.name
        )
    if not isinstance(params, Mapping) or not all(isinstance(key, str) for key in params):
        raise _invalid(tensor, "a map in inner_params", params)
    dtype, storage = _check_added(tensor, (shape[0] - rows) * prod(shape[1:]))
    parts = {role: part for role, part in tensor.parts.items() if role != ADDED}
    codec = CODECS[inner]
    within = replace(
        tensor, shape=(rows, *shape[1:]), codec=inner, params=dict(params), parts=parts, decoder=codec, origin=None
    )
    codec.check(within)
    return _Params(within, dtype, storage)


def _check_added(tensor: Tensor, count: int) -> tuple[str, str]:
    part = require_part(tensor, ADDED)
    dtype = part.type or part.dtype
    if dtype not in FLOATS or part.dtype != DTYPES[dtype].storage:
        raise CodecError(
            f"{ID}.dtype", f"expected added rows of {', '.join(FLOATS)}, found {dtype[:40]}", where=tensor.name
        )
    if part.nbytes != DTYPES[dtype].nbytes(count):
        raise CodecError(
            f"{ID}.size",
            f"expected {count} values of {dtype} in added rows, found {part.nbytes} bytes",
            where=tensor.name,
        )
    return dtype, part.dtype


def _invalid(tensor: Tensor, expected: str, value: object) -> CodecError:
    return CodecError(f"{ID}.params", f"expected {expected}, found {value!r:.80}", where=tensor.name)
