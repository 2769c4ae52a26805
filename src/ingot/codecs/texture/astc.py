"""``astc``: weights as a luminance image in ASTC blocks, ``w = texel * scale + zero`` (``spec/astc.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Rows, option_error, require_known, result, source_dtype
from ingot.codecs.texture.astc_blocks import BLOCK_BYTES, FOOTPRINTS, Blocks, Coder, library
from ingot.core.numeric.dtypes import FLOATS, LARGEST, as_bits, cast, cast_into, float_name
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.texture import AstcLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ROLES = ("blocks", "scales", "zeros")
OPTIONS = ("footprint", "quality")
_option_error = partial(option_error, AstcLayout.codec)
# Bytes of a context for encoding, one for measuring, and a band of texels: 7 MB with the largest footprint.
_SCRATCH = 8 << 20


class AstcEncoder(Encoder):
    """An encoder that maps ``[-amax, amax]`` to texels in [0, 1], and compresses bands of rows of blocks.

    A fit pass determines ``amax``.
    """

    codec = AstcLayout.codec
    fit_passes = 1
    single_chunk = False
    lossless = False

    def __init__(self, shape: tuple[int, ...], dtype: str, footprint: str, quality: float) -> None:
        self._rows, self._cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        self._width, self._height = FOOTPRINTS[footprint]
        self._coder = Coder(footprint, quality)
        self._decoder = Coder(footprint, None)
        self._seen = 0
        self._amax = np.float32(0)
        self.step = self._height
        self.params: Mapping[str, Any] = AstcLayout(footprint, dtype).attributes()
        blocks = Blocks(self._rows, self._cols, self._width, self._height)
        self.parts = (
            PartSpec("blocks", "u8", blocks.nbytes),
            PartSpec("scales", "f32", 4),
            PartSpec("zeros", "f32", 4),
        )

    def scratch_bytes(self) -> int:
        return _SCRATCH

    def ready(self) -> None:
        """Raise ``MissingExtraError`` if the package ``astc-encoder-py`` is not installed."""
        library()

    def fit_pass(self, rows: Array) -> None:
        """Update the largest magnitude, which becomes the texture's scale.

        Raises
        ------
        CodecError
            ``astc.non-finite``; ``astc.scale-overflow`` if twice the largest magnitude exceeds f32.
        """
        if rows.size:
            low, high, bad = native.kernels.affine_range(as_bits(rows), float_name(rows))
            if bad < rows.size:
                row, column = divmod(int(bad), rows.shape[1])
                raise CodecError(
                    "astc.non-finite",
                    f"expected finite weights, found {float(rows[row, column]):g} at row {self._seen + row}, column "
                    f"{column}; keep this tensor dense",
                )
            self._amax = max(self._amax, np.float32(-low), np.float32(high))
            if 2.0 * float(self._amax) > LARGEST["f32"]:
                raise CodecError(
                    "astc.scale-overflow",
                    f"expected magnitudes of at most 2^127, found {self._amax:g}; keep this tensor dense",
                )
        self._seen += len(rows)

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        if rows.ndim != 2 or rows.shape[1] != self._cols or start % self.step:
            raise ValueError(
                f"expected rows of {self._cols} columns from a multiple of {self.step}, found {rows.shape}"
            )
        layout = self._blocks(len(rows))
        blocks = np.empty(layout.nbytes, np.uint8)
        for index in range(layout.bands):
            band_rows, band_bytes = layout.band(index)
            texels = self._texels(rows[band_rows])
            compressed = [self._coder.compress(texels[:, columns]) for columns in layout.columns()]
            blocks[band_bytes] = np.frombuffer(b"".join(compressed), np.uint8)
        scales, zeros = self._map()
        once = slice(0, 0 if start else 1)
        return {"blocks": blocks, "scales": scales[once], "zeros": zeros[once]}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        layout = self._blocks(len(out))
        scales, zeros = self._map()
        stored = parts["blocks"].reshape(-1)
        for index in range(layout.bands):
            band_rows, band_bytes = layout.band(index)
            decode_band(self._decoder, layout, stored[band_bytes], (scales[0], zeros[0]), out[band_rows])

    def _blocks(self, rows: int) -> Blocks:
        return Blocks(rows, self._cols, self._width, self._height)

    def _map(self) -> tuple[Array, Array]:
        return np.array([2 * self._amax], np.float32), np.array([-self._amax], np.float32)

    def _texels(self, rows: Array) -> Array:
        if not self._amax:
            return np.full(rows.shape, 0.5, np.float32)
        texels = rows.astype(np.float32) if rows.dtype == np.float32 else cast(rows, "f32")
        texels /= np.float32(2 * self._amax)
        texels += np.float32(0.5)
        return texels


class AstcReader(Rows):
    """A sequential reader that buffers one band of f16 texels."""

    def __init__(self, tensor: Tensor) -> None:
        self._layout, self._coder, self._map = _prepare(tensor)
        self._name = tensor.name
        self._parts = tensor.parts
        self._blocks = tensor.parts["blocks"].reader()
        self._band = 0
        self._texels = np.empty((0, self._layout.cols), np.float16)

    def fill(self, out: Array) -> None:
        rows_read = 0
        while out.size and rows_read < len(out):
            if not len(self._texels):
                self._texels = self._next_band()
            count = min(len(self._texels), len(out) - rows_read)
            _finish(self._texels[:count], self._map, out[rows_read : rows_read + count], self._name)
            self._texels = self._texels[count:]
            rows_read += count

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows; only the band in which they end is decoded."""
        rows = count // max(self._layout.cols, 1)
        buffered = min(rows, len(self._texels))
        self._texels, rows = self._texels[buffered:], rows - buffered
        while rows:
            band_rows, band_bytes = self._layout.band(self._band)
            if band_rows.stop - band_rows.start > rows:
                self._texels = self._next_band()[rows:]
                return
            self._blocks.skip(band_bytes.stop - band_bytes.start)
            self._band += 1
            rows -= band_rows.stop - band_rows.start

    def finish(self) -> None:
        self._blocks.finish()

    def _next_band(self) -> Array:
        layout = self._layout
        if self._band >= layout.bands:
            raise ValueError(f"more than {layout.rows} rows were requested")
        band_rows, band_bytes = layout.band(self._band)
        stored = np.empty(band_bytes.stop - band_bytes.start, np.uint8)
        self._blocks.readinto(stored.data)
        self._band += 1
        return _texels_of(self._coder, layout, stored, band_rows.stop - band_rows.start, self._name)


class AstcCodec(Codec):
    """A matrix as a texture that a GPU's sampler can decode: ``cols x rows`` texels, luminance, LDR profile."""

    id: ClassVar[str] = AstcLayout.codec
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``astc.params``, ``astc.parts``, ``astc.dtype``,
        ``astc.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32, or in f64; several threads decode bands."""
        _checked(tensor)
        if dtype not in FLOATS:
            raise UnsupportedError(
                f"expected a target dtype {', '.join(FLOATS)}, found {dtype}", rule="astc.dtype", where=tensor.name
            )
        layout, coder, scale = _prepare(tensor)
        out = result(tensor, dtype, out)
        matrix = out.reshape(layout.rows, layout.cols)
        stored = np.frombuffer(tensor.parts["blocks"].view(), np.uint8)

        def run(start: int, _: int) -> None:
            band_rows, band_bytes = layout.band(start)
            decode_band(coder, layout, stored[band_bytes], scale, matrix[band_rows], tensor.name)

        for_ranges(layout.bands, 1, run)
        return out

    def reader(self, tensor: Tensor) -> AstcReader:
        _checked(tensor)
        return AstcReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> AstcEncoder:
        """Return the encoder. Options: ``footprint`` (6x6), one of ASTC's 14; ``quality`` 0 to 100 (10).

        The package ``astc-encoder-py`` is not needed before ``AstcEncoder.ready``.
        """
        source = source_dtype(AstcLayout.codec, dtype, FLOATS)
        require_known(AstcLayout.codec, options, OPTIONS)
        footprint = options.get("footprint", "6x6")
        quality = options.get("quality", 10)
        if not isinstance(footprint, str) or footprint not in FOOTPRINTS:
            raise _option_error(f"a footprint {', '.join(FOOTPRINTS)}", footprint)
        if isinstance(quality, bool) or not isinstance(quality, int | float) or not 0 <= quality <= 100:
            raise _option_error("a quality from 0 to 100", quality)
        return AstcEncoder(shape, source, footprint, float(quality))


def decode_band(
    coder: Coder,
    layout: Blocks,
    stored: Array,
    scale: tuple[np.float32, np.float32],
    out: Array,
    location: str | None = None,
) -> None:
    """Decode a band's blocks into ``out`` [rows, cols], C order: ``texel * scale + zero`` in f32, rounded once."""
    _finish(_texels_of(coder, layout, stored, len(out), location), scale, out, location)


def _texels_of(coder: Coder, layout: Blocks, stored: Array, rows: int, location: str | None) -> Array:
    texels = np.empty((rows, layout.cols), np.float16)
    try:
        for columns in layout.columns():
            first = columns.start // layout.width * BLOCK_BYTES
            last = -(-columns.stop // layout.width) * BLOCK_BYTES
            # Columns are split only in bands of one row of blocks, so that the blocks of a split are contiguous.
            blocks = stored if columns == slice(0, layout.cols) else stored[first:last]
            coder.decompress(blocks.tobytes(), texels[:, columns])
    except CodecError as error:
        raise (error.add_location(location) if location else error) from None
    return texels


def _finish(texels: Array, scale: tuple[np.float32, np.float32], out: Array, location: str | None) -> None:
    values = out if out.dtype == np.float32 else np.empty(texels.shape, np.float32)
    with np.errstate(over="ignore"):  # checked below
        np.multiply(texels, scale[0], out=values, dtype=np.float32)
        values += scale[1]
    bound = max(abs(float(scale[1])), abs(float(scale[0]) + float(scale[1])))
    dtype = float_name(out)
    limit = LARGEST.get(dtype, LARGEST["f32"])
    if bound > limit and values.size and not float(np.abs(values).max()) <= limit:
        raise CodecError(
            "astc.overflow",
            f"expected values in the range of {dtype}, found one beyond {limit:g}; decode to f32 or bf16",
            where=location,
        )
    if values is not out:
        cast_into(values, out)


def _prepare(tensor: Tensor) -> tuple[Blocks, Coder, tuple[np.float32, np.float32]]:
    """Return the blocks, the coder, and the checked (scale, zero) of a tensor; scale and zero are read."""
    footprint = AstcLayout.from_tensor(tensor).footprint
    layout = Blocks(*tensor.matrix_shape, *FOOTPRINTS[footprint])
    scale, zero = (np.float32(tensor.parts[role].array()[0]) for role in ROLES[1:])
    if not (np.isfinite(scale) and np.isfinite(zero)):
        raise CodecError(
            "astc.scale", f"expected a finite scale and zero, found {scale:g} and {zero:g}", where=tensor.name
        )
    return layout, Coder(footprint, None), (scale, zero)


def _checked(tensor: Tensor) -> AstcLayout:
    layout = AstcLayout.from_tensor(tensor)
    if layout.footprint not in FOOTPRINTS:
        raise CodecError(
            "astc.params", f"expected a footprint of ASTC, found {layout.footprint!r:.80}", where=tensor.name
        )
    if tensor.dtype != layout.dtype:
        raise CodecError(
            "astc.params", f"expected dtype {tensor.dtype}, the tensor's, found {layout.dtype}", where=tensor.name
        )
    if set(tensor.parts) != set(ROLES):
        raise CodecError(
            "astc.parts",
            f"expected the parts {', '.join(ROLES)}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    blocks = Blocks(*tensor.matrix_shape, *FOOTPRINTS[layout.footprint])
    for role, storage, nbytes in zip(ROLES, ("u8", "f32", "f32"), (blocks.nbytes, 4, 4), strict=True):
        part = tensor.parts[role]
        location = f"{tensor.name}.{role}"
        if part.dtype != storage or part.type not in (None, storage):
            raise CodecError("astc.dtype", f"expected {storage}, found {part.type or part.dtype}", where=location)
        if part.nbytes != nbytes:
            raise CodecError(
                "astc.size",
                f"expected {nbytes} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=location,
            )
    return layout
