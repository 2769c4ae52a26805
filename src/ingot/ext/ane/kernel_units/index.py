"""``kernels.json``: the kernel units of a whole model, and what the chip did not take (spec/ane-kernels.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, UnsupportedError

INDEX = "kernels.json"
SUFFIX = ".anek"
MAX_INDEX = 1 << 28
VERSION = 1
_RULE = "anek.index"


@dataclass(frozen=True, slots=True)
class Index:
    """Which unit holds which weight: by tensor name the file, and the digest that the unit states of itself.

    ``refused`` are the kernels that the chip does not take, with reasons; they are not in the folder.
    """

    chip: str
    target: str
    units: Mapping[str, tuple[str, str]]
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the file, which ends with a digest of itself."""
        units = {name: {"file": file, "digest": digest} for name, (file, digest) in self.units.items()}
        document = {
            "ingot_kernels": VERSION,
            "chip": self.chip,
            "target": self.target,
            "units": units,
            "refused": dict(self.refused),
            manifest_digest.KEY: manifest_digest.stand_in("crc32c"),
        }
        return manifest_digest.fill_json(msgspec.json.format(msgspec.json.encode(document), indent=1), "crc32c")


def parse_index(data: bytes, *, verify: bool = True) -> Index:
    """Check the file.

    Raises
    ------
    FormatError
        ``anek.index``: no such JSON, or a file that lies elsewhere or is named twice.
    UnsupportedError
        ``anek.version``.
    IntegrityError
        ``manifest.digest``.
    """
    root = strict_json(data, _RULE, _RULE, INDEX)
    if type(root.get("ingot_kernels")) is not int or root["ingot_kernels"] != VERSION:
        raise UnsupportedError(
            f"expected ingot_kernels {VERSION}, found {str(root.get('ingot_kernels'))[:40]!r}",
            rule="anek.version",
            where=INDEX,
        )
    if set(root) != {"ingot_kernels", "chip", "target", "units", "refused", manifest_digest.KEY}:
        raise _refuse("chip, target, units, refused and a digest", ", ".join(root))
    digest = _text(root[manifest_digest.KEY], manifest_digest.KEY)
    if verify:
        manifest_digest.check_json(data, digest, INDEX)
    units = {name: _unit(name, entry) for name, entry in _object(root["units"], "units").items()}
    files = [file for file, _ in units.values()]
    if len(set(files)) != len(files) or not files:
        raise _refuse("units, each file once", f"{len(files)} of {len(set(files))} files")
    refused = {name: _text(reason, name) for name, reason in _object(root["refused"], "refused").items()}
    return Index(_text(root["chip"], "chip"), _text(root["target"], "target"), units, refused)


def _unit(name: str, entry: Any) -> tuple[str, str]:
    fields = _object(entry, name)
    if set(fields) != {"file", "digest"}:
        raise _refuse(f"file and digest of {name[:80]!r}", ", ".join(fields))
    file = _text(fields["file"], name)
    if not file.endswith(SUFFIX) or "/" in file or "\\" in file or file.startswith("."):
        raise _refuse(f"a file *{SUFFIX} of the folder", file)
    return file, _text(fields["digest"], name)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(f"an object for {what[:80]!r}", value)
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _refuse(f"text for {what[:80]!r}", value)
    return value


def _refuse(expected: str, actual: object) -> FormatError:
    return FormatError(_RULE, f"expected {expected}, found {str(actual)[:80]!r}", where=INDEX)
