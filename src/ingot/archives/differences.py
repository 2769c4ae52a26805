"""Tensors stored as differences to another version of them, from the same archive or from another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.archives.scan import Scan
from ingot.artifacts.archive_layout import MAX_DELTAS, ArchivedFile, ArchiveLayout, External, Span
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.delta.exact import ID as DELTA
from ingot.codecs.delta.exact_chunks import is_coded
from ingot.engine.diff_step import Diff
from ingot.engine.steps import ENCODED
from ingot.engine.work import Step, difference_spec
from ingot.library.encode import smallest
from ingot.model.reading.ranges import read_bytes
from ingot.model.tensor import Tensor

_SAMPLE = 4 << 20


class Differences:
    """Chooses the base of each object. ``bases`` maps each object that is stored as a difference to its base.

    Both are indices of objects.
    """

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._depths: dict[int, int] = {}
        self.bases: dict[int, int] = {}

    def step(self, index: int) -> Step | None:
        """Return the step that stores an object as a difference, or None if it should be stored without a base.

        This is so if the object has no earlier version, or if a sample of it is smaller without a base. If the chain of
        differences would become too long, the first object of the chain is the base.
        """
        base_index = self._scan.candidates.get(index)
        tensor = self._scan.objects[index]
        if base_index is None or not isinstance(tensor, Tensor):
            return None
        if self._depths.get(base_index, 0) >= MAX_DELTAS:
            while base_index in self.bases:
                base_index = self.bases[base_index]
        base = self._tensor(base_index)
        if base is None or (base.shape, base.dtype) != (tensor.shape, tensor.dtype) or not is_coded(tensor.dtype):
            return None
        if not smallest(_sample(tensor), tensor.dtype, _sample(base)).is_delta:
            return None
        self.bases[index] = base_index
        self._depths[index] = self._depths.get(base_index, 0) + 1
        codec = delta_codec(DELTA)
        encoder = codec.encoder(tensor.shape, tensor.dtype, {})
        spec = difference_spec(tensor, codec, encoder, "raw")
        return Diff(tensor, spec, ENCODED, "difference", exact=True, base=base, codec=codec, encoder=encoder)

    def _tensor(self, index: int) -> Tensor | None:
        item = self._scan.external[-index - 1][1] if index < 0 else self._scan.objects[index]
        return item if isinstance(item, Tensor) else None


def _sample(tensor: Tensor) -> memoryview:
    """Return the first bytes of a dense, uncompressed tensor."""
    (part,) = tensor.parts.values()
    return memoryview(read_bytes(part.source, part.offset, min(_SAMPLE, part.length)))


def with_external(layout: ArchiveLayout, external: Sequence[External], against: str) -> ArchiveLayout:
    """Return ``layout`` with the used ``external`` ranges, which are ranges of the model ``against``.

    In ``layout`` they have negative indices, in the result the indices after the last object.
    """
    used = {span.object for file in layout.files for span in file.spans} | set(layout.bases.values())
    order = sorted((index for index in used if index < 0), reverse=True)
    indices = {index: len(layout.objects) + position for position, index in enumerate(order)}

    def renumbered(file: ArchivedFile) -> ArchivedFile:
        spans = [Span(indices.get(span.object, span.object), span.offset, span.size) for span in file.spans]
        return replace(file, spans=tuple(spans))

    return ArchiveLayout(
        layout.folder,
        layout.objects,
        [renumbered(file) for file in layout.files],
        {index: indices.get(base, base) for index, base in layout.bases.items()},
        tuple(external[-index - 1] for index in order),
        against if order else "",
    )
