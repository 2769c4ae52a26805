"""A state dict seen as NumPy arrays that share its memory, to be changed in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.engine.patch_step import PatchChain
from ingot.errors import FormatError, UnsupportedError
from ingot.model.tensor import FRAMEWORKS, TO_NUMPY, Array, Tensor


def shared_array(name: str, value: Any) -> Array:
    """Return ``value`` as an array of the same memory, in C order, that can be written.

    Raises ``UnsupportedError`` ``delta.layout`` for anything else: another framework, device or order, memory that is
    read-only.
    """
    if is_torch(value):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise _layout(name, f"one on {value.device.type}" if value.device.type != "cpu" else "a strided one")
        array = TO_NUMPY["pt"](value)
    elif isinstance(value, np.ndarray):
        array = value
    else:
        raise _layout(name, type(value).__name__)
    if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned and array.dtype.isnative):
        raise _layout(name, "a strided, unaligned, byte-swapped or read-only one")
    return array


def element_type(array: Array) -> str:
    """Return the canonical name of an array's element type."""
    return resolve_dtype(array.dtype).name


def is_torch(value: Any) -> bool:
    """Whether this is a torch tensor; torch is not imported to find out."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def like(state: Mapping[str, Any], array: Array) -> Any:
    """Return an array of one's own as what the state dict holds: torch tensors or NumPy arrays."""
    torch = any(is_torch(value) for value in state.values())
    return FRAMEWORKS["pt" if torch else "np"](array, None)


def address(array: Array) -> tuple[int, int]:
    """Return where an array's bytes begin and end."""
    start = int(array.ctypes.data)
    return start, start + array.nbytes


def _layout(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected a writable NumPy array or CPU torch tensor in C order to change in place, found {found}; "
        "ingot.numpy.load_file and ingot.torch.load_file give such ones",
        rule="delta.layout",
        where=name,
    )


def tied_names(arrays: Mapping[str, Array], routes: Mapping[str, PatchChain], same: Iterable[str]) -> set[str]:
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
