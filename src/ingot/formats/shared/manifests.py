"""Helpers for manifests of both versions of zTensor: names in messages, and the tensor that breaks the schema."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ingot.core.parsing.columns import Column, numbers
from ingot.errors import FormatError


def label(file: str, name: str, role: str | None = None) -> str:
    """Return the name of a tensor or part for messages; long names are cut."""
    text = f"{file}: tensor {name[:200]!r}"
    return text if role is None else f"{text} part {role[:80]!r}"


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of the tensors in a manifest of zTensor, and the rules of its errors.

    ``object`` is the type of a tensor's entry, ``parts`` the key of its parts, ``part`` the type of a part's entry.
    ``missing``, ``mistyped`` and ``range`` are the rules for fields that are missing, of another type, or out of range.
    """

    object: type
    parts: str
    part: type
    missing: str
    mistyped: str
    range: str

    def blame(self, root: Any, error: msgspec.ValidationError, file: str) -> FormatError:
        """Return the error for a manifest that breaks the schema; it names the tensor and the part.

        ``error``, from the check of the complete manifest, does not name them.
        """
        location = f"{file}: manifest"
        for item_location, value, cls in self._objects_and_parts(root, file):
            try:
                msgspec.convert(value, cls)
            except msgspec.ValidationError as item_error:
                error = item_error
                location = item_location
                break
        return FormatError(self._rule(str(error)), str(error), where=location)

    def _objects_and_parts(self, root: Any, file: str) -> Iterator[tuple[str, Any, type]]:
        objects = root.get("objects") if isinstance(root, dict) else None
        for name, value in objects.items() if isinstance(objects, dict) else ():
            parts = value.get(self.parts) if isinstance(value, dict) else None
            for role, part in parts.items() if isinstance(parts, dict) else ():
                yield label(file, name, role), part, self.part
            yield label(file, name), value, self.object

    def _rule(self, message: str) -> str:
        if "missing required field" in message:
            return self.missing
        return self.range if "`int` >=" in message or "`int` <=" in message else self.mistyped


def has_maps(column: Column, data: bytes) -> bool:
    """Return whether every existing value of a column is a CBOR map; the column contains offsets into ``data``."""
    starts = numbers(column.first)
    heads = np.frombuffer(data, np.uint8)[starts[starts >= 0]]
    return bool((heads >> 5 == 5).all())


def unknown_texts(column: Column, supported: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield the texts of a column that are not in ``supported``, each with its number of occurrences."""
    for index, text in enumerate(column.texts):
        if text not in supported:
            yield text, int(np.count_nonzero(numbers(column.first) == index))
