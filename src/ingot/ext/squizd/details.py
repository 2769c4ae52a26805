"""Tables that ``ingot inspect`` shows for a ``.squizd`` in addition to its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.ext.squizd.layout import Header
from ingot.model.attachments import Attachments
from ingot.model.features import Flags
from ingot.reporting.report import Column, Table

_FEATURES = (Column("flag", head="flag"), Column("set", "flag", "set"))
_SPARSE = (
    Column("", "count", "channels a block"),
    Column("", "count", "layers with masks"),
    Column("", "ratio", "mean"),
)
_DRAFT = (Column("", "count", "layers"), Column("", "count", "tensors"), Column("", "count", "vocabulary"))
_COREML = (Column("", "bytes", "zipped"),)


def details(header: Header, attachments: Attachments) -> Sequence[Table]:
    """Return a table of feature flags, and a table for each feature with figures."""
    flags = header.flags
    tables = [Table("", _FEATURES, [(flag.name or "", bool(flags & flag)) for flag in Flags], "features")]
    if flags & Flags.SPARSE:
        meta = header.sparsity
        tables.append(Table("", _SPARSE, [(meta.block, meta.layers, meta.mean)], "sparsity"))
    if flags & Flags.EAGLE:
        row = (header.draft.layers, len(attachments.draft or ()), header.draft.vocab)
        tables.append(Table("", _DRAFT, [row], "draft head"))
    if flags & Flags.ANE_COREML and attachments.coreml is not None:
        tables.append(Table("", _COREML, [(attachments.coreml.length,)], "Core ML package"))
    return tables
