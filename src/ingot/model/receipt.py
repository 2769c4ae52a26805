"""Receipts: what was measured of an artifact's weights, kept with them; definition: ``spec/evaluation.md``, "Receipts".

A receipt names the weights by their content id, so that it cannot pass for one of others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, IntegrityError

KEY = "ingot_receipt"
"""Under this key a file's own metadata hold it."""
SUFFIX = ".ingot-receipt.json"
"""Of a file beside the weights."""
MAX_RECEIPT = 1 << 20
MOST = 64

Fault = tuple[str, str]

_FORMAT = "ingot-receipt-1"
_ALGORITHM = "sha256"


@dataclass(frozen=True, slots=True)
class Receipt:
    """``entries`` are measurements of the weights whose content id is ``weights``; each says in ``of`` of what."""

    weights: str
    entries: Sequence[Mapping[str, Any]] = ()

    def encoded(self) -> bytes:
        """Return the receipt as JSON with a digest of itself.

        Raises ``FormatError`` ``receipt.fields`` where it would be too large to be read again.
        """
        fields = {
            "format": _FORMAT,
            "weights": self.weights,
            "entries": list(self.entries),
            manifest_digest.KEY: manifest_digest.stand_in(_ALGORITHM),
        }
        data = manifest_digest.fill_json(json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n", _ALGORITHM)
        if len(data) > MAX_RECEIPT:
            raise FormatError("receipt.fields", f"expected a receipt of at most {MAX_RECEIPT} bytes, found {len(data)}")
        return data


def parse_receipt(raw: bytes, where: str) -> Receipt:
    """Return what a receipt says.

    Raises ``FormatError`` ``receipt.json``, ``receipt.fields``, ``IntegrityError`` ``manifest.digest``.
    """
    if len(raw) > MAX_RECEIPT:
        raise FormatError("receipt.fields", f"expected at most {MAX_RECEIPT} bytes, found {len(raw)}", where=where)
    stated = strict_json(raw, "receipt.json", "receipt.json", where)
    weights, entries, digest = (stated.get(key) for key in ("weights", "entries", manifest_digest.KEY))
    sound = (
        stated.get("format") == _FORMAT
        and isinstance(weights, str)
        and isinstance(entries, list)
        and len(entries) <= MOST
        and all(isinstance(each, dict) and isinstance(each.get("of"), dict) for each in entries)
        and isinstance(digest, str)
    )
    if not sound:
        raise FormatError(
            "receipt.fields",
            f"expected {_FORMAT!r} with weights, up to {MOST} entries that say of what, and {manifest_digest.KEY}",
            where=where,
        )
    assert isinstance(weights, str)
    assert isinstance(entries, list)
    manifest_digest.check_json(raw, str(digest), where)
    return Receipt(weights, entries)


def extended(old: Receipt | None, weights: str, entry: Mapping[str, Any]) -> Receipt:
    """Return a receipt with one entry more, the newest last.

    Those of other weights go, that of the same measurement too, and the oldest where there are too many.
    """
    same = [] if old is None or old.weights != weights else [each for each in old.entries if each["of"] != entry["of"]]
    return Receipt(weights, [*same, entry][-MOST:])


def read_or_none(raw: bytes, where: str) -> tuple[Receipt | None, Fault | None]:
    """Return a receipt, or the rule and message by which it cannot be read: nobody's weights are worse for that."""
    try:
        return parse_receipt(raw, where), None
    except (FormatError, IntegrityError) as error:
        return None, (error.rule or "", f"receipt: {error.message}")
