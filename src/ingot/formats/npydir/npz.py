"""squish's older container: the arrays of a Squish directory in one ``.npz``, with its manifest beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ingot.core.archive import Archive
from ingot.core.archive_members import Member
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog, Format, WriteOptions
from ingot.formats.npydir.names import FOLDER, MANIFEST, READY
from ingot.formats.npydir.reader import read_catalog
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, MemorySource, Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Listing, Store

SUFFIX = ".npz"
_MAGIC = b"PK\x03\x04"
_WHY = "squish's .npz is only read: it is slow to write and cannot be mapped; make a directory (--format npydir)"


def manifests_of(name: str) -> tuple[str, str]:
    """Return what the manifest of an archive is called: beside ``X.npz``, or where squish was told ``X`` alone."""
    stem = name[: -len(SUFFIX)]
    return f"{stem}_{MANIFEST}", stem


class NpzFormat(Format):
    """The arrays of a Squish directory as members of a zip archive that ``numpy.savez_compressed`` wrote."""

    name = "npz"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "squish's older container: .npz with its manifest beside it; read only"

    def claims(self, name: str, head: bytes) -> bool:
        """By the suffix, of a zip archive."""
        return name.lower().endswith(SUFFIX) and head.startswith(_MAGIC)

    def entry(self, names: Sequence[str]) -> str | None:
        """The archive whose manifest lies beside it."""
        return next((name for name in names if name.endswith(SUFFIX) and set(manifests_of(name)) & set(names)), None)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Everything: there is no writer."""
        return _WHY

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the archive's directory, the manifest and the header of every array.

        Raises ``FormatError`` ``npz.manifest``, and with the rules of spec/npydir.md and ``archive.*``.
        """
        manifest = next((other for other in manifests_of(name) if store.exists(other)), None)
        if manifest is None:
            raise FormatError(
                "npz.manifest",
                f"expected the manifest {manifests_of(name)[0]} beside it, as squish writes it, found none; arrays of "
                "other programs: load them with numpy.load and save them with ingot.save",
                where=name,
            )
        source = store.open(name)
        try:
            catalog = read_catalog(_Members(store, source, manifest), verify=verify)
        except BaseException:
            source.close()
            raise
        heads = b"".join(head for key, head in sorted(catalog.headers.items()) if key != MANIFEST)
        headers = {name: heads, manifest: catalog.headers[MANIFEST]}
        return replace(catalog, headers=headers, sources=(*catalog.sources, source), notes=catalog.notes)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """There is no place for metadata."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Nothing is written: raises ``UnsupportedError`` ``npz.read-only``."""
        _refuse()

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> NoReturn:
        """Raise ``UnsupportedError`` ``npz.read-only``."""
        _refuse()


def _refuse() -> NoReturn:
    raise UnsupportedError(_WHY, rule="npz.read-only")


class _Members(Store):
    """An archive and its manifest as the Squish directory that they stand for."""

    def __init__(self, store: Store, source: ByteSource, manifest: str) -> None:
        self._store, self._manifest = store, manifest
        self.location = store.location
        self._archive = Archive(source.readinto, source.size)
        self._entries = {entry.name: entry for entry in self._archive.entries() if not entry.is_folder}

    def list(self, folder: str = "") -> Listing:
        """The manifest and the folder of arrays; the archive is complete, so it is marked as such."""
        if not folder:
            return Listing((MANIFEST,), (FOLDER,))
        ready = READY.removeprefix(f"{FOLDER}/")
        return Listing(tuple(sorted((ready, *self._entries)))) if folder == FOLDER else Listing()

    def open(self, name: str) -> ByteSource:
        """The manifest's file, or an array in the archive."""
        if name == MANIFEST:
            return self._store.open(self._manifest)
        if name == READY:
            return MemorySource(b"", name)
        entry = self._entries[name.removeprefix(f"{FOLDER}/")]
        return Member(self._archive, entry, name)
