"""The format ``.wdelta``."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.formats.base import Catalog, WriteOptions
from ingot.formats.shared.single import SingleFile
from ingot.formats.wdelta.carry import why_unsupported
from ingot.formats.wdelta.layout import MAGIC
from ingot.formats.wdelta.reader import read_catalog
from ingot.formats.wdelta.writer import WdeltaWriter, file_size
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec

# deltatensors' callback for transformers writes ``model.wdelta`` next to a full checkpoint, which then takes
# precedence.
_WEIGHTS = (".safetensors", ".zt", ".squizd", ".safetensors.index.json")


class WdeltaFormat(SingleFile):
    """The format of deltatensors, versions 1 and 2: sparse, 1-bit or 4-bit differences to a base."""

    name = "wdelta"
    suffixes: tuple[str, ...] = (".wdelta",)
    summary = "differences to a base: sparse, 1 bit, 4 bit (deltatensors)"

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the magic or the suffix fits; with another magic, ``read`` reports the error."""
        return head.startswith(MAGIC) or name.lower().endswith(self.suffixes)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file to open, like any format of one file; None in a folder with full weights."""
        return None if any(name.lower().endswith(_WEIGHTS) for name in names) else super().entry(names)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be stored; only uncompressed differences of the three codecs can."""
        return why_unsupported(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order by name, in which deltatensors reads the parent of a chain, and version 2 hashes the
        base."""
        return sorted(range(len(specs)), key=lambda index: specs[index].name)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        """Return the catalog; its ``check_whole`` verifies the digest of the complete file."""
        return read_catalog(source, name)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact.tensors, artifact.metadata)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> WdeltaWriter:
        return WdeltaWriter(target, name, artifact.tensors, artifact.metadata)
