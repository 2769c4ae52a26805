"""The format SQUIZD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.ext.squizd.carry import why_compact_unsupported, why_undescribed, why_unsupported
from ingot.ext.squizd.layout import MAGIC
from ingot.ext.squizd.place import order
from ingot.ext.squizd.reader import read_catalog
from ingot.ext.squizd.sizes import file_size
from ingot.ext.squizd.writer import SquizdWriter
from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.shared.single import SingleFile
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec


class SquizdFormat(SingleFile):
    """The format SQUIZD, version 1.

    It stores dense, INT4, INT2, ASTC or TCA-TBE blocks, pruned or not, a draft head and a Core ML package.
    """

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
        """Return the format that stores only the remaining blocks of pruned matrices: smaller, but only readable
        with ``TDIR``."""
        return SquizdFormat(compact=True)

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the magic or the suffix fits; with another magic, ``read`` reports the error."""
        return head[:4] == MAGIC or name.lower().endswith(self.suffixes)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        return (
            why_unsupported(spec)
            or why_undescribed(spec)
            or (why_compact_unsupported(spec) if self.traits.full_size else None)
        )

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order by layer; see ``place.order``."""
        return order(specs)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        return read_catalog(source, name, verify=verify)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact, options)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> SquizdWriter:
        return SquizdWriter(target, name, artifact, options)
