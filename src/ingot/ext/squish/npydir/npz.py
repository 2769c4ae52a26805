"""Read ``.npz`` archives: arrays of ``numpy.savez``, or a Squish directory in an archive with a separate manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.core.files.archive import Archive
from ingot.core.files.archive_members import Member
from ingot.errors import FormatError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.names import FOLDER, MANIFEST, READ_SUFFIXES, READY
from ingot.ext.squish.npydir.reader import read_catalog
from ingot.formats.base import Catalog, ReadOnlyFormat
from ingot.model.bytesource import ByteSource, MemorySource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.store import Listing, Store
from ingot.model.tensor import Tensor

SUFFIX = ".npz"
_MAGIC = b"PK\x03\x04"
_ARRAY = ".npy"
_PREAMBLE = 12
_SQUISH = tuple(f"__{suffix}" for suffix in READ_SUFFIXES)
_WHY = (
    "Ingot only reads .npz, which is slow to write and cannot be mapped: write safetensors, or a Squish directory "
    "(--format npydir)"
)


def manifest_names(name: str) -> tuple[str, str]:
    """Return the possible names of the manifest of archive ``X.npz``: ``X_manifest.json``, and ``X``.

    squish writes the second one if its output option was ``X`` without a suffix.
    """
    stem = name[: -len(SUFFIX)]
    return f"{stem}_{MANIFEST}", stem


class NpzFormat(ReadOnlyFormat):
    """Format of arrays in a zip archive of ``numpy.savez``; with a manifest, they form a Squish directory."""

    name = "npz"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "arrays of numpy.savez, or squish's older container: .npz and a separate manifest; read only"
    why_read_only = _WHY
    read_only_rule = "npz.read-only"

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file is a zip archive with the suffix ``.npz``."""
        return name.lower().endswith(SUFFIX) and head.startswith(_MAGIC)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the first ``.npz`` file with a manifest in the folder; None if there is none."""
        return next((name for name in names if name.endswith(SUFFIX) and set(manifest_names(name)) & set(names)), None)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the archive's tensors, after a check of its directory, its manifest and the header of every array.

        Raises ``FormatError`` ``npz.manifest``, and errors with the rules of spec/npydir.md and ``archive.*``.
        """
        manifest = next((candidate for candidate in manifest_names(name) if store.exists(candidate)), None)
        source = store.open(name)
        try:
            if manifest is None:
                return _plain_catalog(source, name)
            catalog = read_catalog(_Members(store, source, manifest), verify=verify)
        except BaseException:
            source.close()
            raise
        heads = b"".join(head for key, head in sorted(catalog.headers.items()) if key != MANIFEST)
        headers = {name: heads, manifest: catalog.headers[MANIFEST]}
        return replace(catalog, headers=headers, sources=(*catalog.sources, source), notes=catalog.notes)


def _plain_catalog(source: ByteSource, name: str) -> Catalog:
    """Return the arrays of ``numpy.savez`` or ``numpy.savez_compressed``, each a tensor of its name.

    Raises
    ------
    FormatError
        ``npz.manifest``: arrays of squish without their manifest; ``npz.member``: a member that is no array;
        ``archive.*``, and the rules of ``.npy`` headers, such as ``npydir.npy-object`` for Python objects.
    UnsupportedError
        ``npydir.npy-dtype``
    """
    archive = Archive(source.readinto, source.size)
    entries = [entry for entry in archive.entries() if not entry.is_folder]
    if any(entry.name.removesuffix(_ARRAY).endswith(_SQUISH) for entry in entries):
        raise FormatError(
            "npz.manifest",
            f"expected the manifest {manifest_names(name)[0]} in the same folder, which describes the arrays, but it "
            "does not exist",
            where=name,
        )
    tensors: dict[str, Tensor] = {}
    heads = []
    for entry in entries:
        location = f"{name}: {entry.name[:200]}"
        tensor_name = entry.name.removesuffix(_ARRAY)
        if not entry.name.endswith(_ARRAY) or not tensor_name:
            raise FormatError("npz.member", "expected arrays whose names end in .npy", where=location)
        member = Member(archive, entry, location)
        first_bytes = bytes(member.view(0, min(member.size, npy.MAX_HEADER + _PREAMBLE)))
        head = first_bytes[: npy.header_span(first_bytes[:_PREAMBLE], location)]
        header = npy.parse(head, location)
        npy.check_size(header, member.size, location)
        part = Part(header.dtype, header.nbytes, member, header.offset, where=f"{location}: {DATA}")
        tensors[tensor_name] = Tensor(tensor_name, header.shape, header.dtype, DenseLayout.codec, {DATA: part})
        heads.append(entry.name.encode() + head)
    if not tensors:
        raise FormatError("npz.member", "expected arrays, found an empty archive", where=name)
    return Catalog(tensors, headers={name: b"".join(heads)}, sources=(source,))


class _Members(Store):
    """Store that presents an archive and its manifest as a Squish directory."""

    def __init__(self, store: Store, source: ByteSource, manifest: str) -> None:
        self._store = store
        self._manifest = manifest
        self.location = store.location
        self._archive = Archive(source.readinto, source.size)
        self._entries = {entry.name: entry for entry in self._archive.entries() if not entry.is_folder}

    def list(self, folder: str = "") -> Listing:
        """Return the names in a folder of the directory; the sentinel is always included, because an archive is
        complete."""
        if not folder:
            return Listing((MANIFEST,), (FOLDER,))
        ready = READY.removeprefix(f"{FOLDER}/")
        return Listing(tuple(sorted((ready, *self._entries)))) if folder == FOLDER else Listing()

    def open(self, name: str) -> ByteSource:
        """Open the manifest's file, the empty sentinel, or an array in the archive."""
        if name == MANIFEST:
            return self._store.open(self._manifest)
        if name == READY:
            return MemorySource(b"", name)
        entry = self._entries[name.removeprefix(f"{FOLDER}/")]
        return Member(self._archive, entry, name)
