"""Write four-bit arrays into a Squish directory that already has the same tensors in another storage form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ingot.ext.squish.npydir.format import NpydirFormat
from ingot.ext.squish.npydir.names import INT4_READY, MANIFEST, SIDECAR
from ingot.ext.squish.npydir.npy import encode as encode_header
from ingot.ext.squish.npydir.sidecar import Entry, Sidecar
from ingot.ext.squish.npydir.sidecar import encode as encode_sidecar
from ingot.ext.squish.npydir.writer import NpydirWriter, arrays_by_tensor
from ingot.formats.base import Catalog, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.layouts.affine import AffineLayout
from ingot.model.store import MergedStore, Store


class AddedForms(NpydirFormat):
    """Format that adds four-bit arrays to an existing Squish directory.

    It writes each tensor with the shape of the matrix of its codes.

    Parameters
    ----------
    keys : mapping
        Safe key of each tensor name; the tensor's files are named after it.
    sidecar : Sidecar or None
        Parsed ``ingot.json`` of the directory; the digests of the new arrays are added to it. None if the directory has
        no such file.
    manifest : bytes
        Contents of ``manifest.json``.
    directory : Store
        The directory before the arrays are added.
    """

    def __init__(self, keys: Mapping[str, str], sidecar: Sidecar | None, manifest: bytes, directory: Store) -> None:
        self.keys = keys
        self.sidecar = sidecar
        self.manifest = manifest
        self.directory = directory

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the tensors named in ``keys``, read from the directory together with the new arrays in ``store``.

        Each tensor has the shape of the matrix of its codes, as it was written.
        """
        catalog = super().read(MergedStore(store, self.directory), MANIFEST, verify=verify)
        tensors = {name: catalog.tensors[name] for name in self.keys}
        matrices = {
            name: replace(tensor, shape=AffineLayout.from_tensor(tensor).matrix_of(tensor.shape))
            for name, tensor in tensors.items()
        }
        return replace(catalog, tensors=matrices)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the total size of the new arrays in bytes, headers included."""
        arrays = arrays_by_tensor(artifact.tensors)
        heads = sum(len(encode_header(array.dtype, array.shape)) for group in arrays.values() for array in group)
        return heads + sum(part.at_most for spec in artifact.tensors for part in spec.parts)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> AddedFormsWriter:
        """Return a writer of the arrays.

        Its ``finish`` returns the names of the arrays, of ``ingot.json`` and of the sentinel, in this order.
        """
        return AddedFormsWriter(target, artifact, options, self)


class AddedFormsWriter(NpydirWriter):
    """Writer of the added arrays, of the updated ``ingot.json`` and of the sentinel that marks the arrays as
    complete."""

    writes_shapes = False  # the directory already has an array of the original shape

    def __init__(self, target: Target, artifact: Artifact, options: WriteOptions, format: AddedForms) -> None:
        super().__init__(target, artifact.tensors, {}, options)
        self._format = format

    def finish(self) -> list[str]:
        """Write ``ingot.json`` and the sentinel; return all file names.

        The files must be renamed to their final names in this order.
        """
        self._order.finish()
        sidecar = self._format.sidecar
        if sidecar is not None:
            algorithm = sidecar.digest.partition(":")[0] if sidecar.digest else None
            tensors = {name: self._with_added(name, entry) for name, entry in sidecar.tensors.items()}
            updated = replace(sidecar, tensors=tensors, digest=None)
            self._write_file(SIDECAR, encode_sidecar(updated, self._format.manifest, algorithm))
        self._write_file(INT4_READY, b"")
        return self._files

    def _with_added(self, name: str, entry: Entry) -> Entry:
        added = self._entries.get(name)
        if added is None:
            return entry
        heads = {**entry.heads, **added.heads} if entry.heads else entry.heads
        return replace(entry, digests={**entry.digests, **added.digests}, heads=heads)

    def _key(self, name: str) -> str:
        return self._format.keys[name]


def encode_sidecar_without(sidecar: Sidecar, manifest: bytes, deleted: Mapping[str, Sequence[str]]) -> bytes:
    """Return the bytes of ``ingot.json`` without the entries of deleted arrays.

    Parameters
    ----------
    sidecar : Sidecar
        Parsed ``ingot.json`` before the change.
    manifest : bytes
        Contents of ``manifest.json``; the digest in ``ingot.json`` covers them.
    deleted : mapping
        Suffixes of the deleted arrays by tensor name.
    """

    def remaining(name: str, entry: Entry) -> Entry:
        dropped = deleted.get(name, ())
        digests = {suffix: text for suffix, text in entry.digests.items() if suffix not in dropped}
        heads = {suffix: text for suffix, text in entry.heads.items() if suffix not in dropped}
        return replace(entry, digests=digests, heads=heads)

    algorithm = sidecar.digest.partition(":")[0] if sidecar.digest else None
    tensors = {name: remaining(name, entry) for name, entry in sidecar.tensors.items()}
    return encode_sidecar(replace(sidecar, tensors=tensors, digest=None), manifest, algorithm)
