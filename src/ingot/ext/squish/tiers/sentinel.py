"""Read and write sentinels: small files, written last, that mark a tier as complete and record its source and files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.errors import IngotError
from ingot.ext.squish.tiers import snapshot
from ingot.ext.squish.tiers.gate import GateResult, gate_result_from_json
from ingot.ext.squish.tiers.snapshot import Snapshot
from ingot.model.store import Store

VERSION = 1
_LONGEST = 256 << 20  # a million files


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The content of a sentinel that Ingot wrote.

    ``source`` and ``files`` are the states of the source files and of the tier's files. ``raised`` are the tensors of a
    packed tier that have more bits than the tier's name states. ``gate`` is the result of its gate; None if it was
    built without a gate.
    """

    tier: str
    source: Snapshot
    files: Snapshot
    raised: tuple[str, ...] = ()
    gate: GateResult | None = None


UNREADABLE = Sentinel("", {}, {})
"""Result of ``read`` for a damaged record of Ingot, or a record of an unknown version."""


def encode(sentinel: Sentinel) -> bytes:
    """Return the bytes of a sentinel. squish checks only that the file exists."""
    data: dict[str, Any] = {
        "ingot_tier": VERSION,
        "tier": sentinel.tier,
        "source": snapshot.to_json(sentinel.source),
        "files": snapshot.to_json(sentinel.files),
    }
    if sentinel.raised:
        data["raised"] = sentinel.raised
    if sentinel.gate is not None:
        data["gate"] = sentinel.gate.to_json()
    return msgspec.json.encode(data)


def read(store: Store, name: str) -> Sentinel | None:
    """Return the record in a sentinel that Ingot wrote; None for another program's sentinel, which is usually empty."""
    try:
        root: Any = json.loads(store.read(name, _LONGEST, "npydir.manifest-length"))
    except (IngotError, ValueError, RecursionError):
        return None
    if not isinstance(root, dict) or "ingot_tier" not in root:
        return None
    source = snapshot.from_json(root.get("source"))
    files = snapshot.from_json(root.get("files"))
    if root["ingot_tier"] != VERSION or not isinstance(root.get("tier"), str) or source is None or files is None:
        return UNREADABLE
    listed = root.get("raised")
    raised = tuple(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()
    return Sentinel(root["tier"], source, files, raised, gate_result_from_json(root.get("gate")))
