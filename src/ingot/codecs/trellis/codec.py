"""``trellis``: a window of 12 bits in a bit stream selects each weight's value, which is multiplied by a scale.

Definition: ``spec/trellis.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import FLOAT_TARGETS, Codec, decode_by_rows, result, source_dtype
from ingot.codecs.trellis.encode import TrellisEncoder, layout_for
from ingot.codecs.trellis.rows import TrellisReader, check_padding, decode_rows
from ingot.codecs.trellis.streams import bands_of
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.layouts.trellis import DTYPES_OF_VALUES, RULE, SCALES, STREAMS, TrellisLayout, inner_rows
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Tensor

ID = TrellisLayout.codec
_STEP = 1 << 20  # elements per thread and call


class TrellisCodec(Codec):
    """Bit streams of 2, 3 or 4 bits per weight, in which windows of 12 bits select one of 4096 values, times scales.

    A weight's window begins at the weight's first bit. Groups of columns of a row share a scale.
    """

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``trellis.params``, ``.group``, ``.parts``, ``.dtype``
        and ``.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32; several threads decode bands."""
        layout = _checked(tensor)
        rows, cols = tensor.matrix_shape
        if dtype not in FLOAT_TARGETS or not rows * cols:
            return decode_by_rows(self, tensor, dtype, out)
        out = result(tensor, dtype, out)
        matrix = out.reshape(rows, cols)
        words, scales = np.frombuffer(tensor.parts[STREAMS].view(), np.uint8), tensor.parts[SCALES].array()
        scales = scales.reshape(rows, cols // layout.group)
        bands = list(bands_of(rows, inner_rows(tensor.shape), layout.band))
        offsets = np.cumsum([0, *(layout.stream_words(stop - start) for start, stop in bands)]) * 2 * cols

        def run(first: int, last: int) -> None:
            for index in range(first, last):
                (start, stop), band_words = bands[index], words[offsets[index] : offsets[index + 1]]
                check_padding(layout, band_words, stop - start, tensor.name)
                try:
                    decode_rows(layout, band_words, stop - start, scales[start:stop], 0, matrix[start:stop])
                except CodecError as error:
                    raise error.add_location(tensor.name) from None

        for_ranges(len(bands), max(1, _STEP // (cols * layout.band)), run)
        return out

    def reader(self, tensor: Tensor) -> TrellisReader:
        return TrellisReader(tensor, _checked(tensor))

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return the positions of bands: the bytes of the streams and scales of each band.

        Return None if the matrices of the tensor, or of ``shape``, do not consist of full bands.
        """
        layout = _checked(tensor)
        cols = tensor.matrix_shape[1]
        if not cols or len(shape) < 2 or len(tensor.shape) < 2 or shape[-1] != cols:
            return None
        if shape[-2] % layout.band or tensor.shape[-2] % layout.band:
            return None
        scales = layout.part_specs((layout.band, cols))[1].length
        assert scales is not None
        return RunLayout(layout.band * cols, {STREAMS: 2 * cols * layout.stream_words(layout.band), SCALES: scales})

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> TrellisEncoder:
        """Return the encoder. Options, all with defaults:

        ``bits`` 2, 3 or 4 (4); ``group``, the columns that share a scale, a divisor of the row length (64); ``scales``
        f16, bf16 or f32 (f16).
        """
        return TrellisEncoder(shape, layout_for(shape, source_dtype(ID, dtype, DTYPES_OF_VALUES), options))


def _checked(tensor: Tensor) -> TrellisLayout:
    layout = TrellisLayout.from_tensor(tensor)
    if layout.dtype != tensor.dtype:
        raise CodecError(
            RULE, f"expected dtype {tensor.dtype}, the tensor's, found {layout.dtype!r:.80}", where=tensor.name
        )
    if set(tensor.parts) != {STREAMS, SCALES}:
        raise CodecError(
            f"{ID}.parts",
            f"expected the parts {STREAMS} and {SCALES}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    for role, allowed in ((STREAMS, ("u8",)), (SCALES, DTYPES_OF_VALUES)):
        part = tensor.parts[role]
        if part.dtype not in allowed or part.type not in (None, part.dtype):
            raise CodecError(
                f"{ID}.dtype",
                f"expected {' or '.join(allowed)}, found {part.type or part.dtype}",
                where=f"{tensor.name}.{role}",
            )
    for spec in layout.part_specs(tensor.shape):
        part = tensor.parts[spec.role]
        if part.nbytes != spec.length:
            raise CodecError(
                f"{ID}.size",
                f"expected {spec.length} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=f"{tensor.name}.{spec.role}",
            )
    return layout
