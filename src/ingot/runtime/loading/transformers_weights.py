"""A checkpoint's tensors as transformers' loader takes them: by name, each decoded when its place is known.

transformers asks a state dict's values for ``value[...]`` and then for ``.to(device, dtype)``, from a few threads,
after it has renamed the keys (``core_model_loading.spawn_materialize``). A ``Weight`` decodes at that moment, straight
into the type wanted: what is stored as wanted stays in the mapped file, what is packed is decoded once, into its last
place.
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
from ingot.runtime.arrays.torch_device import decoded_there

NO_ROOM = (
    "stream them, keep them packed, take a smaller dtype, close other programs, or set max_ram if this figure is wrong"
)
"""What to do where the decoded weights do not fit into memory."""
STREAMED = (
    "keep more of them packed, take a smaller dtype, close other programs, or set max_ram if this figure is wrong"
)
"""What to do where not even two layers of them do."""

# Set on a parameter without values: the stored tensor that stands for it until the model is complete.
PACKED = "ingot_tensor"


@dataclass(slots=True)
class Loading:
    """How the weights of one model are to be made, and what went wrong while they were.

    Parameters
    ----------
    device : torch.device
    packed : set of str
        Names of tensors that are not decoded: a parameter on device meta stands for each, marked ``PACKED``.
    failures : list
        The errors of decoding; transformers would wrap them in a report.
    """

    device: Any
    packed: set[str] = field(default_factory=set)
    failures: list[BaseException] = field(default_factory=list)


class Weight:
    """One tensor on its way into a model."""

    __slots__ = ("_loading", "tensor")

    def __init__(self, tensor: Tensor, loading: Loading) -> None:
        self.tensor = tensor
        self._loading = loading

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def __getitem__(self, key: Any) -> Weight:
        """Return itself for ``[...]``: the values are made by ``to``, which knows the type."""
        return self

    def to(self, device: Any = None, dtype: Any = None) -> Any:
        """Return the values as a tensor of ``dtype`` on the device of this loading."""
        try:
            if self.tensor.name in self._loading.packed:
                return _stand_in(self.tensor, dtype)
            return materialize(self.tensor, dtype, self._loading.device)
        except BaseException as error:
            self._loading.failures.append(error)
            raise


def taking_order(names: Iterable[str], packed: Container[str] = ()) -> list[str]:
    """Return names in the order in which their values are asked for while a model is loaded.

    transformers goes through them with numbers in their order (``core_model_loading.dot_natural_key``), where most
    files have ``layers.10`` before ``layers.2``; those of ``packed`` are put in when it is done.
    """

    def key(name: str) -> tuple[bool, list[tuple[int, int, str]]]:
        pieces = re.split(r"([0-9]{1,18})", name)
        return name in packed, [(0, int(item), "") if at % 2 else (1, 0, item) for at, item in enumerate(pieces)]

    return sorted(names, key=key)


def weights_of(tensors: Mapping[str, Tensor], loading: Loading) -> dict[str, Weight]:
    """Return the state dict that transformers loads from."""
    return {name: Weight(tensor, loading) for name, tensor in tensors.items()}


def materialize(tensor: Tensor, dtype: Any, device: Any) -> Any:
    """Return a tensor's values as a ``torch.Tensor`` of a torch ``dtype``, as ``Tensor.to`` of the stored values does.

    Lossy codecs decode into ``dtype`` at once: the float32 value is rounded once, and nothing is held twice.
    """
    target = None if dtype is None else resolve_dtype(dtype).name
    found = decoded_there(tensor, target, device)
    if found is not None:
        return found
    if target in FLOAT_TARGETS and _decodes_to_any(tensor):
        return _placed(from_numpy(tensor.numpy(target)), device)
    value = from_numpy(tensor.private().numpy())
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return _placed(value, device)


def is_mapped(tensor: Tensor, target: str) -> bool:
    """Whether a tensor wanted as ``target`` (a canonical name) costs no memory of its own: its file is mapped."""
    data = tensor.parts.get("data")
    if tensor.codec != DenseLayout.codec or data is None or data.encoding != "raw" or not data.source.mapped:
        return False
    row = DTYPES.get(tensor.dtype)
    return row is not None and tensor.dtype == data.dtype and (not row.is_float or tensor.dtype == target)


def copied_bytes(tensors: Mapping[str, Tensor], target: str, packed: set[str], merged: set[str]) -> int:
    """Return the bytes of memory for all tensors that are neither kept packed nor left in a mapped file.

    ``merged`` are those that transformers joins with others, which copies them (``merged_names``).
    """
    return sum(
        tensor.size * _itemsize(tensor, target)
        for name, tensor in tensors.items()
        if name not in packed and (name in merged or not is_mapped(tensor, target))
    )


def streamable(tensors: Mapping[str, Tensor], target: str, packed: set[str], merged: set[str]) -> frozenset[str]:
    """Return the weights that take memory when they are decoded and that transformers does not rearrange."""
    return frozenset(
        name
        for name, tensor in tensors.items()
        if name not in packed | merged and not is_mapped(tensor, target) and _is_float(tensor)
    )


def merged_names(config: Any, names: Iterable[str]) -> set[str]:
    """Return the tensors that transformers rearranges on the way into the model: experts into one stack, for the most.

    transformers 5, ``conversion_mapping``: patterns in which ``*`` stands for a number.
    """
    known = require("transformers.conversion_mapping", "transformers")
    kinds = {getattr(part, "model_type", None) for part in (config, getattr(config, "text_config", None))}
    steps = [step for kind in kinds if kind for step in known.get_checkpoint_conversion_mapping(kind) or ()]
    patterns = [
        re.compile(re.escape(pattern).replace(r"\*", "[0-9]+"))
        for step in steps
        if isinstance(step, known.WeightConverter)
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


def _stand_in(tensor: Tensor, dtype: Any) -> Any:
    torch = require("torch", "torch")
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    parameter = torch.nn.Parameter(empty, requires_grad=False)
    setattr(parameter, PACKED, tensor)
    return parameter


def _placed(value: Any, device: Any) -> Any:
    return value if device.type == "cpu" else value.to(device)
