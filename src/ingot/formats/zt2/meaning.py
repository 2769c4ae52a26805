"""Descriptions of a tensor: as a codec of Ingot, and as a profile of the container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ingot.formats.zt2.made import ConvertedPart


class StoredForm(NamedTuple):
    """Description of a stored tensor as a codec of Ingot.

    ``roles`` maps roles of the file to roles of the codec, if they differ. ``types`` are (storage, logical) element
    types by role, if they differ from the file's. ``converted`` are parts by role that are converted from stored parts.
    """

    codec: str
    attributes: Mapping[str, Any]
    roles: Mapping[str, str] = {}
    types: Mapping[str, tuple[str, str | None]] = {}
    converted: Mapping[str, ConvertedPart] = {}


class WrittenForm(NamedTuple):
    """Description of a tensor as a profile: its id and attributes.

    ``roles`` maps roles of the codec to roles of the file, if they differ. ``types`` are the types in the file by role,
    if they differ from the defaults.
    """

    layout: str
    attributes: Mapping[str, Any]
    roles: Mapping[str, str] = {}
    types: Mapping[str, tuple[str, str | None]] = {}
