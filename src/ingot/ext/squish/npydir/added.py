"""More forms of tensors that a Squish directory has already: arrays that join the others, and then their sentinel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ingot.ext.squish.npydir.format import NpydirFormat
from ingot.ext.squish.npydir.names import INT4_READY, MANIFEST, SIDECAR
from ingot.ext.squish.npydir.npy import encode as encode_header
from ingot.ext.squish.npydir.sidecar import Entry, Sidecar
from ingot.ext.squish.npydir.sidecar import encode as encode_sidecar
from ingot.ext.squish.npydir.writer import NpydirWriter, checked_arrays
from ingot.formats.base import Catalog, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.layouts.affine import AffineLayout
from ingot.model.store import Joined, Store


class AddedForms(NpydirFormat):
    """The arrays of four-bit forms beside those of a directory; a tensor is written as the matrix of its codes.

    Parameters
    ----------
    keys : mapping
        What the files of each tensor are named after.
    sidecar : Sidecar or None
        ``ingot.json`` as it is; it gets the digests of the new arrays. None where the directory has none.
    manifest : bytes
    directory : Store
        The directory as it is.
    """

    def __init__(self, keys: Mapping[str, str], sidecar: Sidecar | None, manifest: bytes, directory: Store) -> None:
        self.keys, self.sidecar, self.manifest, self.directory = keys, sidecar, manifest, directory

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Read the directory as it is once the arrays in ``store`` are in it; return the tensors of ``keys``.

        Each is returned as the matrix of its codes, as it is written.
        """
        catalog = super().read(Joined(store, self.directory), MANIFEST, verify=verify)
        tensors = {name: catalog.tensors[name] for name in self.keys}
        matrices = {
            name: replace(tensor, shape=AffineLayout.of(tensor).matrix_of(tensor.shape))
            for name, tensor in tensors.items()
        }
        return replace(catalog, tensors=matrices)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Bytes of the arrays, headers included."""
        arrays = checked_arrays(artifact.tensors)
        heads = sum(len(encode_header(array.dtype, array.shape)) for group in arrays.values() for array in group)
        return heads + sum(part.at_most for spec in artifact.tensors for part in spec.parts)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> AddedFormsWriter:
        """Start writing; ``finish`` names the arrays, then ``ingot.json``, last the sentinel."""
        return AddedFormsWriter(target, artifact, options, self)


class AddedFormsWriter(NpydirWriter):
    """A ``FormatWriter`` of arrays beside those that are there, and of what tells that they are complete."""

    shapes_too = False  # the shape lies beside the form that is there already

    def __init__(self, target: Target, artifact: Artifact, options: WriteOptions, format: AddedForms) -> None:
        super().__init__(target, artifact.tensors, {}, options)
        self._format = format

    def finish(self) -> list[str]:
        """Write ``ingot.json`` and the sentinel; return all names in the order in which they may appear."""
        self._order.finish()
        sidecar = self._format.sidecar
        if sidecar is not None:
            algorithm = sidecar.digest.partition(":")[0] if sidecar.digest else None
            tensors = {name: self._with_added(name, entry) for name, entry in sidecar.tensors.items()}
            more = replace(sidecar, tensors=tensors, digest=None)
            self._small(SIDECAR, encode_sidecar(more, self._format.manifest, algorithm))
        self._small(INT4_READY, b"")
        return self._files

    def _with_added(self, name: str, entry: Entry) -> Entry:
        added = self._entries.get(name)
        if added is None:
            return entry
        heads = {**entry.heads, **added.heads} if entry.heads else entry.heads
        return replace(entry, digests={**entry.digests, **added.digests}, heads=heads)

    def _key(self, name: str) -> str:
        return self._format.keys[name]


def changed_sidecar(sidecar: Sidecar, manifest: bytes, gone: Mapping[str, Sequence[str]]) -> bytes:
    """Return ``ingot.json`` without the arrays that are ``gone``: suffixes by tensor."""

    def remaining(name: str, entry: Entry) -> Entry:
        dropped = gone.get(name, ())
        digests = {suffix: text for suffix, text in entry.digests.items() if suffix not in dropped}
        heads = {suffix: text for suffix, text in entry.heads.items() if suffix not in dropped}
        return replace(entry, digests=digests, heads=heads)

    algorithm = sidecar.digest.partition(":")[0] if sidecar.digest else None
    tensors = {name: remaining(name, entry) for name, entry in sidecar.tensors.items()}
    return encode_sidecar(replace(sidecar, tensors=tensors, digest=None), manifest, algorithm)
