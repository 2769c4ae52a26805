"""Sentinels: small files that say a tier is complete, written last, with what it was made from and what it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.errors import IngotError
from ingot.ext.squish.tiers import snapshot
from ingot.ext.squish.tiers.gate import Passed, passed_from_json
from ingot.ext.squish.tiers.snapshot import Snapshot
from ingot.model.store import Store

VERSION = 1
_LONGEST = 256 << 20  # a million files


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The content of a sentinel that Ingot wrote.

    The tier, the files it was made from, the files it consists of; for packed tiers the tensors that have more bits
    than the tier's name says, and what its gate found, None where there was no gate.
    """

    tier: str
    source: Snapshot
    files: Snapshot
    raised: tuple[str, ...] = ()
    gate: Passed | None = None


UNREADABLE = Sentinel("", {}, {})
"""What ``read`` returns for a record of Ingot's that is garbled, or of a version that this one does not know."""


def encode(sentinel: Sentinel) -> bytes:
    """Return a sentinel's bytes. squish looks at nothing but whether the file is there."""
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
    """Return what Ingot wrote; None for a sentinel of another program, which is usually empty."""
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
    return Sentinel(root["tier"], source, files, raised, passed_from_json(root.get("gate")))
