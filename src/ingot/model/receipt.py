"""Receipts: measurements of an artifact's weights that are stored with it (``spec/evaluation.md``, "Receipts").

A receipt contains the content id of its weights, so it cannot be attributed to other weights.
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
"""The key of the receipt in the metadata of a file."""
SUFFIX = ".ingot-receipt.json"
"""The suffix of a receipt that is a file next to the weights."""
MAX_RECEIPT = 1 << 20
MAX_ENTRIES = 64

Fault = tuple[str, str]

_FORMAT = "ingot-receipt-1"
_ALGORITHM = "sha256"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Measurements of the weights with content id ``weights``. The key ``of`` of an entry describes the measurement."""

    weights: str
    entries: Sequence[Mapping[str, Any]] = ()

    def encoded(self) -> bytes:
        """Return the receipt as JSON with a digest of itself.

        Raises ``FormatError`` ``receipt.fields`` if it is larger than readers accept.
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


def parse_receipt(raw: bytes, location: str) -> Receipt:
    """Parse a receipt and compare its digest.

    Raises ``FormatError`` ``receipt.json`` or ``receipt.fields``, ``IntegrityError`` ``manifest.digest``.
    """
    if len(raw) > MAX_RECEIPT:
        raise FormatError("receipt.fields", f"expected at most {MAX_RECEIPT} bytes, found {len(raw)}", where=location)
    fields = strict_json(raw, "receipt.json", "receipt.json", location)
    weights, entries, digest = (fields.get(key) for key in ("weights", "entries", manifest_digest.KEY))
    is_valid = (
        fields.get("format") == _FORMAT
        and isinstance(weights, str)
        and isinstance(entries, list)
        and len(entries) <= MAX_ENTRIES
        and all(isinstance(entry, dict) and isinstance(entry.get("of"), dict) for entry in entries)
        and isinstance(digest, str)
    )
    if not is_valid:
        raise FormatError(
            "receipt.fields",
            f"expected {_FORMAT!r} with weights, up to {MAX_ENTRIES} entries with a subject, and {manifest_digest.KEY}",
            where=location,
        )
    assert isinstance(weights, str)
    assert isinstance(entries, list)
    manifest_digest.check_json(raw, str(digest), location)
    return Receipt(weights, entries)


def with_entry(old: Receipt | None, weights: str, entry: Mapping[str, Any]) -> Receipt:
    """Return a receipt with ``entry`` added as the last entry.

    Entries of other weights and an earlier entry with the same ``of`` are left out. If there are more than
    ``MAX_ENTRIES`` entries, the oldest are left out.
    """
    kept_entries = (
        [] if old is None or old.weights != weights else [item for item in old.entries if item["of"] != entry["of"]]
    )
    return Receipt(weights, [*kept_entries, entry][-MAX_ENTRIES:])


def try_parse_receipt(raw: bytes, location: str) -> tuple[Receipt | None, Fault | None]:
    """Return the receipt and None, or None and the rule and message of the error, so that readers can continue."""
    try:
        return parse_receipt(raw, location), None
    except (FormatError, IntegrityError) as error:
        return None, (error.rule or "", f"receipt: {error.message}")
