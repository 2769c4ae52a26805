"""What an artifact's tensors may be stored as differences to: the artifact that is nearest, measured on a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ingot.errors import IngotError
from ingot.library.cut import Segment
from ingot.library.encode import LEAST_DELTA, as_delta
from ingot.library.manifest import Manifest
from ingot.library.objects import MOST_DELTAS, Objects
from ingot.library.options import AUTO
from ingot.library.place import Place

NONE = "none"
_TRIED = 8
_SAMPLE = 8 << 20
_MUCH = 0.95

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Base:
    """An artifact to make differences to: its objects, by what they are of."""

    name: str = ""
    objects: Mapping[Key, str] = field(default_factory=dict)

    def of(self, segment: Segment, objects: Objects) -> str:
        """Return the object that a segment may be a delta to, empty where there is none.

        Where the base's own chain is as long as it may be, it is the whole object at its beginning.
        """
        id = self.objects.get(segment.key, "") if segment.tensor and segment.size >= LEAST_DELTA else ""
        if not id:
            return ""
        try:
            chain = objects.chain(id)
        except IngotError:
            return ""  # damaged: verify tells
        return chain[0].id if len(chain) > MOST_DELTAS else id


def base_of(manifest: Manifest) -> Base:
    """Return an artifact as a base."""
    return Base(
        manifest.name,
        {
            (piece.tensor, piece.part, piece.dtype, piece.size): piece.object
            for piece in manifest.pieces()
            if piece.tensor
        },
    )


def choose_base(
    place: Place, objects: Objects, parts: Iterable[Segment], asked: str, read: Callable[[Segment], memoryview]
) -> Base:
    """Return the base that was asked for; for ``auto`` the one to which a large tensor's difference is smallest.

    Looked at are the artifacts that have most of the tensors, by name, type and size; of those those whose objects are
    whole first. ``read`` gives a segment's bytes.

    Raises ``UsageError`` ``library.unknown``, and as ``Place.manifest`` for the one that was asked for.
    """
    if asked == NONE:
        return Base()
    if asked != AUTO:
        return base_of(place.manifest(asked))
    wanted = {part.key: part for part in parts if part.tensor and part.size >= LEAST_DELTA}
    known: list[tuple[int, Base]] = []
    for name in place.names() if wanted else ():
        try:
            base = base_of(place.manifest(name))
        except IngotError:
            continue  # damaged, or removed meanwhile
        shared = sum(key[3] for key in base.objects if key in wanted)
        if shared:
            known.append((shared, base))
    most = max((shared for shared, _ in known), default=0)
    nearest = [base for shared, base in known if shared >= most * _MUCH]
    return _nearest(nearest, wanted, objects, read) if nearest else Base()


def _nearest(
    bases: list[Base], wanted: Mapping[Key, Segment], objects: Objects, read: Callable[[Segment], memoryview]
) -> Base:
    """Return the base whose largest common tensor takes the smallest delta; of equal ones that with fewer deltas."""
    common = [key for key in wanted if all(key in base.objects for base in bases)]
    if len(bases) == 1 or not common:
        return bases[0]
    key = max(common, key=lambda each: (each[3], each))
    lengths: dict[str, int] = {}
    for base in bases:
        try:
            lengths[base.name] = len(objects.chain(base.objects[key]))
        except IngotError:
            continue
    tried = sorted((base for base in bases if base.name in lengths), key=lambda base: (lengths[base.name], base.name))
    data = read(wanted[key])
    size = min(data.nbytes, _SAMPLE)
    best, least = Base(), data.nbytes + 1
    for base in tried[:_TRIED]:
        try:
            values = objects.values(base.objects[key], data.nbytes)
        except IngotError:
            continue
        taken = as_delta(data[:size], key[2], values[:size]).nbytes
        if taken < least * _MUCH:
            best, least = base, taken
    return best
