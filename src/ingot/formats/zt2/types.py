"""Element types in the terms of the document (section 4, appendix A) and of Ingot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES
from ingot.formats.zt2.made import ConvertedPart


class StoredForm(NamedTuple):
    """The codec, attributes and parts with which Ingot reads a stored tensor.

    ``roles`` maps roles of the file to roles of the codec, if they differ. ``types`` are (storage, logical) element
    types by role, if they differ from the file's. ``converted`` are parts by role that are converted from stored parts.
    """

    codec: str
    attributes: Mapping[str, Any]
    roles: Mapping[str, str] = {}
    types: Mapping[str, tuple[str, str | None]] = {}
    converted: Mapping[str, ConvertedPart] = {}


class WrittenForm(NamedTuple):
    """The profile (``layout``), attributes and parts with which Ingot writes a tensor.

    ``roles`` maps roles of the codec to roles of the file, if they differ. ``types`` are the types in the file by role,
    if they differ from the defaults.
    """

    layout: str
    attributes: Mapping[str, Any]
    roles: Mapping[str, str] = {}
    types: Mapping[str, tuple[str, str | None]] = {}


ITEM_BYTES = {name: row.bits // 8 for name, row in STORAGE_DTYPES.items() if name != "bool"}
"""The storage types and the number of bytes of an element; bool is a logical type of u8."""
REGISTERED: Mapping[str, str] = {
    **{
        name: name for name in ("bool", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "complex64", "complex128")
    },
    "f8_e8m0": "f8_e8m0fnu",
    "f4_e2m1": "f4_e2m1fn",
}
"""Ids of logical types in appendix A, with Ingot's names."""
_INGOT_TYPES = {f"ingot.{name}/1": name for name in ("f6_e2m3fn", "f6_e3m2fn")}
LOGICAL_TYPES: Mapping[str, str] = {**REGISTERED, **_INGOT_TYPES}
_IDS = {name: stored for stored, name in LOGICAL_TYPES.items()}
# Prefix of an unknown id that equals a name of Ingot: the type stays unknown and is written back unchanged.
_FOREIGN = "~"


def types_from_file(dtype: str, stored: str | None) -> tuple[str, str | None]:
    """Return Ingot's storage and logical type for the types of a part in a file."""
    if stored is None:
        return dtype, None
    if stored == "bool":
        return "bool", None
    if stored in LOGICAL_TYPES:
        return dtype, LOGICAL_TYPES[stored]
    return dtype, _FOREIGN + stored if stored in DTYPES or stored.startswith(_FOREIGN) else stored


def types_for_file(dtype: str, type: str | None) -> tuple[str, str | None]:
    """Return the types of a part in a file; the inverse of ``types_from_file``."""
    if dtype == "bool":
        return "u8", "bool"
    if type is None or type == dtype:
        return dtype, None
    return dtype, _IDS.get(type, type.removeprefix(_FOREIGN))


def storage_of(stored: str) -> str | None:
    """Return the storage type of a logical type; None if it is unknown."""
    name = LOGICAL_TYPES.get(stored)
    return None if name is None else "u8" if name == "bool" else DTYPES[name].storage


def nbytes_of(dtype: str, stored: str | None, count: int) -> int | None:
    """Return the number of bytes of ``count`` elements; None if the logical type is unknown."""
    if stored is None:
        return count * ITEM_BYTES[dtype]
    return DTYPES[LOGICAL_TYPES[stored]].nbytes(count) if stored in LOGICAL_TYPES else None
