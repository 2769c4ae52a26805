"""How a format carries a tensor that it does not carry as it is: in another encoding, in another layout."""

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
KNOWN = (RAW, *ENCODED)


def knows_size(format: Format, specs: Sequence[TensorSpec]) -> bool:
    """Whether a format's ``size`` is what is written, to the byte, and not the most that it can be."""
    lengths = [part.length for spec in specs for part in spec.parts]
    return None not in lengths and (not format.traits.deduplicates or len(set(lengths)) == len(lengths))


def encoding_in(format: Format, encoding: str) -> str:
    """Return what a format calls a part's encoding when it is written: its own way to compress, ``raw`` as it is."""
    return format.traits.encodings[0] if encoding != RAW and format.traits.encodings else encoding


def recoded(format: Format, spec: TensorSpec) -> Iterator[TensorSpec]:
    """Yield a tensor with compressed parts as a format carries it: the same bytes in its own encoding, or in none."""
    if all(part.encoding == RAW for part in spec.parts) or any(part.encoding not in KNOWN for part in spec.parts):
        return
    for encoding in (encoding_in(format, ""), RAW):
        parts = tuple(part if part.encoding == RAW else _encoded(part, encoding) for part in spec.parts)
        wanted = replace(spec, parts=parts)
        if encoding and format.refuses(wanted) is None:
            yield wanted


def _encoded(part: PartSpec, encoding: str) -> PartSpec:
    if encoding == RAW:
        return replace(part, encoding=RAW, length=part.nbytes, uncompressed_length=None)
    return replace(part, encoding=encoding, length=None)


def accepts(format: Format, spec: TensorSpec) -> Iterator[tuple[Storable, TensorSpec]]:
    """Yield the other layouts of a tensor's numbers that a format carries, that nearest to as stored first.

    Each with the tensor as it would be written. The codec's ``repack`` tells which of them keeps every value.
    """
    for other in alternatives(layout_of(spec), spec):
        made = as_laid(spec, other)
        if format.refuses(made) is None:
            yield other, made


def as_laid(spec: TensorSpec, layout: Storable) -> TensorSpec:
    """Return a tensor as it is written in another layout of its numbers."""
    return replace(
        spec,
        dtype=layout.dtype,
        codec=layout.codec,
        parts=layout.part_specs(spec.shape),
        params=layout.attributes(),
    )
