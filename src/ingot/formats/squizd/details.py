"""What ``ingot inspect`` shows of a ``.squizd`` beside its tensors: features, and the stack chosen per platform."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.core.memory import format_size
from ingot.formats.base import Detail
from ingot.formats.squizd.flags import Flags
from ingot.formats.squizd.layout import Header
from ingot.model.attachments import Attachments
from ingot.targets.dispatch import details as dispatch_details


def details(header: Header, attachments: Attachments) -> Sequence[Detail]:
    """Return the tables."""
    rows = [
        (flag.name or "", "set" if header.flags & flag else "-", _about(flag, header, attachments)) for flag in Flags
    ]
    return [Detail("features", ("flag", "", "about"), rows), *dispatch_details(header.flags)]


def _about(flag: Flags, header: Header, attachments: Attachments) -> str:
    if not header.flags & flag:
        return ""
    if flag is Flags.SPARSE:
        meta = header.sparsity
        return f"blocks of {meta.block} channels, masks in {meta.layers} layers, mean sparsity {meta.mean:.3f}"
    if flag is Flags.EAGLE:
        count = len(attachments.draft or ())
        return f"draft head of {header.draft.layers} layer(s), {count} tensors, vocabulary {header.draft.vocab}"
    if flag is Flags.ANE_COREML and attachments.coreml is not None:
        return f"Core ML package, {format_size(attachments.coreml.length)} zipped"
    return ""
