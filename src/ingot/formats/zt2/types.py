"""Element types as the document spells them (section 4, appendix A), and as Ingot does."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES

ITEM_BYTES = {name: row.bits // 8 for name, row in STORAGE_DTYPES.items() if name != "bool"}
"""The storage types and their bytes; a bool is a logical type of u8."""
REGISTERED: Mapping[str, str] = {
    **{
        name: name for name in ("bool", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "complex64", "complex128")
    },
    "f8_e8m0": "f8_e8m0fnu",
    "f4_e2m1": "f4_e2m1fn",
}
"""Appendix A: ids of logical types, and their names here."""
_OWN = {f"ingot.{name}/1": name for name in ("f6_e2m3fn", "f6_e3m2fn")}
KNOWN: Mapping[str, str] = {**REGISTERED, **_OWN}
_IDS = {name: stored for stored, name in KNOWN.items()}
# Before an id that reads like one of our names and is none: it stays unknown, and is written back as it was.
_FOREIGN = "~"


def types_here(dtype: str, stored: str | None) -> tuple[str, str | None]:
    """Return the storage and logical type here of what a file states of a part."""
    if stored is None:
        return dtype, None
    if stored == "bool":
        return "bool", None
    if stored in KNOWN:
        return dtype, KNOWN[stored]
    return dtype, _FOREIGN + stored if stored in DTYPES or stored.startswith(_FOREIGN) else stored


def types_stored(dtype: str, type: str | None) -> tuple[str, str | None]:
    """Return what a file states of a part: the inverse of ``types_here``."""
    if dtype == "bool":
        return "u8", "bool"
    if type is None or type == dtype:
        return dtype, None
    return dtype, _IDS.get(type, type.removeprefix(_FOREIGN))


def storage_of(stored: str) -> str | None:
    """Return the storage type that a logical type is in; None for one that is not known."""
    name = KNOWN.get(stored)
    return None if name is None else "u8" if name == "bool" else DTYPES[name].storage


def nbytes_of(dtype: str, stored: str | None, count: int) -> int | None:
    """Return the bytes of ``count`` elements; None where the logical type is not known."""
    if stored is None:
        return count * ITEM_BYTES[dtype]
    return DTYPES[KNOWN[stored]].nbytes(count) if stored in KNOWN else None
