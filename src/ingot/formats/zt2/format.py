"""Containers of version 2 as a ``Format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ingot.core.encodings import SEEKABLE
from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.single import BySuffix
from ingot.formats.zt2.layout import FOOTER, MAGIC
from ingot.formats.zt2.manifest import stated
from ingot.formats.zt2.overlay import Base, read_base
from ingot.formats.zt2.reader import catalog_of, read_manifest
from ingot.formats.zt2.rules import check_names
from ingot.formats.zt2.sharded import Zt2ShardsWriter, size_of, split
from ingot.formats.zt2.shards import SUFFIX, check_shards, open_shards
from ingot.formats.zt2.specs import ALGORITHMS, refusal
from ingot.formats.zt2.writer import Zt2Writer
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.ranges import read_bytes
from ingot.model.spec import TensorSpec
from ingot.model.store import Joined, Store


class Zt2Format(BySuffix):
    """zTensor container version 2, of which every layout profile is read: one file, its shards, or an overlay."""

    name = "zt2"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "zTensor container 2: all codecs, page alignment, shards, overlays, xxh3"
    traits = FormatTraits(
        digests=True,
        shards=True,
        shards_on_request=True,
        encodings=(SEEKABLE,),
        containers={"1": "zt", "2": "zt2"},
        keeps_attributes=True,
        deduplicates=True,
        looks_inside=True,
        overlays=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """By magic: version 1 has the same suffix."""
        return head.startswith(MAGIC)

    def entry(self, names: Sequence[str]) -> str | None:
        """``model.zt``, or the only file with the suffix that is not called like a shard of another one."""
        stems = {name[: -len(SUFFIX)] for name in names if name.lower().endswith(SUFFIX)}
        own = [name for name in names if not any(name.startswith(f"{stem}-") for stem in stems)]
        return super().entry(own)

    def confirms(self, store: Store) -> bool:
        """Whether the folder's entry begins as this container does; version 1 has the same names."""
        entry = self.entry(store.names())
        return entry is not None and self.claims(entry, store.head(entry, len(MAGIC)))

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the file's manifest and find its shards; what cannot be read is closed."""
        with ExitStack() as opened:
            source = store.open(name)
            opened.callback(source.close)
            data, manifest = read_manifest(source)
            sources: dict[str | None, ByteSource] = {None: source}
            headers = {name: data}
            others: dict[str, ByteSource] = {}
            for shard, file, other in open_shards(store, name, manifest):
                opened.callback(other.close)
                sources[shard] = others[shard] = other
                headers[file] = read_bytes(other, other.size - FOOTER, FOOTER)
            catalog = catalog_of(manifest, headers, sources, verify=verify)
            catalog.check_files = partial(check_shards, name, stated(manifest.shards) or {}, others)
            opened.pop_all()
            return catalog

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Any metadata whose names the container takes; raises ``FormatError`` ``zt2.name``."""
        check_names("metadata", values)
        return values

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why a reader would not find the tensor again; None if it would."""
        return refusal(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """By the bytes of names, as the canonical form has it."""
        names = [spec.name for spec in specs]
        return sorted(range(len(names)), key=lambda index: names[index].encode(errors="surrogatepass"))

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Bytes of the files; fewer where parts turn out to be equal."""
        return size_of(artifact, split(artifact.tensors, options.max_shard), options.digest)

    def overlay(self, store: Store, name: str, target: str, digest: str | None) -> Zt2Overlay:
        """Return the format of files called ``target`` that refer to the parts of the file ``name``.

        ``digest`` is the kind that tells the base from another: it is computed when an overlay is written. Errors as of
        ``read``.
        """
        return Zt2Overlay(read_base(store, name, target, ALGORITHMS[digest] or "xxh3"))

    def writer(
        self, target: Target, name: str, artifact: Artifact, options: WriteOptions
    ) -> Zt2Writer | Zt2ShardsWriter:
        """Start writing the canonical form, in shards where one file would be too large."""
        members = split(artifact.tensors, options.max_shard)
        if len(members) > 1:
            return Zt2ShardsWriter(target, name, members, artifact.metadata, options.digest)
        return Zt2Writer(
            target.create(name), artifact.tensors, metadata=artifact.metadata, digest=options.digest, name=name
        )


@dataclass(frozen=True)
class Zt2Overlay(Zt2Format):
    """Container version 2 over a base: what the base has is named there."""

    base: Base

    def base_identity(self) -> str:
        """Return what tells the base from another: the checksum of its manifest, and what that says of other files."""
        return self.base.identity

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Read an overlay; the base's files are found even if the overlay is not yet in their folder."""
        return super().read(Joined(store, self.base.store), name, verify=verify)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> Zt2Writer:
        """Start writing one file, beside which the base's files are looked for."""
        sink, base = target.create(name), self.base.open()
        specs, metadata = artifact.tensors, artifact.metadata
        return Zt2Writer(sink, specs, metadata=metadata, digest=options.digest, name=name, base=base)
