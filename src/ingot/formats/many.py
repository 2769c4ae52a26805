"""What formats and their writers can do for artifacts of very many tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ingot.formats.base import Format, FormatWriter
from ingot.model.bytesource import Buffer
from ingot.model.spec import TensorSpec


@runtime_checkable
class AddsWhole(FormatWriter, Protocol):
    """A writer that is quicker where a whole tensor's bytes are at hand."""

    def add(self, spec: TensorSpec, parts: Mapping[str, Buffer]) -> dict[str, Any]:
        """Do what ``begin``, ``write`` and ``end`` do."""
        ...


@runtime_checkable
class Compact(Format, Protocol):
    """A format whose writer keeps little of a small tensor: at most ``entry`` bytes until the end, with the report."""

    per_tensor: int
