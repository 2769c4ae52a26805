"""Checkpoints in memory: open and save bytes, and treat state dicts as opened sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ingot.artifacts.open import Source, open_source, weights_of
from ingot.artifacts.save import named_tensors, plan_tensors, write_tensors
from ingot.formats.base import Catalog, Format, WriteOptions
from ingot.formats.detect import FORMATS, HEAD, detect_file
from ingot.model.artifact import Artifact
from ingot.model.checkpoint import Checkpoint
from ingot.stores.location import AnyPath, Location
from ingot.stores.memory import MemoryStore, MemoryTarget

_NAME = "<bytes>"
_STATE = "<state dict>"
_STATE_FORMAT = "safetensors"  # the nominal format of a state dict, which has named tensors only


def open_bytes(
    data: bytes | bytearray | memoryview, *, verify: bool = True, max_decompressed: int | str | None = None
) -> Checkpoint:
    """Open a checkpoint in a buffer, in any format that Ingot reads. Raises the errors of ``ingot.open``.

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
    """Return the bytes of the single file that ``ingot.save`` would write. Raises the errors of ``ingot.save``."""
    chosen: Format = FORMATS.get_or_refuse(format)
    planned = plan_tensors(chosen, tensors)
    target = MemoryTarget()
    writer = chosen.writer(target, _NAME, Artifact([spec for _, spec in planned], metadata or {}), WriteOptions())
    (name,) = write_tensors(writer, planned)
    return bytes(target.files[name])


def open_weights(
    weights: AnyPath | Mapping[str, Any],
    *,
    io: str = "auto",
    verify: bool = True,
    max_decompressed: int | str | None = None,
) -> Source:
    """Open a path, or return a mapping of names to arrays or tensors as a source. Raises the errors of ``ingot.open``.

    The values of a mapping are not copied; they must not change while they are in use. If the mapping is a checkpoint,
    the source has its metadata and the digest of its file.
    """
    if not isinstance(weights, Mapping):
        return open_source(Location.parse(weights), io=io, verify=verify, max_decompressed=max_decompressed)
    catalog = Catalog({item.name: item for item in named_tensors(weights)})
    source = _StateSource(
        _STATE, MemoryStore({}, _STATE), _STATE, FORMATS[_STATE_FORMAT], _STATE, catalog, "mmap", verify
    )
    if isinstance(weights, Checkpoint):
        catalog.metadata = weights.metadata
        catalog.check_whole = weights.require_whole
        source.checkpoint = weights
    return source


@dataclass(slots=True)
class _BytesSource(Source):
    """An opened checkpoint whose file is a buffer. Copies of its checkpoint contain a copy of the bytes."""

    data: bytes | bytearray | memoryview = b""

    def reopen(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]]:
        return partial(open_bytes, verify=self.verify, max_decompressed=self.max_decompressed), (bytes(self.data),)


@dataclass(slots=True)
class _StateSource(Source):
    """A mapping of arrays or tensors as a source, so that operations can read it like an opened file.

    ``checkpoint`` is the mapping if it is an opened checkpoint; the caller closes it.
    """

    checkpoint: Checkpoint | None = None

    def require_unchanged(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.require_unchanged()
