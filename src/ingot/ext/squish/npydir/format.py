"""The format of Squish directories: which tensors they can store, and their reader and writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.ext.squish.npydir.carry import why_unsupported
from ingot.ext.squish.npydir.names import BF16_TIER, FOLDER, MANIFEST, READY, require_distinct
from ingot.ext.squish.npydir.reader import read_catalog
from ingot.ext.squish.npydir.sidecar import json_metadata
from ingot.ext.squish.npydir.writer import NpydirWriter, directory_size
from ingot.ext.squish.tiers.table import FOUR_BIT, THREE_BIT
from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store


class NpydirFormat(Format):
    """Format of a directory of ``.npy`` files and a manifest, as squish writes it; the artifact is the directory."""

    name = "npydir"
    suffixes: tuple[str, ...] = ()
    summary = "a Squish directory: one .npy file per array; 8, 4 and 3 bits, dense tensors"
    traits = FormatTraits(
        digests=True,
        folder=True,
        tiers=(BF16_TIER,),
    )

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether a file that is not empty has the name of the manifest."""
        return name == MANIFEST and bool(head)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the name of the manifest if the folder contains it and files in ``tensors/``; otherwise None."""
        return MANIFEST if MANIFEST in names and any(name.startswith(f"{FOLDER}/") for name in names) else None

    def has_sentinel(self, store: Store) -> bool:
        """Return whether ``tensors/.manifest_ready`` exists, the file that is written last."""
        return store.exists(READY)

    def fallback_folder(self, store: Store) -> str | None:
        """Return the folder of a complete packed tier, preferably with 4 bits; None if there is no such tier."""
        folders = store.folders()
        for tier in (FOUR_BIT, THREE_BIT):
            if tier.path in folders and any(store.exists(mark) for mark in tier.marks):
                return tier.path
        return None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return the reason why a Squish directory cannot store the tensor; None if it can."""
        return why_unsupported(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order of ``specs`` unchanged, because the format stores tensors in any order.

        Raises ``UnsupportedError`` ``npydir.collision`` for names that result in the same file names.
        """
        require_distinct(spec.name for spec in specs)
        return range(len(specs))

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the manifest, ``ingot.json`` and the header of every array; return the tensors.

        Raises ``FormatError``, ``IntegrityError`` and ``UnsupportedError`` with the rules of spec/npydir.md.
        """
        return read_catalog(store, verify=verify)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metadata that JSON can store.

        If decoding the JSON text of a value gives another value, the text replaces the value.
        """
        return json_metadata(values)

    def file_name(self, stem: str) -> str:
        """Return the name of the manifest, which does not depend on the stem."""
        return MANIFEST

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact total size of all files in bytes, manifest and sentinels included."""
        return directory_size(artifact.tensors, artifact.metadata, options.digest)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> NpydirWriter:
        """Return a writer of the directory ``target``.

        It writes the arrays to the folder ``tensors/`` in it, then the manifest, ``ingot.json`` and the sentinels.
        """
        return NpydirWriter(target, artifact.tensors, artifact.metadata, options)
