"""Where a result goes: a single file, or a folder with companions; in which format."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from ingot.errors import UsageError
from ingot.formats.base import Format
from ingot.formats.table import FORMATS

DEFAULT_FORMAT = "zt"
STEM = "model"


@dataclass(frozen=True, slots=True)
class Destination:
    """A path to be published: ``name`` is the weight file to create, ``directory`` tells whether in a folder at
    ``path``, which of some formats has their suffix."""

    path: Path
    directory: bool
    format: Format
    name: str


def destination(path: str | PathLike[str], format: str | None = None) -> Destination:
    """Decide by the suffix of ``path``: a known one means a single file of that format, anything else a folder.

    Raises
    ------
    UsageError
        ``format`` is unknown or contradicts the suffix, or the path is that of an existing file without a known suffix
        (``save.suffix``); a file where a package, a folder, is to be (``target.exists``).
    """
    text = fspath(path)
    location = Path(text)
    by_suffix = format_of_suffix(location.name)
    chosen = FORMATS.get_or_refuse(format) if format is not None else by_suffix
    whole = by_suffix is not None and getattr(by_suffix, "folder", False)
    is_folder = location.is_dir() or text.endswith(("/", "\\")) or by_suffix is None or whole
    if is_folder and not (whole and chosen is not by_suffix):
        if whole and location.is_file():
            raise UsageError(
                "expected a folder, which such a package is, or nothing; found a file of this name: remove it or "
                "choose another destination",
                rule="target.exists",
                where=text,
            )
        if location.is_file():
            suffixes = ", ".join(suffix for name in FORMATS for suffix in FORMATS[name].suffixes)
            raise UsageError(f"expected a folder or a file name ending in {suffixes}", rule="save.suffix", where=text)
        chosen = chosen or FORMATS[DEFAULT_FORMAT]
        return Destination(location, True, chosen, chosen.file_name(STEM))
    if by_suffix is not None and chosen is not None and chosen.name != by_suffix.name:
        raise UsageError(
            f"expected a file name that fits format {chosen.name} ({', '.join(chosen.suffixes)})",
            rule="save.suffix",
            where=text,
        )
    assert chosen is not None
    return Destination(location, False, chosen, location.name)


def format_of_suffix(name: str) -> Format | None:
    """Return the format whose suffix ``name`` has."""
    for key in FORMATS:
        format = FORMATS[key]
        if name.lower().endswith(format.suffixes):
            return format
    return None
