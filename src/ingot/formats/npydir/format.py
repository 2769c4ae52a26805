"""Squish directories as a ``Format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.formats.npydir.carry import refusal
from ingot.formats.npydir.names import BF16_TIER, FOLDER, MANIFEST, READY, require_distinct
from ingot.formats.npydir.reader import read_catalog
from ingot.formats.npydir.sidecar import json_metadata
from ingot.formats.npydir.writer import NpydirWriter, directory_size
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store


class NpydirFormat(Format):
    """A directory of ``.npy`` files under a manifest, as squish writes them; the directory itself is the artifact."""

    name = "npydir"
    suffixes: tuple[str, ...] = ()
    summary = "a Squish directory: one .npy file per array; 8, 4 and 3 bits, dense tensors"
    traits = FormatTraits(
        digests=True,
        folder=True,
        tiers=(BF16_TIER,),
    )

    def claims(self, name: str, head: bytes) -> bool:
        """By the manifest's name."""
        return name == MANIFEST and bool(head)

    def entry(self, names: Sequence[str]) -> str | None:
        """The manifest, where there is a folder ``tensors/`` beside it."""
        return MANIFEST if MANIFEST in names and any(name.startswith(f"{FOLDER}/") for name in names) else None

    def has_sentinel(self, store: Store) -> bool:
        """Whether ``tensors/.manifest_ready``, which is written last, is there."""
        return store.exists(READY)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Why a Squish directory cannot carry the tensor; None if it can."""
        return refusal(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Any order will do; raises ``UnsupportedError`` ``npydir.collision`` for names that make the same files."""
        require_distinct(spec.name for spec in specs)
        return range(len(specs))

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate manifest, ``ingot.json`` and the header of every array."""
        return read_catalog(store, verify=verify)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``ingot.json`` holds JSON: any other value is carried as its JSON text."""
        return json_metadata(values)

    def file_name(self, stem: str) -> str:
        """The manifest, whatever the stem."""
        return MANIFEST

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files, manifest and sentinels included."""
        return directory_size(artifact.tensors, artifact.metadata, options.digest)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> NpydirWriter:
        """Start writing; files appear below the target as ``tensors/...``."""
        return NpydirWriter(target, artifact.tensors, artifact.metadata, options)
