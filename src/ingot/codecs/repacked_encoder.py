"""Encoding in one pass into a layout that is otherwise reached by repacking: words of GPTQ and AWQ, biases of MLX."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

from ingot.codecs.base import ChunkParts, Encoder, Repacked
from ingot.codecs.range_probe import RangeProbe
from ingot.codecs.table import CODECS
from ingot.errors import CodecError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Storable
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array, Tensor

REPACKED_FROM = "repacked_from"
"""The option of a step whose encoder repacks: a table with the inner encoder's ``codec`` and ``options``."""


class RepackedEncoder(Encoder):
    """An encoder that repacks the result of an inner encoder; integers and scales stay the same.

    Parameters
    ----------
    inner : Encoder
    name : str
        The tensor's name in errors.
    shape : tuple of int
        The tensor's shape.
    layout : Storable
        The layout of the result. If it does not store matrices row by row, all rows must be in one chunk.
    """

    def __init__(self, inner: Encoder, name: str, shape: tuple[int, ...], layout: Storable) -> None:
        self._inner = inner
        self._name = name
        self._shape = shape
        self._layout = layout
        self.codec: str = layout.codec
        self.params: Mapping[str, Any] = layout.attributes()
        self.parts: tuple[PartSpec, ...] = layout.part_specs(shape)
        self.step: int = inner.step
        self.single_chunk: bool = inner.single_chunk or not isinstance(layout, AffineLayout | GgmlBlocksLayout)

    @property
    def fit_passes(self) -> int:
        return self._inner.fit_passes

    @property
    def lossless(self) -> bool:
        return self._inner.lossless

    def scratch_bytes(self) -> int:
        return self._inner.scratch_bytes()

    def scratch_bytes_per_element(self) -> float:
        """Return the inner encoder's scratch bytes, plus its parts, plus their repacked copy."""
        part_bytes = sum(part.at_most for part in self._inner.parts)
        return self._inner.scratch_bytes_per_element() + 2 * part_bytes / max(1, prod(self._shape))

    def retained_bytes(self) -> int:
        return self._inner.retained_bytes()

    def range_probe(self) -> RangeProbe | None:
        return self._inner.range_probe()

    def ready(self) -> None:
        self._inner.ready()

    def forget(self) -> None:
        self._inner.forget()

    def fit_pass(self, rows: Array) -> None:
        self._inner.fit_pass(rows)

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the repacked parts of these rows; raise ``CodecError`` ``repack.values`` if a value would change."""
        inner = self._inner.encode(rows, start)
        shape = self._shape if self.single_chunk else rows.shape
        repack = repacked(self._inner, inner, self._name, shape, self._layout)
        if not repack.exact:
            raise CodecError(
                "repack.values", f"the encoded integers cannot be stored exactly in this layout: {repack.why_not}"
            )
        reader = repack.reader()
        chunk = ChunkParts(reader.read(repack.rows))
        reader.finish()
        chunk.start = start
        chunk.within = inner
        return chunk

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        """Decode the inner encoder's parts of a chunk, whose values equal those of the repacked parts."""
        self._inner.decode(parts.within if isinstance(parts, ChunkParts) else parts, out)


def repacked(
    encoder: Encoder, parts: Mapping[str, Array], name: str, shape: tuple[int, ...], layout: Storable
) -> Repacked:
    """Return the repacking of encoded ``parts`` into ``layout``; ``why_not`` is set if a value would change.

    Raises ``CodecError`` if parts and shape contradict the encoder's layout.
    """
    dtype = str(encoder.params["dtype"])
    stored = layout_of(TensorSpec(name, shape, dtype, encoder.codec, encoder.parts, encoder.params))
    return CODECS[encoder.codec].repack(Tensor.from_parts(stored, parts, shape, name), layout)


def prepare_encoder(target: TensorSpec, dtype: str, options: Mapping[str, Any]) -> Encoder:
    """Return the encoder of a step from the spec of its result, the source's dtype and the step's options.

    Raises the errors of ``Codec.encoder``, and ``UnsupportedError`` for an unknown codec.
    """
    inner = options.get(REPACKED_FROM)
    if inner is None:
        return CODECS.get_or_refuse(target.codec).encoder(target.shape, dtype, options)
    encoder = CODECS.get_or_refuse(inner["codec"]).encoder(target.shape, dtype, inner["options"])
    return RepackedEncoder(encoder, target.name, target.shape, cast(Storable, layout_of(target)))
