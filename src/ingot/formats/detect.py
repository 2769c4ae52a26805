"""Which format a file or folder is of, by its first bytes, then by its name.

Containers that Ingot does not read are recognised by their magic numbers and named in the error; nothing of them is
parsed, least of all a pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import FormatError, UnsupportedError, UsageError
from ingot.formats.base import Format, LooksInside
from ingot.formats.table import FORMATS
from ingot.model.bytesource import Store

HEAD = 16


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A container that is not for us: magic bytes at an offset, what it is, what to do, and the rule of the refusal."""

    magic: bytes
    rule: str
    what: str
    advice: str
    offset: int = 0
    suffixes: tuple[str, ...] = ()


_CONVERT = "convert it to safetensors with the tool that made it"
_PICKLE = "a pickle can run code when it is loaded, so Ingot never opens one: convert it to safetensors first"

# Order matters: of several rows with one magic, the first whose suffixes fit (or that has none) is taken.
_FOREIGN = (
    _Foreign(b"PK\x03\x04", "detect.npz", "a NumPy .npz archive", _CONVERT, suffixes=(".npz",)),
    _Foreign(b"PK\x03\x04", "detect.zip", "a Keras archive", _CONVERT, suffixes=(".keras",)),
    _Foreign(b"PK\x03\x04", "detect.pickle", "a zip archive as torch.save writes it, with a pickle inside", _PICKLE),
    _Foreign(b"\x80\x02", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x80\x03", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x80\x04", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x80\x05", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"GGUF", "detect.gguf", "a GGUF file", "Ingot does not read GGUF; start from the original checkpoint"),
    _Foreign(b"\x89HDF\r\n\x1a\n", "detect.hdf5", "an HDF5 file", _CONVERT),
    _Foreign(b"\x93NUMPY", "detect.npy", "a NumPy .npy array", "load it with numpy.load and save it with ingot.save"),
    _Foreign(b"TFL3", "detect.tflite", "a TensorFlow Lite model", _CONVERT, offset=4),
    _Foreign(b"version https://", "detect.lfs-pointer", "a Git LFS pointer and not the weights", "run `git lfs pull`"),
    _Foreign(b"\x1f\x8b", "detect.archive", "a gzip stream", "decompress it first"),
    _Foreign(b"\x28\xb5\x2f\xfd", "detect.archive", "a zstd stream", "decompress it first"),
    _Foreign(b"\xfd7zXZ\x00", "detect.archive", "an xz stream", "decompress it first"),
)


def detect_file(name: str, head: bytes) -> Format:
    """Return the format of a file called ``name`` that begins with ``head`` (its first ``HEAD`` bytes, or all it has).

    Raises
    ------
    FormatError
        ``detect.empty``: nothing in it.
    UnsupportedError
        ``detect.pickle``, ``detect.gguf``, ...: another container, by its magic; ``detect.unknown``: none known.
    """
    if not head:
        raise FormatError("detect.empty", "expected a checkpoint, found an empty file", where=name)
    foreign = _foreign(name, head)
    if foreign is not None:
        raise UnsupportedError(
            f"expected a checkpoint in a format that Ingot reads, found {foreign.what}; {foreign.advice}",
            rule=foreign.rule,
            where=name,
        )
    for key in FORMATS:
        candidate: Format = FORMATS[key]
        if candidate.claims(name, head):
            return candidate
    raise UnsupportedError(
        f"expected one of the formats {', '.join(FORMATS)}; found a file that begins with {head[:8]!r}",
        rule="detect.unknown",
        where=name,
    )


def listing(store: Store) -> list[str]:
    """Return the names of a store's files, and of its folders with a slash at the end."""
    return [*store.names(), *(f"{name}/" for name in store.folders())]


def detect_folder(names: Sequence[str], store: Store | None = None) -> tuple[Format, str]:
    """Return the format and the entry file of a folder with these names, as ``listing`` makes them.

    ``store`` is the folder, for formats that have to look inside; without it they are passed over.

    Raises
    ------
    FormatError
        What a format looked at inside is damaged.
    UsageError
        ``detect.none``: no checkpoint among them; ``detect.several``: more than one, the caller has to choose.
    """
    found: list[tuple[Format, str]] = []
    for key in FORMATS:
        candidate: Format = FORMATS[key]
        entry = candidate.entry(names)
        if entry is None:
            continue
        if isinstance(candidate, LooksInside):
            if store is None or not candidate.confirms(store):
                continue
            found = [other for other in found if other[1] != entry]
        elif any(entry == other for _, other in found):
            continue
        found.append((candidate, entry))
    found = [pair for pair in found if getattr(pair[0], "folder", False)] or found
    if len(found) == 1:
        return found[0]
    if found:
        files = ", ".join(entry for _, entry in found)
        raise UsageError(f"expected one checkpoint in the folder, found {files}; name the file", rule="detect.several")
    known = tuple(suffix for key in FORMATS for suffix in FORMATS[key].suffixes)
    several = [name for name in names if name.lower().endswith(known)]
    if several:
        listed = ", ".join(several[:4]) + (", ..." if len(several) > 4 else "")
        raise UsageError(f"expected one checkpoint in the folder, found {listed}; name the file", rule="detect.several")
    raise UsageError(
        f"expected a folder with a checkpoint ({', '.join(known)}), found none among its {len(names)} files",
        rule="detect.none",
    )


def _foreign(name: str, head: bytes) -> _Foreign | None:
    if head[4:9] == b"\0\0\0\0{":  # a safetensors header length may look like any magic of up to four bytes
        return None
    for row in _FOREIGN:
        if head[row.offset :].startswith(row.magic) and (not row.suffixes or name.lower().endswith(row.suffixes)):
            return row
    return None
