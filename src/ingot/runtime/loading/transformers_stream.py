"""Models whose weights are decoded layer by layer during each pass, within the memory of two layers.

Each parameter that needs decoding is a tensor that decodes itself on use (``DecodedOnUse``), so any code can read it.
Hooks make passes faster: a layer gets ordinary parameters when its forward begins and returns them at its end. In the
meantime a thread decodes the next layer.

Importing this module needs torch (``core.border.require`` names the extra); no module imports it at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ingot.errors import UnsupportedError, UsageError
from ingot.model.tensor import Tensor
from ingot.naming.names import layer_path
from ingot.runtime.layers.decoded_on_use import DecodedOnUse
from ingot.runtime.loading.transformers_packed import Placeholder
from ingot.runtime.loading.transformers_weights import materialize


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter of a module, and the tensor from which it is decoded.

    ``between`` is the parameter's value between passes, which decodes itself when it is used.
    """

    module: torch.nn.Module
    attribute: str
    tensor: Tensor
    between: DecodedOnUse


@dataclass(frozen=True, slots=True)
class _Unit:
    """Parameters that are decoded together: all parameters of a layer, or of a module outside the layers."""

    path: str
    slots: tuple[_Slot, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the decoded parameters; a parameter that several slots share counts once."""
        return sum({id(slot.tensor): slot.between.numel() * slot.between.itemsize for slot in self.slots}.values())


class Stream:
    """The streamed weights of one model. Only one pass may run at a time.

    Parameters
    ----------
    placeholders : sequence of Placeholder
        The parameters on device meta for the weights, in the order of the model's modules.
    device : torch.device
        The device that computes.
    check : callable
        Called before weights are read; raises if the files changed since they were opened.
    """

    def __init__(self, placeholders: Sequence[Placeholder], device: Any, check: Callable[[], None]) -> None:
        self._device = device
        self._check = check
        groups: dict[str, list[_Slot]] = {}
        for placeholder in placeholders:
            groups.setdefault(layer_path(placeholder.path) or placeholder.path, []).append(self._slot(placeholder))
        self._units = [_Unit(path, tuple(slots)) for path, slots in groups.items()]
        self._reader = ThreadPoolExecutor(1, "ingot-stream")
        self._next: tuple[int, Future[dict[int, Any]]] | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes that one pass decodes."""
        return sum(unit.nbytes for unit in self._units)

    @property
    def window(self) -> int:
        """The peak number of bytes of decoded weights: the largest sum over two consecutive units.

        The first unit follows the last unit, because the next pass begins with it.
        """
        sizes = [unit.nbytes for unit in self._units]
        return max(map(sum, zip(sizes, sizes[1:] + sizes[:1], strict=True))) if len(sizes) > 1 else sum(sizes)

    def install(self, model: torch.nn.Module) -> None:
        """Assign the self-decoding weights to their modules and decode each unit when its forward is called."""
        for index, unit in enumerate(self._units):
            for slot in unit.slots:
                slot.module._parameters[slot.attribute] = slot.between  # type: ignore[assignment, unused-ignore]
            module = model.get_submodule(unit.path)
            module.register_forward_pre_hook(partial(self._begin, index))
            module.register_forward_hook(partial(self._end, index), always_call=True)
        for module in model.modules():
            if hasattr(type(module), "save_pretrained"):
                module.save_pretrained = _refuse_saving  # type: ignore[assignment, unused-ignore]

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a streamed model does not contain its weights and cannot be copied: load it again", rule="model.stream"
        )

    def _slot(self, placeholder: Placeholder) -> _Slot:
        tensor = placeholder.tensor
        dtype = placeholder.parameter.dtype
        between = DecodedOnUse(tensor.shape, dtype, self._device, partial(self._decode, tensor, dtype))
        return _Slot(placeholder.module, placeholder.attribute, tensor, between)

    def _decode(self, tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._check()
        values: torch.Tensor = materialize(tensor, dtype, self._device)
        return values

    def _load(self, index: int) -> dict[int, Any]:
        """Decode the parameters of the unit at ``index``; return them by the id of their tensors."""
        self._check()
        slots = {id(slot.tensor): slot for slot in self._units[index].slots}
        return {
            key: torch.nn.Parameter(materialize(slot.tensor, slot.between.dtype, self._device), requires_grad=False)
            for key, slot in slots.items()
        }

    def _begin(self, index: int, module: Any, args: Any) -> None:
        values = self._take(index)
        for slot in self._units[index].slots:
            slot.module._parameters[slot.attribute] = values[id(slot.tensor)]
        following = (index + 1) % len(self._units)
        if following != index:
            self._next = following, self._reader.submit(self._load, following)

    def _take(self, index: int) -> dict[int, Any]:
        """Return the parameters of the unit at ``index``; decode them unless the thread has decoded this unit
        already.
        """
        if self._next is not None:
            ahead, future = self._next
            self._next = None
            if ahead == index:
                return future.result()
            if not future.cancel():
                with suppress(Exception):  # the prefetched layer is not needed
                    future.result()
        return self._load(index)

    def _end(self, number: int, module: Any, args: Any, output: Any) -> None:
        for slot in self._units[number].slots:
            slot.module._parameters[slot.attribute] = slot.between  # type: ignore[assignment, unused-ignore]


def _refuse_saving(*args: Any, **options: Any) -> NoReturn:
    raise UnsupportedError(
        "a streamed model does not contain its weights and cannot be saved: copy or convert its checkpoint",
        rule="model.stream",
    )
