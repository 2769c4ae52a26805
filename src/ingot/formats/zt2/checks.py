"""Helpers for the metadata rules of profiles: parts, their sizes, attributes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ingot.errors import FormatError
from ingot.formats.zt2.manifest import Object, optional_value
from ingot.model.spec import TensorSpec


def refuse(location: str, expected: str) -> FormatError:
    """Return the error for an object that breaks a rule of its profile."""
    return FormatError("zt2.layout", f"expected {expected}", where=location)


def require_parts(location: str, obj: Object, roles: AbstractSet[str]) -> None:
    """Raise ``FormatError`` ``zt2.layout`` unless the object has exactly these parts."""
    if set(obj.parts) != roles:
        raise refuse(location, f"the parts {sorted(roles)} of {obj.layout}, found {sorted(obj.parts)[:5]}")


def require_size(location: str, obj: Object, role: str, expected: int | None) -> None:
    """Raise ``FormatError`` ``zt2.size`` if a part has another size; ``expected`` is None if the size is unknown."""
    actual = obj.parts[role].nbytes
    if expected is not None and actual != expected:
        raise FormatError("zt2.size", f"expected {expected} bytes of {role}, found {actual}", where=location)


def number(location: str, obj: Object, key: str, minimum: int) -> int:
    """Return an integer attribute of at least ``minimum``; raises ``FormatError`` ``zt2.layout`` for other values."""
    value = (optional_value(obj.attributes) or {}).get(key)
    if type(value) is not int or not minimum <= value < 2**63:
        raise refuse(location, f"attribute {key} of {minimum} or more, found {str(value)[:40]!r}")
    return value


def extra_attributes(spec: TensorSpec, codec_attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a tensor that its codec does not define.

    ``codec_attributes`` are the attributes that the codec defines.
    """
    return {key: value for key, value in spec.params.items() if key not in codec_attributes}
