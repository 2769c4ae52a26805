"""Remarks about opened sources, in addition to those of their formats, for ``inspect``, ``verify`` and reports."""

from __future__ import annotations

import re

from ingot.artifacts.adapter_files import RULE as ADAPTER
from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.open import Source
from ingot.artifacts.unsupported_packers import RULE
from ingot.model.account import describe_unread
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.tensor import Tensor

UNREAD = "open.unread"
_SHOWN = ("torchfile.left-out", "gptq.format", "gptq.zero-points", "onnx.inner-graphs")
"""The rules of those remarks of formats that every report shows."""
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.[^.]+")


def remarks(source: Source) -> list[tuple[str, str]]:
    """Return pairs of rule and message.

    - ``open.unread``: the reader does not support some tensors of the file.
    - ``model.adapter``: the source is an adapter.
    - ``model.quantized``: another program packed the weights.
    - ``open.one-shard``: the file is one shard of a model.
    - ``torchfile.left-out``: entries of a torch file that are not weights.
    - ``gptq.format``, ``gptq.zero-points``: the attributes of a GPTQ folder are inconsistent.
    - ``onnx.inner-graphs``: names of tensors in graphs inside the graph.
    - ``affine.axis-unsaid``: the attributes of packed words do not state the dimension of the packing.
    """
    unread = describe_unread(source.catalog.unread)
    notes = [(UNREAD, unread)] if unread else []
    adapter = adapter_of(source)
    if adapter is not None:
        notes.append((ADAPTER, adapter.describe()))
    packer = source.packer()
    if packer is not None:
        notes.append((RULE, packer.note()))
    shard = _shard(source)
    if shard:
        notes.append(("open.one-shard", shard))
    notes += [(rule, text) for rule, text in source.catalog.remarks if rule in _SHOWN]
    without_axis = as_tensor_map(source.catalog.tensors).names_where(_lacks_axis)
    if without_axis:
        text = (
            f"{len(without_axis)} quantized tensors do not say along which dimension they are packed: taken as the last"
        )
        notes.append(
            ("affine.axis-unsaid", f"{text}, GPTQ's own are packed along the first; {without_axis[0][:200]!r}")
        )
    return notes


def _lacks_axis(tensor: Tensor) -> bool:
    if tensor.codec == DenseLayout.codec:  # avoids the imports for most checkpoints
        return False
    from ingot.model.layouts.affine import AffineLayout
    from ingot.model.layouts.orientation import lacks_axis

    return tensor.codec == AffineLayout.codec and lacks_axis(tensor.params)


def _shard(source: Source) -> str:
    """Return a note if, by its name, the file is a shard of a model whose other shards are not read; else empty."""
    numbers = _SHARD.search(source.entry)
    if numbers is None or int(numbers[2]) <= len(source.catalog.headers):
        return ""
    return (
        f"{source.entry} is shard {int(numbers[1])} of {int(numbers[2])}: open the folder, or its index, for all of it"
    )
