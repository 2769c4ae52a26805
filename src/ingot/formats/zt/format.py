"""``.zt`` as a ``Format``."""

from __future__ import annotations

from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.single import SingleFile
from ingot.formats.zt.layout import MAGIC, MAGIC_V0, MAGIC_V2
from ingot.formats.zt.reader import read_catalog, with_receipt
from ingot.formats.zt.specs import file_size, refusal
from ingot.formats.zt.writer import ZtWriter
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec


class ZtFormat(SingleFile):
    """zTensor 1.2: carries every codec, storage dtype and encoding that Ingot has. Stateless."""

    name = "zt"
    suffixes: tuple[str, ...] = (".zt",)
    summary = "zTensor 1.2: all codecs, zstd, digests, one file"
    traits = FormatTraits(
        digests=True,
        encodings=("zstd",),
        containers={"1": "zt", "2": "zt2"},
        keeps_attributes=True,
        carries_receipt=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """By magic, or by suffix where the magic is not container version 2's: then ``read`` says what is wrong."""
        return head[:8] in (MAGIC, MAGIC_V0) or (head[:8] != MAGIC_V2 and name.lower().endswith(self.suffixes))

    def refuses(self, spec: TensorSpec) -> str | None:
        return refusal(spec)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        return read_catalog(source, name, verify=verify)

    def with_receipt(self, source: ByteSource, text: str) -> tuple[int, bytes]:
        return with_receipt(source, text)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact.tensors, artifact.metadata, options.digest)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> ZtWriter:
        """Start writing; ``options.max_shard`` has no meaning here, a ``.zt`` is one file."""
        return ZtWriter(
            target.create(name), artifact.tensors, metadata=artifact.metadata, digest=options.digest, name=name
        )
