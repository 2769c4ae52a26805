"""What is worth telling of an opened source beside what its format says: notes for ``inspect``, ``verify``, reports."""

from __future__ import annotations

import re

from ingot.artifacts.adapter_files import RULE as ADAPTER
from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.open import Source
from ingot.artifacts.unread_dialects import RULE
from ingot.model.account import describe_unread
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.tensor import Tensor

UNREAD = "open.unread"
_SHOWN = ("torchfile.left-out", "gptq.format", "gptq.zero-points", "onnx.inner-graphs")
"""Rules of a format's own remarks that every report shows."""
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.[^.]+")


def remarks(source: Source) -> list[tuple[str, str]]:
    """Return pairs of rule and message.

    ``open.unread``: the file holds tensors that its reader could not express. ``model.adapter``: it is an adapter.
    ``model.quantized``: another program packed the weights. ``open.one-shard``: the file is one of several of a model.
    ``torchfile.left-out``: what a file of torch holds beside the weights. ``gptq.format``, ``gptq.zero-points``: a
    folder of GPTQ contradicts itself, and how it is read. ``onnx.inner-graphs``: names of tensors in graphs within the
    graph.
    ``affine.axis-unsaid``: quantized words whose attributes leave open along which dimension they are packed.
    """
    unread = describe_unread(source.catalog.unread)
    notes = [(UNREAD, unread)] if unread else []
    adapter = adapter_of(source)
    if adapter is not None:
        notes.append((ADAPTER, adapter.describe()))
    dialect = source.dialect()
    if dialect is not None:
        notes.append((RULE, dialect.note()))
    shard = _shard(source)
    if shard:
        notes.append(("open.one-shard", shard))
    notes += [(rule, text) for rule, text in source.catalog.remarks if rule in _SHOWN]
    unsaid = as_tensor_map(source.catalog.tensors).names_where(_is_unsaid)
    if unsaid:
        told = f"{len(unsaid)} quantized tensors do not say along which dimension they are packed: taken as the last"
        notes.append(("affine.axis-unsaid", f"{told}, GPTQ's own are packed along the first; {unsaid[0][:200]!r}"))
    return notes


def _is_unsaid(tensor: Tensor) -> bool:
    if tensor.codec == DenseLayout.codec:  # most are, and need not know others
        return False
    from ingot.model.layouts.affine import AffineLayout
    from ingot.model.layouts.orientation import lacks_axis

    return tensor.codec == AffineLayout.codec and lacks_axis(tensor.params)


def _shard(source: Source) -> str:
    """Tell by the name, as Hugging Face gives names to shards, that a file is not the whole model."""
    numbers = _SHARD.search(source.entry)
    if numbers is None or int(numbers[2]) < 2:
        return ""
    return (
        f"{source.entry} is shard {int(numbers[1])} of {int(numbers[2])}: open the folder, or its index, for all of it"
    )
