"""Sentinels: small files that say a tier is complete, written last, with what it was made from and what it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ingot.core.atomic import atomic_write
from ingot.ops.tiers import snapshot
from ingot.ops.tiers.snapshot import Snapshot

VERSION = 1
_LONGEST = 256 << 20  # a million files


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The content of a sentinel that Ingot wrote: the tier, the files it was made from, the files it consists of."""

    tier: str
    source: Snapshot
    files: Snapshot


def write(path: Path, sentinel: Sentinel) -> None:
    """Put a sentinel in place, flushed to disk; see ``core.atomic.atomic_write`` for what it raises.

    squish looks at nothing but whether the file is there.
    """
    data = {
        "ingot_tier": VERSION,
        "tier": sentinel.tier,
        "source": snapshot.to_json(sentinel.source),
        "files": snapshot.to_json(sentinel.files),
    }
    atomic_write(path, msgspec.json.encode(data))


def read(path: Path) -> Sentinel | None:
    """Return what Ingot wrote; None for a sentinel of another program, which is usually empty."""
    try:
        if path.stat().st_size > _LONGEST:
            return None
        found: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("ingot_tier") != VERSION or not isinstance(found.get("tier"), str):
        return None
    source, files = snapshot.from_json(found.get("source")), snapshot.from_json(found.get("files"))
    return None if source is None or files is None else Sentinel(found["tier"], source, files)
