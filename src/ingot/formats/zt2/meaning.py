"""What a profile is here, and what a file says of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ingot.formats.zt2.made import Made


class Meaning(NamedTuple):
    """A codec, its attributes, its roles by those of the file where they differ, and element types (storage, logical)
    by role where these are not what the file's are elsewhere; ``made`` are parts by role that are made of stored ones.
    """

    codec: str
    attributes: Mapping[str, Any]
    roles: Mapping[str, str] = {}
    types: Mapping[str, tuple[str, str | None]] = {}
    made: Mapping[str, Made] = {}


class Written(NamedTuple):
    """A profile's id, its attributes, its roles by those here where they differ, and the file's types by role here
    where these are not what they are elsewhere."""

    layout: str
    attributes: Mapping[str, Any]
    roles: Mapping[str, str] = {}
    types: Mapping[str, tuple[str, str | None]] = {}
