"""Read and write ``kernels.json``: the kernel units of a model, and the kernels that the chip refuses
(spec/ane-kernels.md)."""

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
    """Contents of the index: the file of each unit, and the digest in the unit's header, by tensor name.

    ``refused`` maps each kernel that the chip cannot run to the reason; the folder has no units of these kernels.
    """

    chip: str
    target: str
    units: Mapping[str, tuple[str, str]]
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of the file, including a digest of everything else in it."""
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
    """Return the parsed and checked index.

    Raises
    ------
    FormatError
        ``anek.index``: not the expected JSON, or a file that is outside of the folder or is named twice.
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
        raise _index_error("chip, target, units, refused and a digest", ", ".join(root))
    digest = _text(root[manifest_digest.KEY], manifest_digest.KEY)
    if verify:
        manifest_digest.check_json(data, digest, INDEX)
    units = {name: _unit(name, entry) for name, entry in _object(root["units"], "units").items()}
    files = [file for file, _ in units.values()]
    if len(set(files)) != len(files) or not files:
        raise _index_error("units, and each file once", f"{len(files)} of {len(set(files))} files")
    refused = {name: _text(reason, name) for name, reason in _object(root["refused"], "refused").items()}
    return Index(_text(root["chip"], "chip"), _text(root["target"], "target"), units, refused)


def _unit(name: str, entry: Any) -> tuple[str, str]:
    fields = _object(entry, name)
    if set(fields) != {"file", "digest"}:
        raise _index_error(f"file and digest of {name[:80]!r}", ", ".join(fields))
    file = _text(fields["file"], name)
    if not file.endswith(SUFFIX) or "/" in file or "\\" in file or file.startswith("."):
        raise _index_error(f"a file *{SUFFIX} in the folder", file)
    return file, _text(fields["digest"], name)


def _object(value: Any, field_name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _index_error(f"an object for {field_name[:80]!r}", value)
    return value


def _text(value: Any, field_name: str) -> str:
    if not isinstance(value, str):
        raise _index_error(f"text for {field_name[:80]!r}", value)
    return value


def _index_error(expected: str, actual: object) -> FormatError:
    return FormatError(_RULE, f"expected {expected}, found {str(actual)[:80]!r}", where=INDEX)
