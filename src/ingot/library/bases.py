"""The base for storing an artifact's tensors as differences: the nearest artifact, measured on a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ingot.errors import IngotError
from ingot.library.cut import Segment
from ingot.library.encode import MIN_DELTA, as_delta
from ingot.library.manifest import Manifest
from ingot.library.objects import MAX_DELTAS, Objects
from ingot.library.options import AUTO
from ingot.library.place import OpenLibrary

NONE = "none"
_MAX_TRIED = 8
_SAMPLE = 8 << 20
_NEARLY = 0.95

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Base:
    """An artifact that differences refer to, with its objects by tensor."""

    name: str = ""
    objects: Mapping[Key, str] = field(default_factory=dict)

    def object_for(self, segment: Segment, objects: Objects) -> str:
        """Return the object that a segment may be a delta to; empty if there is none.

        If the base object has the maximum number of deltas, return the first object of its chain.
        """
        id = self.objects.get(segment.key, "") if segment.tensor and segment.size >= MIN_DELTA else ""
        if not id:
            return ""
        try:
            chain = objects.chain(id)
        except IngotError:
            return ""  # the base is damaged; verify reports it
        return chain[0].id if len(chain) > MAX_DELTAS else id


def base_of(manifest: Manifest) -> Base:
    """Return an artifact as a base for differences."""
    return Base(
        manifest.name,
        {
            (chunk.tensor, chunk.part, chunk.dtype, chunk.size): chunk.object
            for chunk in manifest.object_chunks()
            if chunk.tensor
        },
    )


def choose_base(
    library: OpenLibrary,
    objects: Objects,
    parts: Iterable[Segment],
    requested: str,
    read: Callable[[Segment], memoryview],
) -> Base:
    """Return the requested base; for ``auto`` the base with the smallest delta of a large tensor.

    Candidates are the artifacts that share most of the tensors by name, dtype and size. Candidates with short chains of
    deltas are tried first. ``read`` returns a segment's bytes.

    Raises ``UsageError`` ``library.unknown``, and the errors of reading the requested artifact's manifest.
    """
    if requested == NONE:
        return Base()
    if requested != AUTO:
        return base_of(library.manifest(requested))
    segments = {part.key: part for part in parts if part.tensor and part.size >= MIN_DELTA}
    candidates: list[tuple[int, Base]] = []
    for name in library.names() if segments else ():
        try:
            base = base_of(library.manifest(name))
        except IngotError:
            continue  # damaged, or removed by another process
        shared = sum(key[3] for key in base.objects if key in segments)
        if shared:
            candidates.append((shared, base))
    most_shared = max((shared for shared, _ in candidates), default=0)
    nearest = [base for shared, base in candidates if shared >= most_shared * _NEARLY]
    return _nearest(nearest, segments, objects, read) if nearest else Base()


def _nearest(
    bases: list[Base], segments: Mapping[Key, Segment], objects: Objects, read: Callable[[Segment], memoryview]
) -> Base:
    """Return the base with the smallest delta of the largest common tensor; ties go to the shorter chain."""
    common = [key for key in segments if all(key in base.objects for base in bases)]
    if len(bases) == 1 or not common:
        return bases[0]
    key = max(common, key=lambda item: (item[3], item))
    lengths: dict[str, int] = {}
    for base in bases:
        try:
            lengths[base.name] = len(objects.chain(base.objects[key]))
        except IngotError:
            continue
    ordered = sorted((base for base in bases if base.name in lengths), key=lambda base: (lengths[base.name], base.name))
    data = read(segments[key])
    size = min(data.nbytes, _SAMPLE)
    best, smallest = Base(), data.nbytes + 1
    for base in ordered[:_MAX_TRIED]:
        try:
            values = objects.values(base.objects[key], data.nbytes)
        except IngotError:
            continue
        size_of_delta = as_delta(data[:size], key[2], values[:size]).nbytes
        if size_of_delta < smallest * _NEARLY:
            best, smallest = base, size_of_delta
    return best
