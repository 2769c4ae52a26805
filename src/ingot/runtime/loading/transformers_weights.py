"""The tensors of a checkpoint as the state dict of transformers' loader; each is decoded when its target is known.

transformers renames the keys, then calls ``value[...]`` and ``.to(device, dtype)`` on each value from several threads
(``core_model_loading.spawn_materialize``). A ``Weight`` decodes in that call, directly into the requested dtype. A
tensor stored in that dtype stays in the mapped file. A packed tensor is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.codecs.base import FLOAT_TARGETS
from ingot.codecs.table import CODECS
from ingot.core.border import require
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Tensor
from ingot.runtime.arrays.torch import from_numpy
from ingot.runtime.arrays.torch_device import decode_on_device

DECODED_TOO_LARGE_HINT = (
    "stream them, keep them packed, take a smaller dtype, close other programs, or set max_ram if this figure is wrong"
)
"""Advice if the decoded weights do not fit into memory."""
STREAMED_TOO_LARGE_HINT = (
    "keep more of them packed, take a smaller dtype, close other programs, or set max_ram if this figure is wrong"
)
"""Advice if not even two decoded layers fit into memory."""

# Attribute of a parameter without values: the stored tensor from which it gets its values when the model is complete.
PACKED = "ingot_tensor"


@dataclass(slots=True)
class Loading:
    """Settings for decoding the weights of one model, and the list of errors that decoding raised.

    Parameters
    ----------
    device : torch.device
    packed : set of str
        Names of tensors that stay packed. Each becomes a parameter on device meta with the attribute ``PACKED``.
    failures : list
        Errors of decoding; transformers would wrap them in a report.
    """

    device: Any
    packed: set[str] = field(default_factory=set)
    failures: list[BaseException] = field(default_factory=list)


class Weight:
    """A tensor as a value of the state dict that transformers loads."""

    __slots__ = ("_loading", "tensor")

    def __init__(self, tensor: Tensor, loading: Loading) -> None:
        self.tensor = tensor
        self._loading = loading

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def __getitem__(self, key: Any) -> Weight:
        """Return this object, because transformers calls ``[...]`` before it calls ``to``, which decodes."""
        return self

    def to(self, device: Any = None, dtype: Any = None) -> Any:
        """Return the values as a tensor of ``dtype`` on the device in the settings."""
        try:
            if self.tensor.name in self._loading.packed:
                return _placeholder(self.tensor, dtype)
            return materialize(self.tensor, dtype, self._loading.device)
        except BaseException as error:
            self._loading.failures.append(error)
            raise


def loading_order(names: Iterable[str], packed: Container[str] = ()) -> list[str]:
    """Return the names in the order in which transformers reads their values.

    transformers sorts layers by number (``core_model_loading.dot_natural_key``); most files store ``layers.10`` before
    ``layers.2``. The names in ``packed`` come last, because they are decoded after transformers is done.
    """

    def key(name: str) -> tuple[bool, list[tuple[int, int, str]]]:
        parts = re.split(r"([0-9]{1,18})", name)
        return name in packed, [(0, int(item), "") if index % 2 else (1, 0, item) for index, item in enumerate(parts)]

    return sorted(names, key=key)


def weights_of(tensors: Mapping[str, Tensor], loading: Loading) -> dict[str, Weight]:
    """Return the state dict that transformers loads from."""
    return {name: Weight(tensor, loading) for name, tensor in tensors.items()}


def materialize(tensor: Tensor, dtype: Any, device: Any) -> Any:
    """Return the values of a tensor as a ``torch.Tensor`` of a torch ``dtype``, as ``Tensor.to`` returns them.

    Lossy codecs decode directly into ``dtype``: each float32 value is rounded once, and memory holds one copy.
    """
    target = None if dtype is None else resolve_dtype(dtype).name
    decoded = decode_on_device(tensor, target, device)
    if decoded is not None:
        return decoded
    if target in FLOAT_TARGETS and _decodes_to_any(tensor):
        return _on_device(from_numpy(tensor.numpy(target)), device)
    value = from_numpy(tensor.private().numpy())
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return _on_device(value, device)


def is_mapped(tensor: Tensor, target: str) -> bool:
    """Return whether a tensor requested as ``target`` (a canonical name) needs no memory besides its mapped file."""
    data = tensor.parts.get("data")
    if tensor.codec != DenseLayout.codec or data is None or data.encoding != "raw" or not data.source.mapped:
        return False
    row = DTYPES.get(tensor.dtype)
    return row is not None and tensor.dtype == data.dtype and (not row.is_float or tensor.dtype == target)


def copied_bytes(tensors: Mapping[str, Tensor], target: str, packed: set[str], merged: set[str]) -> int:
    """Return the memory of the tensors that are decoded or copied, in bytes; packed and mapped ones are not counted.

    ``merged`` names the tensors that transformers joins with others; joining copies them (``merged_names``).
    """
    return sum(
        tensor.size * _itemsize(tensor, target)
        for name, tensor in tensors.items()
        if name not in packed and (name in merged or not is_mapped(tensor, target))
    )


def streamable(tensors: Mapping[str, Tensor], target: str, packed: set[str], merged: set[str]) -> frozenset[str]:
    """Return the weights that need memory when they are decoded and that transformers does not rearrange."""
    return frozenset(
        name
        for name, tensor in tensors.items()
        if name not in packed | merged and not is_mapped(tensor, target) and _is_float(tensor)
    )


def merged_names(config: Any, names: Iterable[str]) -> set[str]:
    """Return the names of the tensors that transformers rearranges while it loads, such as experts stacked into one.

    Source: transformers 5, ``conversion_mapping``; ``*`` in a pattern stands for a number.
    """
    conversion = require("transformers.conversion_mapping", "transformers")
    model_types = {getattr(part, "model_type", None) for part in (config, getattr(config, "text_config", None))}
    steps = [
        step
        for model_type in model_types
        if model_type
        for step in conversion.get_checkpoint_conversion_mapping(model_type) or ()
    ]
    patterns = [
        re.compile(re.escape(pattern).replace(r"\*", "[0-9]+"))
        for step in steps
        if isinstance(step, conversion.WeightConverter)
        for pattern in step.source_patterns
    ]
    return {name for name in names if any(pattern.search(name) for pattern in patterns)}


def _is_float(tensor: Tensor) -> bool:
    row = DTYPES.get(tensor.dtype)
    return row is None or row.is_float


def _itemsize(tensor: Tensor, target: str) -> int:
    return DTYPES[target if _is_float(tensor) else tensor.dtype].nbytes(1)


def _decodes_to_any(tensor: Tensor) -> bool:
    codec = CODECS.get(tensor.codec)
    return codec is not None and not codec.lossless


def _placeholder(tensor: Tensor, dtype: Any) -> Any:
    torch = require("torch", "torch")
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    parameter = torch.nn.Parameter(empty, requires_grad=False)
    setattr(parameter, PACKED, tensor)
    return parameter


def _on_device(value: Any, device: Any) -> Any:
    return value if device.type == "cpu" else value.to(device)
