"""Names of a state dict that share memory: a difference that both have is to be added once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ingot.engine.route import Route
from ingot.errors import FormatError
from ingot.model.tensor import Array, Tensor
from ingot.ops.delta.state import address


def tied_names(arrays: Mapping[str, Array], routes: Mapping[str, Route], same: Iterable[str]) -> set[str]:
    """Return the names whose memory is that of another name with the same difference: it is to be added once.

    ``same`` are those that the delta states to stay as they are: they share no memory with what is changed.

    Raises ``FormatError`` ``delta.shared``.
    """
    first: dict[tuple[int, int], str] = {}
    tied = set()
    for name, route in routes.items():
        if not route.layers or not arrays[name].nbytes:
            continue
        location = address(arrays[name])
        if location not in first:
            first[location] = name
        elif same_stored(routes[first[location]].layers[-1].tensor, route.layers[-1].tensor):
            tied.add(name)
        else:
            raise _shared(name, first[location])
    places = [(*location, name, True) for location, name in first.items()]
    places += [(*address(arrays[name]), name, False) for name in same if arrays[name].nbytes]
    ends = {True: (0, ""), False: (0, "")}  # of what is changed, of what stays: furthest so far, and whose it is
    for start, stop, name, changes in sorted(places):
        for other in (True, False) if changes else (True,):
            if start < ends[other][0]:
                raise _shared(name, ends[other][1])
        ends[changes] = max(ends[changes], (stop, name))
    return tied


def same_stored(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of a delta are the same."""
    if left.codec != right.codec or left.parts.keys() != right.parts.keys() or dict(left.params) != dict(right.params):
        return False
    return all(bytes(part.view()) == bytes(right.parts[role].view()) for role, part in left.parts.items())


def _shared(name: str, other: str) -> FormatError:
    return FormatError(
        "delta.shared", f"expected memory of its own, or the difference of {other[:200]!r}, whose it is", where=name
    )
