"""Open and save checkpoints that are bytes in memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ingot.formats.base import Format, WriteOptions
from ingot.formats.detect import detect_file
from ingot.formats.foreign import HEAD
from ingot.formats.table import FORMATS
from ingot.model.artifact import Artifact
from ingot.model.checkpoint import Checkpoint
from ingot.ops.open import Source, weights_of
from ingot.ops.save import plan_tensors, write_tensors
from ingot.stores.memory import MemoryStore, MemoryTarget

_NAME = "<bytes>"


def open_bytes(data: bytes | bytearray | memoryview, *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint that is one buffer, in any format that Ingot reads; errors as ``ingot.open``.

    Tensors refer to ``data``, which must not change while they are in use.
    """
    store = MemoryStore({_NAME: data}, _NAME)
    format = detect_file(_NAME, bytes(memoryview(data)[:HEAD]))
    catalog = format.read(store, _NAME, verify=verify)
    source = Source(_NAME, store, _NAME, format, _NAME, catalog, "mmap", verify)
    return weights_of(source, lambda: (partial(open_bytes, verify=verify), (bytes(data),)))


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
