"""Products with packed trellises (``spec/trellis.md``, "Multiplying")."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.codecs.tiles import TileMatrix, bounds
from ingot.codecs.trellis.codec import TrellisCodec
from ingot.codecs.trellis.rows import check_padding, decode_rows
from ingot.codecs.trellis.streams import bands_of, values_of
from ingot.core.numeric.dtypes import as_bits, float_name
from ingot.core.runtime import native
from ingot.errors import UnsupportedError
from ingot.model.layouts.trellis import SCALES, STREAMS, TrellisLayout
from ingot.model.tensor import Array, Tensor


class TrellisMatrix(TileMatrix):
    """A matrix of streams and scales; ``params`` is a ``TrellisLayout``."""

    params: TrellisLayout

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TrellisMatrix:
        """Return the matrix of a 2-d tensor without copying its parts.

        Raises
        ------
        CodecError
            The checks of ``TrellisCodec.check``, and ``trellis.padding``.
        UnsupportedError
            ``matmul.layout``: the tensor is not a matrix.
        """
        if not stays_packed(tensor):
            raise UnsupportedError(
                f"expected a matrix, found shape {list(tensor.shape)}; decode it",
                rule="matmul.layout",
                where=tensor.name,
            )
        TrellisCodec().check(tensor)
        streams = np.frombuffer(tensor.parts[STREAMS].view(), np.uint8)
        matrix = cls(TrellisLayout.from_tensor(tensor), tensor.matrix_shape, streams, tensor.parts[SCALES].array())
        for first, last in matrix._bands():
            check_padding(matrix.params, matrix._words(first, last), last - first, tensor.name)
        return matrix

    def sizes(self) -> tuple[int, int]:
        return 2 * self.params.words(self.shape), self.shape[0] * (self.shape[1] // self.params.group)

    def magnitudes(self) -> tuple[float, float]:
        (low, high), (smallest, largest) = bounds(self.scales), bounds(values_of(self.params.bits))
        return low * smallest, high * largest

    def kernel(self, dtype: str, within: bool) -> native.kernels.TrellisMatrix:
        matrix = self._kernels.get("")  # the same for all types
        if matrix is None:
            matrix = self._kernels[""] = native.kernels.TrellisMatrix(
                self.packed,
                values_of(self.params.bits),
                as_bits(self.scales),
                rows=self.shape[0],
                cols=self.shape[1],
                bits=self.params.bits,
                group=self.params.group,
                band=self.params.band,
                scale_dtype=float_name(self.scales),
                within=within,
            )
        return matrix

    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        filled = 0
        scales = self.scales.reshape(self.shape[0], -1)
        for first, last in self._bands():
            count = min(last, start + len(out)) - (start + filled)
            if first <= start + filled < last and count > 0:
                row = start + filled
                words = self._words(first, last)
                part = out[filled : filled + count]
                decode_rows(self.params, words, last - first, scales[row : row + count], row - first, part)
                filled += count

    def parts(self) -> dict[str, Array]:
        return {STREAMS: self.packed, SCALES: self.scales}

    def _bands(self) -> Iterator[tuple[int, int]]:
        return bands_of(self.shape[0], self.shape[0], self.params.band)

    def _words(self, first: int, last: int) -> Array:
        start = 2 * self.shape[1] * self.params.stream_words(first)  # earlier bands have full words
        return self.packed[start : start + 2 * self.shape[1] * self.params.stream_words(last - first)]


def stays_packed(tensor: Tensor, *, direct: bool = False) -> bool:
    """Return whether ``TrellisMatrix.from_tensor`` supports a tensor, according to its attributes.

    If ``direct`` is set, return False, because a product with one row takes as long as decoding.
    """
    return tensor.codec == TrellisLayout.codec and len(tensor.shape) == 2 and 0 not in tensor.shape and not direct
