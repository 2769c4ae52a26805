"""The format of zTensor's container version 2 (``.zt``): which tensors it can store, and its reader and writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ingot.core.bytes.encodings import SEEKABLE
from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.shared.single import BySuffix
from ingot.formats.zt2.layout import FOOTER, MAGIC
from ingot.formats.zt2.manifest import optional_value
from ingot.formats.zt2.overlay import Base, read_base
from ingot.formats.zt2.reader import catalog_of, read_manifest
from ingot.formats.zt2.rules import check_names
from ingot.formats.zt2.sharded import Zt2ShardsWriter, size_of, split
from ingot.formats.zt2.shards import SUFFIX, check_shards, open_shards
from ingot.formats.zt2.specs import ALGORITHMS, why_unsupported
from ingot.formats.zt2.writer import Zt2Writer
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.reading.ranges import read_bytes
from ingot.model.spec import TensorSpec
from ingot.model.store import MergedStore, Store


class Zt2Format(BySuffix):
    """The format zTensor container version 2: one file, its shards, or an overlay. All layout profiles can be read."""

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
        """Return whether the magic fits; the suffix does not suffice, because version 1 has the same suffix."""
        return head.startswith(MAGIC)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``model.zt``, or the only file with the suffix whose name is not the name of another file's shard."""
        stems = {name[: -len(SUFFIX)] for name in names if name.lower().endswith(SUFFIX)}
        candidates = [name for name in names if not any(name.startswith(f"{stem}-") for stem in stems)]
        return super().entry(candidates)

    def confirms(self, store: Store) -> bool:
        """Return whether the folder's entry begins with this container's magic; version 1 has the same names."""
        entry = self.entry(store.names())
        return entry is not None and self.claims(entry, store.head(entry, len(MAGIC)))

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the file and its shards; if they are invalid, the files are closed."""
        with ExitStack() as opened:
            source = store.open(name)
            opened.callback(source.close)
            data, manifest = read_manifest(source)
            sources: dict[str | None, ByteSource] = {None: source}
            headers = {name: data}
            shard_sources: dict[str, ByteSource] = {}
            for shard, file, shard_source in open_shards(store, name, manifest):
                opened.callback(shard_source.close)
                sources[shard] = shard_sources[shard] = shard_source
                headers[file] = read_bytes(shard_source, shard_source.size - FOOTER, FOOTER)
            catalog = catalog_of(manifest, headers, sources, verify=verify)
            catalog.check_files = partial(check_shards, name, optional_value(manifest.shards) or {}, shard_sources)
            opened.pop_all()
            return catalog

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata unchanged; raises ``FormatError`` ``zt2.name`` for names that the container cannot
        store."""
        check_names("metadata", values)
        return values

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a reader would not get the same tensor back; None if it would."""
        return why_unsupported(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the tensors' order by their names as UTF-8 bytes, which the canonical form requires."""
        names = [spec.name for spec in specs]
        return sorted(range(len(names)), key=lambda index: names[index].encode(errors="surrogatepass"))

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the number of bytes of the files; an upper limit if some parts are equal."""
        return size_of(artifact, split(artifact.tensors, options.max_shard), options.digest)

    def overlay(self, store: Store, name: str, target: str, digest: str | None) -> Zt2Overlay:
        """Return the format of files called ``target`` that refer to the parts of the file ``name``.

        ``digest`` is the digest algorithm that identifies the base; the digest is computed when an overlay is written.
        Raises the errors of ``read``.
        """
        return Zt2Overlay(read_base(store, name, target, ALGORITHMS[digest] or "xxh3"))

    def writer(
        self, target: Target, name: str, artifact: Artifact, options: WriteOptions
    ) -> Zt2Writer | Zt2ShardsWriter:
        """Return a writer of the canonical form, in shards if the artifact exceeds the size of one."""
        members = split(artifact.tensors, options.max_shard)
        if len(members) > 1:
            return Zt2ShardsWriter(target, name, members, artifact.metadata, options.digest)
        return Zt2Writer(
            target.create(name), artifact.tensors, metadata=artifact.metadata, digest=options.digest, name=name
        )


@dataclass(frozen=True)
class Zt2Overlay(Zt2Format):
    """The format of overlays: parts that the base contains are referred to instead of stored."""

    base: Base

    def base_identity(self) -> str:
        """Return the identity of the base: the checksum of its manifest, and the digests of its shards."""
        return self.base.identity

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of an overlay; the base's files are found even if the overlay is not yet in their
        folder."""
        return super().read(MergedStore(store, self.base.store), name, verify=verify)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> Zt2Writer:
        """Return a writer of one file; readers look for the base's files in its folder."""
        sink = target.create(name)
        base = self.base.open()
        specs = artifact.tensors
        metadata = artifact.metadata
        return Zt2Writer(sink, specs, metadata=metadata, digest=options.digest, name=name, base=base)
