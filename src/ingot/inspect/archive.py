"""The description of an archive: its files, repeated content, and the saved bytes (``spec/archives.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.artifacts.archive_store import ArchiveObjects, ArchiveStore
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Count, Ratio, Table, count_text, data_of, size_text, table_of, text_of

_HEADS = {
    "name": "file",
    "size": "size",
    "stored": "stored",
    "duplicate_bytes": "stored before",
    "external_bytes": "of the base",
}


@dataclass(frozen=True, slots=True)
class ArchivedFileInfo:
    """A file of an archive.

    ``size`` is its size in bytes. ``duplicate_bytes`` of these occur earlier in the archive, and ``external_bytes``
    occur in the base. ``stored`` is the number of bytes that the archive needs for all other bytes of the file.
    """

    name: str
    size: Bytes
    stored: Bytes
    duplicate_bytes: Bytes
    external_bytes: Bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """The description of an archive. It takes ``stored`` bytes, and its files together have ``size`` bytes.

    ``saved`` is the share of ``size`` that is saved. ``objects`` is the number of stored objects, of which
    ``differences`` are stored as a difference to another object. ``base`` is the name of the model that is needed to
    read the archive; empty if no model is needed.
    """

    folder: bool
    size: Bytes
    stored: Bytes
    saved: Ratio
    objects: Count
    differences: Count
    duplicate_bytes: Bytes
    external_bytes: Bytes
    base: str
    files: Sequence[ArchivedFileInfo]

    def data(self) -> dict[str, Any]:
        """Return the description for JSON."""
        return {**data_of(self), "files": [data_of(item) for item in self.files]}

    def texts(self) -> list[str]:
        """Return lines of text about the archive."""
        saved = text_of(self.saved, "ratio")
        files = count_text(len(self.files), "file")
        lines = [f"archive of {files} of {size_text(self.size)}, stored in {size_text(self.stored)}, {saved} off"]
        if self.duplicate_bytes:
            lines.append(f"{size_text(self.duplicate_bytes)} of them occur again and are stored once")
        if self.differences:
            lines.append(f"{count_text(self.differences, 'tensor')} stored as differences to other versions")
        if self.base:
            lines.append(
                f"{size_text(self.external_bytes)} of them are in the base, which reading needs: {self.base[:200]}"
            )
        return lines

    def table(self) -> Table:
        """Return the files as a table to show; columns with only zeros are left out."""
        heads = {name: head for name, head in _HEADS.items() if any(getattr(file, name) for file in self.files)}
        return replace(table_of("archived_files", self.files, ArchivedFileInfo, heads), data=False)


def describe_archive(store: Store) -> ArchiveInfo | None:
    """Return the description of an archive from its manifest and its layout; None if ``store`` is not an archive's
    root.

    Raises ``FormatError`` and ``IntegrityError`` ``archive.object``.
    """
    if not isinstance(store, ArchiveStore) or store.is_folder_inside:
        return None
    objects = store.objects
    layout = objects.layout
    files = list(_files(objects))
    size = layout.size
    stored = objects.source.size
    return ArchiveInfo(
        folder=layout.folder,
        size=size,
        stored=stored,
        saved=1 - stored / size if size else 0.0,
        objects=len(layout.objects),
        differences=len(layout.bases),
        duplicate_bytes=sum(file.duplicate_bytes for file in files),
        external_bytes=sum(file.external_bytes for file in files),
        base=layout.against if layout.external else "",
        files=files,
    )


def _files(objects: ArchiveObjects) -> Iterator[ArchivedFileInfo]:
    """Yield the files of an archive. The stored bytes of an object count for the first file that contains it."""
    ends: dict[int, int] = {}  # the end of the bytes of each object that earlier spans have
    count = len(objects.layout.objects)
    for file in objects.layout.files:
        stored = 0.0
        duplicate = 0
        external = 0
        for span in file.spans:
            if span.object >= count:
                external += span.size
                continue
            end = ends.get(span.object, 0)
            new = max(0, span.offset + span.size - max(end, span.offset))
            ends[span.object] = max(end, span.offset + span.size)
            duplicate += span.size - new
            stored += new * objects.ratio(span.object)
        yield ArchivedFileInfo(file.name, file.size, round(stored), duplicate, external, file.sha256)
