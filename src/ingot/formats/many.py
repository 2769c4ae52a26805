"""What formats and their writers can do for artifacts of very many tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from ingot.formats.base import Format, FormatWriter
from ingot.model.bytesource import Buffer
from ingot.model.layouts.dense import DATA
from ingot.model.spec import TensorSpec

SMALL = 1 << 16
"""Bytes of a tensor that are sooner written in one call."""


@runtime_checkable
class AddsWhole(FormatWriter, Protocol):
    """A writer that is quicker where a whole tensor's bytes are at hand."""

    def add(self, spec: TensorSpec, parts: Mapping[str, Buffer]) -> dict[str, Any]:
        """Do what ``begin``, ``write`` and ``end`` do."""
        ...


@runtime_checkable
class Compact(Protocol):
    """A format whose writer keeps little of a small tensor: at most ``entry`` bytes until the end, with the report."""

    per_tensor: int


@runtime_checkable
class GoesByName(Protocol):
    """A format that knows without the rest of its spec what it refuses of a tensor that is like one it takes."""

    def refuses_name(self, name: str) -> str | None:
        """Why a tensor of this name cannot be carried; None if it can."""
        ...


def refusing(format: Format) -> Callable[[TensorSpec, str], str | None]:
    """Return what tells why a tensor like that of a spec, which the format takes, cannot be carried under a name."""
    if isinstance(format, GoesByName):
        by_name = format.refuses_name
        return lambda spec, name: by_name(name)
    return lambda spec, name: format.refuses(spec.named(name))


def add_in_pieces(writer: FormatWriter, spec: TensorSpec, parts: Mapping[str, Buffer]) -> dict[str, Any]:
    """Write a whole tensor by ``begin``, ``write`` and ``end``; return its record."""
    writer.begin(spec)
    for role, data in parts.items():
        writer.write(role, data)
    return writer.end()


def small(spec: TensorSpec, parts: Mapping[str, Buffer]) -> memoryview | None:
    """Return the bytes of a tensor whose only part is ``data``, of its spec's length; None if they are many."""
    if len(parts) != 1 or DATA not in parts:
        return None
    whole = memoryview(parts[DATA])
    return whole.cast("B") if whole.nbytes == spec.parts[0].length and whole.nbytes <= SMALL else None
