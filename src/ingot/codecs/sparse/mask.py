"""``sparse_mask``: a bit per element, and the selected elements as values or as another codec's codes.

Definition: ``spec/sparse_mask.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ingot.codecs.base import FLOAT_TARGETS, Codec, result
from ingot.codecs.cast import require_cast
from ingot.codecs.dense.codec import decodable
from ingot.codecs.sparse.mask_encode import MaskEncoder, prepare
from ingot.codecs.sparse.mask_params import ID, params_of
from ingot.codecs.sparse.mask_read import CodeMaskReader, DenseMaskReader, reader_of
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array, Tensor


class MaskCodec(Codec):
    """Unstructured or n:m sparsity: a mask, whose lowest bit comes first, and the selected elements."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``sparse_mask.params``, ``.inner``, ``.part-missing``,
        ``.dtype``, ``.size``.

        The inner codec checks its parts too. Readers check ``sparse_mask.popcount`` and ``sparse_mask.padding``.
        """
        params_of(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the dense values; an element whose mask bit is 0 is 0.

        Stored values can be cast by the rules of codec ``dense``; codes decode to f32, f16, bf16 or f64.
        """
        reader = reader_of(tensor)
        if isinstance(reader, DenseMaskReader):
            require_cast(decodable(tensor).name, dtype, tensor.name)
        elif dtype not in (*FLOAT_TARGETS, "f64"):
            raise UnsupportedError(
                f"expected a target dtype {', '.join(FLOAT_TARGETS)}, found {dtype}",
                rule=f"{ID}.dtype",
                where=tensor.name,
            )
        out = result(tensor, dtype, out)
        reader.read_into(out.reshape(tensor.matrix_shape))
        reader.finish()
        return out

    def reader(self, tensor: Tensor) -> DenseMaskReader | CodeMaskReader:
        return reader_of(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> MaskEncoder:
        """Return the encoder. Options, all with defaults (``spec/sparse_mask.md``, "Options"):

        ``threshold``, ``sparsity`` or ``n_m``: which elements to drop (default: those that are +0); ``inner`` dense,
        palette or affine (dense); ``options`` of that codec; ``row_alignment`` 64: each row of the mask is padded to
        words of 64 bits (no).
        """
        return prepare(shape, dtype, options)
