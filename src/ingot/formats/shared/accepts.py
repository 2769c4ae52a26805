"""Variants in which a format can store a tensor that it cannot store unchanged: other encodings, other layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ingot.core.bytes.encodings import ENCODED
from ingot.formats.base import Format
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.base import Storable
from ingot.model.layouts.table import layout_of
from ingot.model.spec import PartSpec, TensorSpec

RAW = "raw"
SUPPORTED = (RAW, *ENCODED)


def knows_size(format: Format, specs: Sequence[TensorSpec]) -> bool:
    """Return whether a format's ``size`` is exact to the byte; if not, it is an upper limit."""
    lengths = [part.length for spec in specs for part in spec.parts]
    return None not in lengths and (not format.traits.deduplicates or len(set(lengths)) == len(lengths))


def encoding_in(format: Format, encoding: str) -> str:
    """Return the encoding in which a format writes a part: its preferred compression, or ``raw`` if it has none."""
    return format.traits.encodings[0] if encoding != RAW and format.traits.encodings else encoding


def encoding_variants(format: Format, spec: TensorSpec) -> Iterator[TensorSpec]:
    """Yield a tensor with compressed parts in encodings that the format supports: its preferred one, then ``raw``."""
    if all(part.encoding == RAW for part in spec.parts) or any(part.encoding not in SUPPORTED for part in spec.parts):
        return
    for encoding in (encoding_in(format, ""), RAW):
        parts = tuple(part if part.encoding == RAW else _encoded(part, encoding) for part in spec.parts)
        variant = replace(spec, parts=parts)
        if encoding and format.why_unsupported(variant) is None:
            yield variant


def _encoded(part: PartSpec, encoding: str) -> PartSpec:
    if encoding == RAW:
        return replace(part, encoding=RAW, length=part.nbytes, uncompressed_length=None)
    return replace(part, encoding=encoding, length=None)


def layout_variants(format: Format, spec: TensorSpec) -> Iterator[tuple[Storable, TensorSpec]]:
    """Yield the other layouts of a tensor's values that a format supports, the most similar layout first.

    Each comes with the spec of the tensor in this layout. The codec's ``repack`` decides which layouts preserve every
    value.
    """
    for other in alternatives(layout_of(spec), spec):
        variant = with_layout(spec, other)
        if format.why_unsupported(variant) is None:
            yield other, variant


def with_layout(spec: TensorSpec, layout: Storable) -> TensorSpec:
    """Return the spec of a tensor whose values are written in another layout."""
    return replace(
        spec,
        dtype=layout.dtype,
        codec=layout.codec,
        parts=layout.part_specs(spec.shape),
        params=layout.attributes(),
    )
