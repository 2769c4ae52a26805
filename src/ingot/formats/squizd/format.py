"""``.squizd`` as a ``Format``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.single import SingleFile
from ingot.formats.squizd.carry import compacted, refusal, undescribed
from ingot.formats.squizd.layout import MAGIC
from ingot.formats.squizd.place import order
from ingot.formats.squizd.reader import read_catalog
from ingot.formats.squizd.sizes import file_size
from ingot.formats.squizd.writer import SquizdWriter
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec


class SquizdFormat(SingleFile):
    """SQUIZD version 1: dense, INT4, INT2, ASTC or TCA-TBE blocks, pruned or not, a draft head, a Core ML package."""

    name = "squizd"
    suffixes: tuple[str, ...] = (".squizd",)
    summary = "SQUIZD 1: one compressed encoding per file, draft head and Core ML package inside"
    traits = FormatTraits(
        digests=True,
        attachments=("draft", "coreml"),
        group_sizes=(),
        full_size=True,
    )

    def __init__(self, *, compact: bool = False) -> None:
        self.traits = replace(type(self).traits, full_size=not compact)

    def compacted(self) -> SquizdFormat:
        """Return the format that stores what is left of pruned matrices: smaller, and for readers of ``TDIR`` alone."""
        return SquizdFormat(compact=True)

    def claims(self, name: str, head: bytes) -> bool:
        """By magic, or by suffix: then ``read`` says what is wrong with the magic."""
        return head[:4] == MAGIC or name.lower().endswith(self.suffixes)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        return refusal(spec) or undescribed(spec) or (compacted(spec) if self.traits.full_size else None)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """By layer; see ``place.order``."""
        return order(specs)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        return read_catalog(source, name, verify=verify)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact, options)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> SquizdWriter:
        return SquizdWriter(target, name, artifact, options)
