"""Open and save checkpoints that are bytes in memory, and read state dicts as if they were opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ingot.artifacts.open import Source, open_source, weights_of
from ingot.artifacts.save import named_tensors, plan_tensors, write_tensors
from ingot.formats.base import Catalog, Format, WriteOptions
from ingot.formats.detect import detect_file
from ingot.formats.shared.foreign import HEAD
from ingot.formats.table import FORMATS
from ingot.model.artifact import Artifact
from ingot.model.checkpoint import Checkpoint
from ingot.stores.location import AnyPath, Location
from ingot.stores.memory import MemoryStore, MemoryTarget

_NAME = "<bytes>"
_STATE = "<state dict>"
_HOLDER = "safetensors"  # the format that a state dict is said to be of: tensors by name and nothing else


def open_bytes(
    data: bytes | bytearray | memoryview, *, verify: bool = True, max_decompressed: int | str | None = None
) -> Checkpoint:
    """Open a checkpoint that is one buffer, in any format that Ingot reads; errors as ``ingot.open``.

    Tensors refer to ``data``, which must not change while they are in use.
    """
    store = MemoryStore({_NAME: data}, _NAME)
    format = detect_file(_NAME, bytes(memoryview(data)[:HEAD]))
    catalog = format.read(store, _NAME, verify=verify)
    source = _BytesSource(
        _NAME, store, _NAME, format, _NAME, catalog, "mmap", verify, None, max_decompressed, data=data
    )
    source.require_decompressed(max_decompressed)
    return weights_of(source)


def save_bytes(
    tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, *, format: str = "safetensors"
) -> bytes:
    """Return the single file that ``ingot.save`` would write; errors as there, disk trouble excepted."""
    chosen: Format = FORMATS.get_or_refuse(format)
    planned = plan_tensors(chosen, tensors)
    target = MemoryTarget()
    writer = chosen.writer(target, _NAME, Artifact([spec for _, spec in planned], metadata or {}), WriteOptions())
    (name,) = write_tensors(writer, planned)
    return bytes(target.files[name])


def opened(
    weights: AnyPath | Mapping[str, Any],
    *,
    io: str = "auto",
    verify: bool = True,
    max_decompressed: int | str | None = None,
) -> Source:
    """Open a path, or view a mapping of names to arrays or tensors as what was opened; errors as ``ingot.open``.

    Nothing of a mapping is copied: it must not change while it is in use. What a checkpoint's file says of itself, and
    its digest over the whole file, stay with its tensors.
    """
    if not isinstance(weights, Mapping):
        return open_source(Location.parse(weights), io=io, verify=verify, max_decompressed=max_decompressed)
    catalog = Catalog({item.name: item for item in named_tensors(weights)})
    source = _StateSource(_STATE, MemoryStore({}, _STATE), _STATE, FORMATS[_HOLDER], _STATE, catalog, "mmap", verify)
    if isinstance(weights, Checkpoint):
        catalog.metadata, catalog.check_whole, source.checkpoint = weights.metadata, weights.require_whole, weights
    return source


@dataclass(slots=True)
class _BytesSource(Source):
    """A buffer as a source. A copy of its checkpoint has a copy of the bytes."""

    data: bytes | bytearray | memoryview = b""

    def reopen(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]]:
        return partial(open_bytes, verify=self.verify, max_decompressed=self.max_decompressed), (bytes(self.data),)


@dataclass(slots=True)
class _StateSource(Source):
    """A mapping as a source; ``checkpoint`` where it is an open one, whose files stay open with it."""

    checkpoint: Checkpoint | None = None

    def require_unchanged(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.require_unchanged()
