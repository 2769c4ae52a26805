"""Models whose weights are decoded layer by layer, each time that a pass comes to them: in the memory of two layers.

Each parameter that would have to be decoded is a tensor that is decoded when its values are used (``DecodedOnUse``), so
that whoever asks for it gets it. Hooks make passes faster: a layer gets ordinary parameters when its forward begins and
gives them back at its end, while a thread decodes those of the layer that comes next.

This module needs torch to be imported (``core.extras.require`` names the extra); nothing else imports it at the top.
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
from ingot.runtime.loading.transformers_packed import StandIn
from ingot.runtime.loading.transformers_weights import materialize


@dataclass(frozen=True, slots=True)
class _Slot:
    """One parameter of a module: where it is, what it is decoded from, and what is there between passes."""

    module: torch.nn.Module
    attribute: str
    tensor: Tensor
    between: DecodedOnUse


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is decoded together: a layer, or a module outside the layers."""

    path: str
    slots: tuple[_Slot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes when decoded; parameters that several slots share count once."""
        return sum({id(slot.tensor): slot.between.numel() * slot.between.itemsize for slot in self.slots}.values())


class Stream:
    """The streamed weights of one model, for one pass at a time.

    Parameters
    ----------
    stand_ins : sequence of StandIn
        The parameters on device meta that stand for the weights, in the order of the model's modules.
    device : torch.device
        Where they are computed with.
    check : callable
        Called before weights are read; raises where the files are not those that were opened.
    """

    def __init__(self, stand_ins: Sequence[StandIn], device: Any, check: Callable[[], None]) -> None:
        self._device, self._check = device, check
        groups: dict[str, list[_Slot]] = {}
        for stand_in in stand_ins:
            groups.setdefault(layer_path(stand_in.path) or stand_in.path, []).append(self._slot(stand_in))
        self._units = [_Unit(path, tuple(slots)) for path, slots in groups.items()]
        self._reader = ThreadPoolExecutor(1, "ingot-stream")
        self._next: tuple[int, Future[dict[int, Any]]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one pass decodes."""
        return sum(unit.nbytes for unit in self._units)

    @property
    def window(self) -> int:
        """The most bytes that are decoded at a time: two units that follow each other, the first follows the last."""
        sizes = [unit.nbytes for unit in self._units]
        return max(map(sum, zip(sizes, sizes[1:] + sizes[:1], strict=True))) if len(sizes) > 1 else sum(sizes)

    def install(self, model: torch.nn.Module) -> None:
        """Put the weights into their places and have each unit decoded when its forward is called."""
        for number, unit in enumerate(self._units):
            for slot in unit.slots:
                slot.module._parameters[slot.attribute] = slot.between  # type: ignore[assignment, unused-ignore]
            module = model.get_submodule(unit.path)
            module.register_forward_pre_hook(partial(self._begin, number))
            module.register_forward_hook(partial(self._end, number), always_call=True)
        for module in model.modules():
            if hasattr(type(module), "save_pretrained"):
                module.save_pretrained = _refuse_saving  # type: ignore[assignment, unused-ignore]

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "expected a model that holds its weights to copy, found a streamed one: load it again", rule="model.stream"
        )

    def _slot(self, stand_in: StandIn) -> _Slot:
        tensor, dtype = stand_in.tensor, stand_in.parameter.dtype
        between = DecodedOnUse(tensor.shape, dtype, self._device, partial(self._decode, tensor, dtype))
        return _Slot(stand_in.module, stand_in.attribute, tensor, between)

    def _decode(self, tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._check()
        values: torch.Tensor = materialize(tensor, dtype, self._device)
        return values

    def _load(self, number: int) -> dict[int, Any]:
        """Decode a unit; return its parameters by their tensors."""
        self._check()
        wanted = {id(slot.tensor): slot for slot in self._units[number].slots}
        return {
            key: torch.nn.Parameter(materialize(slot.tensor, slot.between.dtype, self._device), requires_grad=False)
            for key, slot in wanted.items()
        }

    def _begin(self, number: int, module: Any, args: Any) -> None:
        values = self._taken(number)
        for slot in self._units[number].slots:
            slot.module._parameters[slot.attribute] = values[id(slot.tensor)]
        following = (number + 1) % len(self._units)
        if following != number:
            self._next = following, self._reader.submit(self._load, following)

    def _taken(self, number: int) -> dict[int, Any]:
        """Return a unit's parameters: those that were read ahead where they are of this unit, which no other keeps."""
        if self._next is not None:
            ahead, future = self._next
            self._next = None
            if ahead == number:
                return future.result()
            if not future.cancel():
                with suppress(Exception):  # of a layer that nobody wants now
                    future.result()
        return self._load(number)

    def _end(self, number: int, module: Any, args: Any, output: Any) -> None:
        for slot in self._units[number].slots:
            slot.module._parameters[slot.attribute] = slot.between  # type: ignore[assignment, unused-ignore]


def _refuse_saving(*args: Any, **options: Any) -> NoReturn:
    raise UnsupportedError(
        "expected a model that holds its weights to save, found a streamed one: copy or convert the checkpoint that it "
        "came from",
        rule="model.stream",
    )
