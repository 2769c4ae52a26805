"""What manifests of zTensor, of both versions, have in common: how messages name a tensor, which broke the schema."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ingot.core.parsing.columns import Column, numbers
from ingot.errors import FormatError


def label(file: str, name: str, role: str | None = None) -> str:
    """Return how messages name a tensor or part; hostile names are cut."""
    text = f"{file}: tensor {name[:200]!r}"
    return text if role is None else f"{text} part {role[:80]!r}"


@dataclass(frozen=True, slots=True)
class Schema:
    """What the ``objects`` of a manifest are: their type, the key of their parts and the type of these.

    ``missing``, ``wrong`` and ``range`` are the rules of a field that is absent, of another type, or out of range.
    """

    object: type
    parts: str
    part: type
    missing: str
    wrong: str
    range: str

    def blame(self, root: Any, error: msgspec.ValidationError, file: str) -> FormatError:
        """Find the tensor and part that broke the schema; the message of a whole-manifest check does not name them."""
        where = f"{file}: manifest"
        for where_found, value, kind in self._pieces(root, file):
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as found:
                error, where = found, where_found
                break
        return FormatError(self._rule(str(error)), str(error), where=where)

    def _pieces(self, root: Any, file: str) -> Iterator[tuple[str, Any, type]]:
        objects = root.get("objects") if isinstance(root, dict) else None
        for name, value in objects.items() if isinstance(objects, dict) else ():
            parts = value.get(self.parts) if isinstance(value, dict) else None
            for role, part in parts.items() if isinstance(parts, dict) else ():
                yield label(file, name, role), part, self.part
            yield label(file, name), value, self.object

    def _rule(self, message: str) -> str:
        if "missing required field" in message:
            return self.missing
        return self.range if "`int` >=" in message or "`int` <=" in message else self.wrong


def has_maps(column: Column, data: bytes) -> bool:
    """Whether the values of a column that was left where it lies are CBOR maps, where they are there."""
    starts = numbers(column.first)
    heads = np.frombuffer(data, np.uint8)[starts[starts >= 0]]
    return bool((heads >> 5 == 5).all())


def kinds(column: Column, known: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield texts of a column that are not known, and how often they occur."""
    for number, text in enumerate(column.texts):
        if text not in known:
            yield text, int(np.count_nonzero(numbers(column.first) == number))
