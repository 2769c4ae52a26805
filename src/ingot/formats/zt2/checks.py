"""What the metadata rules of profiles are made of: parts, their sizes, attributes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ingot.errors import FormatError
from ingot.formats.zt2.manifest import Object, stated
from ingot.model.spec import TensorSpec


def refuse(where: str, expected: str) -> FormatError:
    """Make the error of an object that breaks a rule of its profile."""
    return FormatError("zt2.layout", f"expected {expected}", where=where)


def require_parts(where: str, obj: Object, roles: AbstractSet[str]) -> None:
    """Refuse, by rule ``zt2.layout``, other parts than these."""
    if set(obj.parts) != roles:
        raise refuse(where, f"the parts {sorted(roles)} of {obj.layout}, found {sorted(obj.parts)[:5]}")


def require_size(where: str, obj: Object, role: str, expected: int | None) -> None:
    """Refuse, by rule ``zt2.size``, a part of another size; None where it is not known."""
    found = obj.parts[role].nbytes
    if expected is not None and found != expected:
        raise FormatError("zt2.size", f"expected {expected} bytes of {role}, found {found}", where=where)


def number(where: str, obj: Object, key: str, least: int) -> int:
    """Return an attribute that is a whole number from ``least`` on; refuses others by rule ``zt2.layout``."""
    value = (stated(obj.attributes) or {}).get(key)
    if type(value) is not int or not least <= value < 2**63:
        raise refuse(where, f"attribute {key} of {least} or more, found {str(value)[:40]!r}")
    return value


def others(spec: TensorSpec, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a tensor to be written that its codec does not know."""
    return {key: value for key, value in spec.params.items() if key not in own}
