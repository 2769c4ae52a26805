"""The ASTC coder for images of one channel: bands of rows of blocks, and contexts that threads share.

ASTC blocks are independent of each other (Khronos Data Format Specification 1.3, chapter 23). An image may therefore be
coded in any parts with full blocks; the bytes are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.errors import CodecError
from ingot.model.tensor import Array

BLOCK_BYTES = 16
FOOTPRINTS = {
    f"{width}x{height}": (width, height)
    for width, height in (
        (4, 4),
        (5, 4),
        (5, 5),
        (6, 5),
        (6, 6),
        (8, 5),
        (8, 6),
        (8, 8),
        (10, 5),
        (10, 6),
        (10, 8),
        (10, 10),
        (12, 10),
        (12, 12),
    )
}
"""Width and height in texels of the two-dimensional footprints, in Khronos's order."""

_TEXELS = 1 << 16  # texels per call; their image of four f16 channels has half a megabyte


def library() -> Any:
    """Return the module ``astc_encoder``; raise ``MissingExtraError`` if it is not installed."""
    return require("astc_encoder", "astc")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an image of ``rows x cols`` texels, stored row by row.

    A *band* consists of the rows of blocks that are coded at a time.
    """

    rows: int
    cols: int
    width: int
    height: int

    @property
    def per_row(self) -> int:
        """The number of blocks in a row."""
        return -(-self.cols // self.width)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all blocks."""
        return self.per_row * -(-self.rows // self.height) * BLOCK_BYTES

    @property
    def band_rows(self) -> int:
        """The number of texel rows of a band, a multiple of the footprint's height."""
        return max(1, _TEXELS // max(1, self.height * self.cols)) * self.height

    @property
    def bands(self) -> int:
        """The number of bands; 0 if the image has no texels."""
        return -(-self.rows // self.band_rows) if self.cols else 0

    def band(self, index: int) -> tuple[slice, slice]:
        """Return a band's texel rows and the range of its bytes."""
        start = index * self.band_rows
        stop = min(start + self.band_rows, self.rows)
        row_bytes = self.per_row * BLOCK_BYTES
        return slice(start, stop), slice(start // self.height * row_bytes, -(-stop // self.height) * row_bytes)

    def columns(self) -> Iterator[slice]:
        """Yield the ranges of columns in which a band is coded: all columns, or full blocks of a very long row."""
        width = self.cols if self.cols * self.height <= _TEXELS else _TEXELS // self.height // self.width * self.width
        for start in range(0, self.cols, max(1, width)):
            yield slice(start, min(start + width, self.cols))


class Coder:
    """A coder of bands with one footprint and quality.

    A context of the library serves one thread at a time, and creating it takes milliseconds. Each call therefore uses a
    free context, or creates one, and returns it to the pool.
    """

    def __init__(self, footprint: str, quality: float | None) -> None:
        """Set the footprint; ``quality`` is None if the coder only decodes."""
        self._key = footprint, quality

    @cached_property
    def _module(self) -> Any:  # imported on first use, so that planning works without the package
        return library()

    @cached_property
    def _swizzle(self) -> Any:
        return self._module.ASTCSwizzle.from_str("rrr1")

    def compress(self, texels: Array) -> bytes:
        """Return the blocks of an image of f32 texels in [0, 1], ``[rows, cols]``, luminance in all colour channels."""
        rows, cols = texels.shape
        image = np.zeros((rows, cols, 4), np.float16)
        image[:, :, 0] = texels
        with _context(self._module, *self._key) as context:
            return bytes(context.compress(self._image(rows, cols, image.tobytes()), self._swizzle))

    def decompress(self, blocks: bytes, out: Array) -> None:
        """Decode the red channel into the f16 texels ``out``, ``[rows, cols]``.

        Raises ``CodecError`` ``astc.block`` for a block that the profile does not allow, which decodes to NaN.
        """
        rows, cols = out.shape
        with _context(self._module, *self._key) as context:
            image = context.decompress(blocks, self._image(rows, cols), self._swizzle)
        out[:] = np.frombuffer(image.data, np.float16).reshape(rows, cols, 4)[:, :, 0]
        if np.isnan(out).any():
            raise CodecError("astc.block", "expected blocks of the LDR profile, found one that decodes to NaN")

    def _image(self, rows: int, cols: int, *data: bytes) -> Any:
        return self._module.ASTCImage(self._module.ASTCType.F16, cols, rows, 1, *data)


_free: dict[tuple[str, float | None], list[Any]] = {}
_lock = threading.Lock()


@contextmanager
def _context(module: Any, footprint: str, quality: float | None) -> Iterator[Any]:
    """Lend a context to one thread; the pool grows to the largest number of contexts used at once."""
    with _lock:
        idle = _free.setdefault((footprint, quality), [])
        context = idle.pop() if idle else None
    if context is None:
        flags = int(module.ASTCConfigFlags.DECOMPRESS_ONLY) if quality is None else 0
        width, height = FOOTPRINTS[footprint]
        config = module.ASTCConfig(module.ASTCProfile.LDR, width, height, 1, float(quality or 0), flags)
        context = module.ASTCContext(config)
    yield context  # not returned to the pool after an exception
    with _lock:
        idle.append(context)
