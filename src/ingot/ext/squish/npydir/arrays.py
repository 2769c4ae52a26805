"""The arrays of a directory: which there are, each opened and its header checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.files import ZstdFile, zstd_head
from ingot.ext.squish.npydir.names import COMPRESSIONS, FOLDER, KNOWN, file_of, foreign_form
from ingot.model.bytesource import ByteSource, MemorySource
from ingot.model.reading.ranges import HeaderSource, read_bytes
from ingot.model.store import Store

_PREAMBLE = 12
# Enough for the headers that NumPy writes of few dimensions, and the shape of any tensor behind one.
_USUAL = 512


@dataclass(frozen=True, slots=True)
class Array:
    """One array: its file, header, the header's bytes, and where small values are that were read along with it."""

    name: str
    header: npy.NpyHeader
    source: ByteSource
    head: bytes
    near: ByteSource


@dataclass(slots=True)
class Group:
    """What is there of one tensor: paths by known suffix, and suffixes of forms that are not read."""

    key: str
    paths: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)


def list_arrays(store: Store) -> tuple[dict[str, Group], list[str]]:
    """Return the groups of files by safe key, and the names in ``tensors/`` that are no arrays' at all.

    Raises
    ------
    FormatError
        ``npydir.link``: a link that leads out of the directory. ``npydir.extra-file``: an array that can belong to no
        tensor.
    """
    listings = {folder: store.list(folder) for folder in ("", FOLDER)}
    for folder, listing in listings.items():
        leading = [name for name in listing.outside if folder or name in (FOLDER, "manifest.json", "ingot.json")]
        if leading:
            raise FormatError(
                "npydir.link",
                "expected files in this directory, found a link that leads out of it: copy the directory with `cp -rL`",
                where=f"{folder}/{leading[0]}" if folder else leading[0],
            )
    groups: dict[str, Group] = {}
    others: list[str] = []
    for name in listings[FOLDER].files:
        if name.startswith("."):
            continue
        stem, compression = _stem(name)
        if stem is None:
            others.append(name)
            continue
        key, underscores, suffix = stem.rpartition("__")
        if not underscores or not (suffix in KNOWN or foreign_form(suffix)):
            raise extra_file(f"{FOLDER}/{name}", "an array of no known form")
        group = groups.setdefault(key, Group(key))
        if suffix in KNOWN and compression != ".br":
            group.paths.setdefault(suffix, f"{FOLDER}/{name}")  # sorted: the plain file comes before the compressed one
        else:
            group.foreign[f"{suffix}{compression}"] = foreign_form(suffix) or "compressed by brotli"
    return groups, others


def extra_file(where: str, what: str) -> FormatError:
    """The refusal of an array that belongs to no tensor of the manifest."""
    return FormatError(
        "npydir.extra-file",
        f"expected arrays of the tensors in the manifest only, found {what}; remove it",
        where=where,
    )


def open_array(store: Store, path: str) -> Array:
    """Open a file, check its header and its length.

    Raises ``FormatError`` with the rules of ``npy`` and ``npydir.zstd``, ``UnsupportedError`` ``npydir.npy-dtype``.
    """
    file = store.open(path)
    try:
        return _array(file, path)
    except BaseException:
        file.close()
        raise


def _array(file: ByteSource, path: str) -> Array:
    if path.endswith(".zst"):
        stored = HeaderSource(file, _USUAL)
        span = npy.header_span(zstd_head(stored, _PREAMBLE), path)
        head = zstd_head(stored, span)
        header = npy.parse(head, path)
        values = ZstdFile(file, header.size)
        return Array(path, header, values, head, values)
    read = read_bytes(file, 0, min(_USUAL, file.size))
    span = npy.header_span(read[:_PREAMBLE], path)
    if span > file.size:
        raise FormatError("npydir.npy-truncated", f"expected {span} bytes of header, found {file.size}", where=path)
    head = read[:span] if span <= len(read) else read_bytes(file, 0, span)
    header = npy.parse(head, path)
    npy.check_size(header, file.size, path)
    return Array(path, header, file, head, MemorySource(read, file.name) if header.size <= len(read) else file)


def open_arrays(store: Store, group: Group, suffixes: tuple[str, ...]) -> Mapping[str, Array]:
    """Open the arrays of one form.

    Raises ``FormatError`` ``npydir.missing-file`` for the first that is not there.
    """
    for suffix in suffixes:
        if suffix not in group.paths:
            leftover = [name for name in group.foreign if name.startswith(suffix)]
            if leftover:
                raise foreign(group, leftover[0])
            raise FormatError(
                "npydir.missing-file",
                "expected this file beside the tensor's others, found none: the directory is incomplete",
                where=file_of(group.key, suffix),
            )
    return {suffix: open_array(store, group.paths[suffix]) for suffix in suffixes}


def foreign(group: Group, suffix: str) -> UnsupportedError:
    """The refusal of a form that is recognised and not read."""
    return UnsupportedError(
        f"this tensor is stored as {group.foreign[suffix]}, which Ingot does not read: convert the original again, "
        "to 8, 4 or 3 bits",
        rule="npydir.form",
        where=f"{FOLDER}/{group.key}__{suffix.replace('.br', '.npy.br') if '.br' in suffix else suffix + '.npy'}",
    )


def _stem(name: str) -> tuple[str | None, str]:
    for compression in COMPRESSIONS:
        if name.endswith(f".npy{compression}"):
            return name.removesuffix(f".npy{compression}"), compression
    return None, ""
