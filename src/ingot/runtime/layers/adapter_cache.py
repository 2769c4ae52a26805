"""Cache the factors of adapters that a loaded model used, so that their next use reads no weights from files.

A cache belongs to one model and ends with it. An adapter is read again if one of its files has another stamp.

Importing this module needs torch (``core.border.require`` names the extra).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from weakref import WeakKeyDictionary, ref

import torch

from ingot.adapters.record import Change, LowRank
from ingot.adapters.view import column_norms, row_norms
from ingot.artifacts.adapter_files import CONFIG
from ingot.artifacts.open import find
from ingot.model.bytesource import Stamp
from ingot.runtime.arrays.torch import from_numpy, to_numpy
from ingot.stores.location import Location

Shapes = dict[str, tuple[int, ...]]
FileStamps = tuple[tuple[str, Stamp], ...]
MergedKey = tuple[str, tuple[tuple[str, FileStamps, float], ...]]


class Product:
    """The change ``scale * (x @ a) @ b`` of a layer's output; its factors are in memory and finite.

    Parameters
    ----------
    item : LowRank
        A change of one matrix. Its factors are read and checked here.
    """

    def __init__(self, item: LowRank) -> None:
        plain = item.plain()
        self.a = from_numpy(plain.a.values().copy())  # not memory of the adapter's file
        self.b = from_numpy(plain.b.values().copy())
        self.scale = item.scale
        self._transposed = item.transposed
        self._magnitude = None if item.magnitude is None else item.magnitude.values().copy()
        self._norms: torch.Tensor | None = None
        self._norms_state: WeightState | None = None

    @property
    def is_dora(self) -> bool:
        return self._magnitude is not None

    def norm_factors(self, module: torch.nn.Module, dense_weight: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return DoRA's factor of each output: the magnitude divided by the norm of the changed weight.

        Returns None for LoRA.

        The factors are computed again only if the weight of the layer may have changed.
        """
        if self._magnitude is None:
            return None
        state = WeightState.read([*module.parameters(recurse=False), *module.buffers(recurse=False)])
        if self._norms is None or state is None or state != self._norms_state:
            values = to_numpy(dense_weight().float())
            change = (to_numpy(self.b) @ to_numpy(self.a)) * self.scale
            norms = column_norms(values + change.T) if self._transposed else row_norms(values + change)
            self._norms = from_numpy(self._magnitude / norms)
            self._norms_state = state
        return self._norms


@dataclass(frozen=True, slots=True)
class WeightState:
    """The identity, address and version of tensors; equal states mean unchanged values."""

    entries: tuple[tuple[ref[torch.Tensor], int, int], ...]

    @classmethod
    def read(cls, tensors: Iterable[torch.Tensor]) -> WeightState | None:
        """Return the state of ``tensors``, by which changes are detected.

        Returns None if one of them is an inference tensor or is on device meta, because torch counts no changes of
        these.
        """
        tensors = list(tensors)
        if any(tensor.is_inference() or tensor.is_meta for tensor in tensors):
            return None
        return cls(tuple((ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors))

    def __eq__(self, value: object) -> bool:
        """Compare identities: torch compares tensors by value."""
        if not isinstance(value, WeightState) or len(self.entries) != len(value.entries):
            return False
        pairs = zip(self.entries, value.entries, strict=True)
        return all(a[0]() is b[0]() is not None and a[1:] == b[1:] for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CachedAdapter:
    """The factors of an adapter in memory.

    ``products`` maps the name of a parameter to the products that change the layer's output. The value is None if a
    product cannot express the change, so that the parameter gets new values.

    ``sizes`` has the number of values that the adapter stores for each parameter. ``stamps`` are the stamps of its
    files.
    """

    stamps: FileStamps
    products: Mapping[str, Sequence[Product] | None]
    sizes: Mapping[str, int]


@dataclass(slots=True)
class AdapterCache:
    """The adapters that a model used, by location, and the merged parameters.

    A merged parameter is a parameter of the model to which changes of adapters were added.
    """

    shapes: Shapes = field(default_factory=dict)
    adapters: dict[str, CachedAdapter] = field(default_factory=dict)
    merged: dict[MergedKey, tuple[WeightState, torch.nn.Parameter]] = field(default_factory=dict)

    def require_shapes(self, shapes: Shapes) -> None:
        """Clear the cache if the parameters of the model have other names or shapes than at the last use."""
        if shapes != self.shapes:
            self.clear()
            self.shapes = shapes

    def adapter(self, path: str, stamps: FileStamps) -> CachedAdapter | None:
        """Return the cached adapter; None if it is not cached, or if its files have other stamps."""
        cached = self.adapters.get(path)
        return cached if cached is not None and cached.stamps == stamps else None

    def add(self, path: str, adapter: CachedAdapter) -> None:
        """Store an adapter; remove its earlier version, and the parameters merged with that version."""
        self.adapters[path] = adapter
        for key in [key for key in self.merged if any(name == path for name, _, _ in key[1])]:
            del self.merged[key]

    def clear(self) -> None:
        """Remove all adapters and merged parameters."""
        self.shapes = {}
        self.adapters.clear()
        self.merged.clear()


_CACHES: WeakKeyDictionary[torch.nn.Module, AdapterCache] = WeakKeyDictionary()


def cache_of(model: torch.nn.Module) -> AdapterCache:
    """Return the cache of a model, which is deleted with it."""
    return _CACHES.setdefault(model, AdapterCache())


def clear_adapter_cache(model: torch.nn.Module) -> None:
    """Delete the cached factors of adapters that a model used; the next use of an adapter reads its files again.

    Adapters in use stay active.
    """
    _CACHES.pop(model, None)


def file_stamps(path: str) -> FileStamps:
    """Return the addresses and stamps of an adapter's files. Raises the errors of ``ingot.artifacts.open.find``."""
    store, name = find(Location.parse(path))
    names = sorted(store.names())  # an index of shards does not name its files without being read
    if name and not name.endswith(".json"):
        names = [item for item in names if item in (name, CONFIG)]
    return tuple((store.url_of(item), store.stat(item)) for item in names)


def value_count(changes: Sequence[Change]) -> int:
    """Return the number of values that an adapter stores for a tensor."""
    return sum(
        prod(item.a.shape) + prod(item.b.shape) if isinstance(item, LowRank) else prod(item.values.shape)
        for item in changes
    )
