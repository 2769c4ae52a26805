"""Views of a state dict's tensors as NumPy arrays that share its memory, so that they can be changed in place."""

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
    """Return ``value`` as a writable C-order array of the same memory.

    Raises ``UnsupportedError`` ``delta.layout`` for another framework, device or order, or for read-only memory.
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
    """Return whether a value is a torch tensor, without importing torch."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def as_framework(state: Mapping[str, Any], array: Array) -> Any:
    """Return an array as an object of the framework of ``state``: a torch tensor or a NumPy array."""
    torch = any(is_torch(value) for value in state.values())
    return FRAMEWORKS["pt" if torch else "np"](array, None)


def address(array: Array) -> tuple[int, int]:
    """Return the address of an array's first byte, and the address after its last byte."""
    start = int(array.ctypes.data)
    return start, start + array.nbytes


def _layout(name: str, actual: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected a writable NumPy array or CPU torch tensor in C order to change in place, found {actual}; "
        "ingot.numpy.load_file and ingot.torch.load_file return such tensors",
        rule="delta.layout",
        where=name,
    )


def tied_names(arrays: Mapping[str, Array], routes: Mapping[str, PatchChain], same: Iterable[str]) -> set[str]:
    """Return the names whose memory is already changed under an earlier name.

    The caller skips them, so that the difference of tied tensors is added only once. ``same`` are tensors that the
    delta does not change.

    Raises ``FormatError`` ``delta.shared`` if two tensors in the same memory have different differences. The same error
    is raised if two tensors overlap only in part, or if a changed tensor shares memory with a tensor in ``same``.
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
    ranges = [(*location, name, True) for location, name in first.items()]
    ranges += [(*address(arrays[name]), name, False) for name in same if arrays[name].nbytes]
    ends = {True: (0, ""), False: (0, "")}  # last address and its name, for changed and for unchanged tensors
    for start, stop, name, changes in sorted(ranges):
        for is_changed in (True, False) if changes else (True,):
            if start < ends[is_changed][0]:
                raise _shared(name, ends[is_changed][1])
        ends[changes] = max(ends[changes], (stop, name))
    return tied


def same_stored(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of a delta have the same codec, parameters and bytes."""
    if first.codec != second.codec or first.parts.keys() != second.parts.keys():
        return False
    if dict(first.params) != dict(second.params):
        return False
    return all(bytes(part.view()) == bytes(second.parts[role].view()) for role, part in first.parts.items())


def _shared(name: str, other_name: str) -> FormatError:
    return FormatError(
        "delta.shared",
        f"this tensor shares memory with {other_name[:200]!r}, but has another difference; give each tensor its own "
        "memory",
        where=name,
    )
