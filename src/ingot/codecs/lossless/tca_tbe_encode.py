"""Encoding into three bitmaps: options, the window of exponents, chunks of bands (``spec/tca_tbe.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.lossless.tca_tbe_bands import BITMAPS, FIRST, LAST, SIDE, TILE, WORDS, decode_rows, encode_rows, grid
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.numeric.floats import as_bits
from ingot.core.runtime import native
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.lossless import TcaLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array


class Window:
    """The seven consecutive exponents that occur most often, counted in chunks of rows.

    Attributes
    ----------
    start : int or None
        The published ``start_exp``, one less than the lowest exponent; None until all rows were counted.
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
    """An encoder of chunks of bands. The window is given, or found in one fit pass."""

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
        """The parameters that the file declares; without ``start`` until it is found."""
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
