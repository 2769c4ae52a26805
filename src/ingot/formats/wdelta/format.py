"""``.wdelta`` as a ``Format``."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.formats.base import Catalog, WriteOptions
from ingot.formats.single import SingleFile
from ingot.formats.wdelta.carry import refusal
from ingot.formats.wdelta.layout import MAGIC
from ingot.formats.wdelta.reader import read_catalog
from ingot.formats.wdelta.writer import WdeltaWriter, file_size
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec

# deltatensors' callback for transformers leaves ``model.wdelta`` beside a whole checkpoint, which is the folder's.
_WEIGHTS = (".safetensors", ".zt", ".squizd", ".safetensors.index.json")


class WdeltaFormat(SingleFile):
    """Versions 1 and 2 of deltatensors' format: differences to a base, sparse, of one bit, or of four."""

    name = "wdelta"
    suffixes: tuple[str, ...] = (".wdelta",)
    summary = "differences to a base: sparse, 1 bit, 4 bit (deltatensors)"

    def claims(self, name: str, head: bytes) -> bool:
        """By magic, or by suffix: then ``read`` says what is wrong with the magic."""
        return head.startswith(MAGIC) or name.lower().endswith(self.suffixes)

    def entry(self, names: Sequence[str]) -> str | None:
        """As of any single file; none in a folder with whole weights."""
        return None if any(name.lower().endswith(_WEIGHTS) for name in names) else super().entry(names)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Everything but differences of the three codecs, uncompressed."""
        return refusal(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """By name: the peer reads the parent of a chain in that order, and version 2 hashes the base in it."""
        return sorted(range(len(specs)), key=lambda index: specs[index].name)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        """The digest at the end covers everything and is checked by whoever reads everything."""
        return read_catalog(source, name)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact.tensors, artifact.metadata)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> WdeltaWriter:
        return WdeltaWriter(target, name, artifact.tensors, artifact.metadata)
