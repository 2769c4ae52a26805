"""``tca_tbe``: lossless bf16 in three bitmaps, the format of ZipServ (``spec/tca_tbe.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Rows, result
from ingot.codecs.cast import cast_into, require_cast
from ingot.codecs.lossless.tca_tbe_bands import (
    BITMAPS,
    FALLBACK_UNIT,
    FIRST,
    HIGH_UNIT,
    LAST,
    ROLES,
    SIDE,
    TILE,
    WORDS,
    bands_per_call,
    decode_rows,
    encode_rows,
    grid,
    totals,
)
from ingot.core.numeric.dtypes import DTYPES, as_bits, from_file, numpy_dtype
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.dense import TcaLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


class Window:
    """A counter of exponents, which finds the seven consecutive exponents with the most values.

    Attributes
    ----------
    start : int or None
        The published ``start_exp``, one less than the lowest exponent; None before all rows are counted.
    """

    def __init__(self, size: int, start: int | None = None) -> None:
        self.start = FIRST if start is None and not size else start
        self._remaining = size if self.start is None else 0
        self._counts = np.zeros(256, np.uint64)

    def take(self, rows: Array) -> None:
        """Count the exponents of the next rows."""
        if self.start is not None:
            return
        native.kernels.bf16_exponents(as_bits(rows).reshape(-1), self._counts)
        self._remaining -= rows.size
        if self._remaining <= 0:
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(self._counts)])
            self.start = FIRST + int(np.argmax(sums[7:] - sums[:-7]))


@dataclass(frozen=True, slots=True)
class TcaEncoder(Encoder):
    """An encoder of chunks of bands; an option sets the window of exponents, or a fit pass finds it."""

    rows: int
    cols: int
    window: Window
    fit_passes: int
    parts: tuple[PartSpec, ...]
    codec: str = TcaLayout.codec
    step: int = SIDE
    single_chunk: bool = False
    lossless: bool = True

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters that the file declares; ``start`` is missing until it is found."""
        return TcaLayout(self.window.start).attributes()

    def fit_pass(self, rows: Array) -> None:
        self.window.take(rows)

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        stop = start + len(rows)
        full = stop == self.rows or (stop < self.rows and stop % SIDE == 0)
        if rows.ndim != 2 or rows.shape[1] != self.cols or start % SIDE or not full:
            raise ValueError(f"expected full bands of {self.cols} columns, found {rows.shape} from row {start}")
        return encode_rows(rows, self._start())

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        decode_rows({role: array.reshape(-1) for role, array in parts.items()}, self._start(), out)

    def _start(self) -> int:
        if self.window.start is None:
            raise ValueError("expected a fit pass of all rows before the first are encoded")
        return self.window.start


def prepare(shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> TcaEncoder:
    """Return the encoder for a tensor of ``shape`` and source ``dtype``; see ``TcaCodec.encoder``."""
    source = resolve_dtype(dtype).name
    if source != "bf16":
        raise UnsupportedError(
            f"expected weights of type bf16 for codec tca_tbe, found {source}; keep this tensor dense",
            rule="tca_tbe.dtype",
        )
    unknown = sorted(str(key) for key in options if key != "start")
    if unknown:
        raise UsageError(f"codec tca_tbe has the option 'start', found {unknown[0]!r}", rule="tca_tbe.option")
    start = options.get("start")
    if start is not None and (not isinstance(start, int) or isinstance(start, bool) or not FIRST <= start <= LAST):
        raise UsageError(f"codec tca_tbe expects start from {FIRST} to {LAST}, found {start!r}", rule="tca_tbe.option")
    rows, cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    window = Window(rows * cols, start)
    return TcaEncoder(rows, cols, window, int(window.start is None), _parts(prod(grid(rows, cols))))


def _parts(tiles: int) -> tuple[PartSpec, ...]:
    bitmaps = (PartSpec(role, "u64", tiles * WORDS * 8) for role in BITMAPS)
    high = PartSpec("high", "u8", None, limit=tiles * TILE)
    return (
        PartSpec("counts", "u16", tiles * 4),
        *bitmaps,
        high,
        PartSpec("fallback", "u16", None, limit=tiles * TILE * 2),
    )


_PADDING = HIGH_UNIT + FALLBACK_UNIT


class TcaReader(Rows):
    """A sequential reader of a few bands at a time; it buffers unread rows of a band."""

    def __init__(self, tensor: Tensor, start: int, workers: int | None = 1) -> None:
        self._name = tensor.name
        self._start = start
        self._workers = workers
        self._rows, self._cols = tensor.matrix_shape
        self._across = grid(self._rows, self._cols)[1]
        self._step = SIDE * bands_per_call(self._cols) * (1 if workers == 1 else 8)
        self._readers = {role: part.reader() for role, part in tensor.parts.items()}
        self._remaining = {role: tensor.parts[role].count for role in ("high", "fallback")}
        self._decoded = 0
        self._buffer = np.empty((0, self._cols), numpy_dtype("bf16"))

    def fill(self, out: Array) -> None:
        unread = self._rows - self._decoded + len(self._buffer)
        if out.ndim != 2 or out.shape[1] != self._cols or len(out) > unread:
            raise ValueError(f"expected at most {unread} rows of {self._cols}, found {out.shape}")
        require_cast("bf16", resolve_dtype(out.dtype).name, self._name)
        if not self._cols:
            self._decoded += len(out)
            return
        out = self._use_buffer(out)
        while len(out):
            target_rows = min(max(len(out) - len(out) % SIDE, SIDE), self._step)
            count = min(target_rows, self._rows - self._decoded)
            if count <= len(out):
                self._decode(out[:count])
                out = out[count:]
            else:
                self._buffer = np.empty((count, self._cols), numpy_dtype("bf16"))
                self._decode(self._buffer)
                out = self._use_buffer(out)

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows; of skipped bands, only counts are read."""
        rows = count // max(self._cols, 1)
        buffered = min(rows, len(self._buffer))
        self._buffer, rows = self._buffer[buffered:], rows - buffered
        bands, remainder = divmod(rows, SIDE)
        if bands:
            _, sums = self._read_counts(bands)
            for role in BITMAPS:
                self._readers[role].skip(8 * bands * self._across * WORDS)
            for role, elements in zip(("high", "fallback"), sums, strict=True):
                self._readers[role].skip(int(elements) * numpy_dtype(ROLES[role]).itemsize)
            self._decoded += bands * SIDE
        self.read_into(np.empty((remainder, self._cols), self._buffer.dtype))

    def finish(self) -> None:
        """Check the digests, and that the counts of all tiles add up to the parts; raise ``tca_tbe.counts``."""
        if self._decoded == self._rows and any(self._remaining.values()):
            raise self._counts_error(
                f"to be used up by the counts, found {max(self._remaining.values())} elements left"
            )
        for reader in self._readers.values():
            reader.finish()

    def _use_buffer(self, out: Array) -> Array:
        """Copy buffered rows to the beginning of ``out``; return the remaining rows of ``out``."""
        count = min(len(self._buffer), len(out))
        if count:
            cast_into(self._buffer[:count], out[:count], self._name)
            self._buffer = self._buffer[count:]
        return out[count:]

    def _decode(self, out: Array) -> None:
        bands = -(-len(out) // SIDE)
        counts, sums = self._read_counts(bands)
        parts = {"counts": counts} | {role: self._read(role, bands * self._across * WORDS) for role in BITMAPS}
        parts |= {role: self._read(role, int(count)) for role, count in zip(("high", "fallback"), sums, strict=True)}
        decode_rows(parts, self._start, out, self._name, self._workers)
        self._decoded += len(out)

    def _read_counts(self, bands: int) -> tuple[Array, Array]:
        """Return the counts of the next bands, and how much of ``high`` and ``fallback`` they use."""
        counts = self._read("counts", 2 * bands * self._across)
        sums = totals(counts, bands, self._name)[-1]
        for role, count in zip(("high", "fallback"), sums, strict=True):
            if count > self._remaining[role]:
                raise self._counts_error(
                    f"to have {count} more elements by the counts, found {self._remaining[role]} in {role!r}"
                )
            self._remaining[role] -= int(count)
        return counts, sums

    def _read(self, role: str, count: int) -> Array:
        raw = np.empty(count * numpy_dtype(ROLES[role]).itemsize, np.uint8)
        self._readers[role].readinto(raw.data)
        return from_file(raw, ROLES[role])

    def _counts_error(self, expected: str) -> CodecError:
        return CodecError("tca_tbe.counts", f"expected the parts {expected}", where=self._name)


class TcaCodec(Codec):
    """Lossless bf16 in about 11.2 bits per weight: 3-bit exponent codes in bitmaps, fast to decode."""

    id: ClassVar[str] = TcaLayout.codec
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``tca_tbe.params``, ``tca_tbe.parts``,
        ``tca_tbe.dtype``, ``tca_tbe.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in bf16, exactly, or cast by the rules of ``codecs.cast``.

        Raw parts of a mapped file are not copied. Large tensors use several threads
        (``core.runtime.parallel.default_workers``). Raises ``CodecError`` ``tca_tbe.counts`` if the counts of tiles
        contradict the bitmaps or the parts.
        """
        start = _checked(tensor)
        require_cast("bf16", dtype, tensor.name)
        out = result(tensor, dtype, out)
        matrix = out.reshape(tensor.matrix_shape)
        if out.size and all(part.encoding == "raw" and part.source.mapped for part in tensor.parts.values()):
            arrays = {role: part.array() for role, part in tensor.parts.items()}
            decode_rows(arrays, start, matrix, tensor.name, workers=None)
            return out
        reader = TcaReader(tensor, start, workers=None)
        reader.read_into(matrix)
        reader.finish()
        return out

    def reader(self, tensor: Tensor) -> TcaReader:
        return TcaReader(tensor, _checked(tensor))

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> TcaEncoder:
        """Return the encoder of bf16 values with any bits.

        Option ``start``, -1 to 248: codes represent the exponents ``start`` + 1 to ``start`` + 7. By default a fit pass
        finds the seven consecutive exponents with the most values.
        """
        return prepare(shape, dtype, options)


def _checked(tensor: Tensor) -> int:
    """Check that a tensor's parameters, parts and shape agree, and return the ``start`` of its window."""
    start = TcaLayout.from_tensor(tensor).start
    if start is None or not FIRST <= start <= LAST:
        raise _params_error(tensor, f"start from {FIRST} to {LAST}", start)
    if set(tensor.parts) != set(ROLES):
        raise CodecError(
            "tca_tbe.parts",
            f"expected the parts {', '.join(ROLES)}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    for role, expected in ROLES.items():
        part = tensor.parts[role]
        if part.dtype != expected or part.type not in (None, expected):
            raise CodecError(
                "tca_tbe.dtype", f"expected {expected}, found {part.type or part.dtype}", where=f"{tensor.name}.{role}"
            )
    _check_sizes(tensor, prod(grid(*tensor.matrix_shape)))
    return start


def _params_error(tensor: Tensor, expected: str, value: object) -> CodecError:
    return CodecError("tca_tbe.params", f"expected {expected}, found {str(value)[:80]!r}", where=tensor.name)


def _check_sizes(tensor: Tensor, tiles: int) -> None:
    fixed = {"counts": 4 * tiles, **dict.fromkeys(BITMAPS, 8 * WORDS * tiles)}
    for role, nbytes in fixed.items():
        stored = tensor.parts[role].nbytes
        if stored != nbytes:
            raise _size_error(tensor, role, f"{nbytes} bytes for shape {list(tensor.shape)}", stored)
    for role, unit in (("high", HIGH_UNIT), ("fallback", FALLBACK_UNIT)):
        part = tensor.parts[role]
        width = DTYPES[ROLES[role]].bits // 8
        if part.nbytes % (unit * width) or part.nbytes > tiles * TILE * width:
            expected = f"a multiple of {unit * width} and at most {tiles * TILE * width} bytes"
            raise _size_error(tensor, role, expected, part.nbytes)
    stored = tensor.parts["high"].count + tensor.parts["fallback"].count
    if not tiles * TILE <= stored <= tiles * (TILE + _PADDING):
        raise _size_error(tensor, "high", f"with 'fallback' {tiles * TILE} elements and padding", stored)


def _size_error(tensor: Tensor, role: str, expected: str, actual: int) -> CodecError:
    return CodecError("tca_tbe.size", f"expected {expected}, found {actual}", where=f"{tensor.name}.{role}")
