"""The format of zTensor 1.2 (``.zt``): which tensors it can store, and its reader and writer."""

from __future__ import annotations

from ingot.core.bytes.packed import PACKED
from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.shared.single import SingleFile
from ingot.formats.zt.manifest import MAGIC, MAGIC_V0, MAGIC_V2
from ingot.formats.zt.reader import read_catalog, with_receipt
from ingot.formats.zt.specs import file_size, why_unsupported
from ingot.formats.zt.writer import ZtWriter
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec


class ZtFormat(SingleFile):
    """The format zTensor 1.2, which can store every codec, storage dtype and encoding of Ingot."""

    name = "zt"
    suffixes: tuple[str, ...] = (".zt",)
    summary = "zTensor 1.2: all codecs, zstd, digests, one file"
    traits = FormatTraits(
        digests=True,
        encodings=("zstd", PACKED),
        containers={"1": "zt", "2": "zt2"},
        keeps_attributes=True,
        carries_receipt=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file has the magic of version 0 or 1, or has the suffix but not the magic of version 2.

        If a file with the suffix has an unknown magic, ``read`` reports the error.
        """
        return head[:8] in (MAGIC, MAGIC_V0) or (head[:8] != MAGIC_V2 and name.lower().endswith(self.suffixes))

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        return why_unsupported(spec)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        return read_catalog(source, name, verify=verify)

    def with_receipt(self, source: ByteSource, text: str) -> tuple[int, bytes]:
        return with_receipt(source, text)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact.tensors, artifact.metadata, options.digest)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> ZtWriter:
        """Return a writer; ``options.max_shard`` is ignored, because a ``.zt`` is one file."""
        return ZtWriter(
            target.create(name), artifact.tensors, metadata=artifact.metadata, digest=options.digest, name=name
        )
