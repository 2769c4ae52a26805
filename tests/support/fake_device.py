"""A second device for tests, in the CPU's memory: operations that mix its tensors with those of the CPU fail.

As on a Mac, the device has no f64. Random numbers drawn on it fail too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

NAME = "lazy"  # torch has this name, and no code for it
_DEVICE = torch.device(NAME, 0)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
_COMPOSITE = {
    torch.nn.functional.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default,
    torch.nn.functional.one_hot: torch.ops.aten.one_hot.default,
    torch.nn.functional.cosine_similarity: torch.ops.aten.cosine_similarity.default,
}
_RANDOM = ("multinomial", "rand", "randn", "randint", "bernoulli_", "normal_")


class DeviceTensor(torch.Tensor):
    """A tensor on the second device; ``plain`` has its values."""

    plain: torch.Tensor

    @staticmethod
    def __new__(cls: type[DeviceTensor], values: torch.Tensor) -> DeviceTensor:
        if values.dtype == torch.float64:
            raise TypeError(f"{NAME} has no f64")
        result: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device("meta"),
        )
        result.plain = values
        return result

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _DEVICE

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.plain.untyped_storage()

    def data_ptr(self) -> int:
        return self.plain.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert a tensor on {NAME} to numpy")

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.plain!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        self.operations += any(isinstance(value, DeviceTensor) for value in tensors)
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Replaces functions that need a real device: ``torch.tensor``, and those in ``_COMPOSITE``, without gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.tensor and options.get("device") is not None:
            device = options.pop("device")
            return func(*args, **options).to(device)
        if func is torch.nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            return _attention(*args, **options) if isinstance(args[0], DeviceTensor) else func(*args, **options)
        if func is torch.where and isinstance(args[0], DeviceTensor):  # torch would create the numbers on device meta
            args = tuple(
                DeviceTensor(torch.tensor(value)) if isinstance(value, float | int) else value for value in args
            )
        if func in _COMPOSITE and isinstance(args[0], DeviceTensor):
            return _run(_COMPOSITE[func], args, options)
        return func(*args, **options)


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """Return attention with gradients, for masks of bool or f32 and for causal attention."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    scale = options.get("scale") or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-1, -2) * scale
    if options.get("is_causal"):
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().to(NAME)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -1e9)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    on_device = [value for value in tensors if isinstance(value, DeviceTensor)]
    name = func._schema.name
    if name == "aten::_has_compatible_shallow_copy_type":
        return False
    if (
        on_device
        and name not in _COPIES
        and any(not isinstance(value, DeviceTensor) and value.ndim for value in tensors)
    ):
        raise RuntimeError(f"{name}: expected all tensors on {NAME}, found some on the CPU")
    devices = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.device)]
    wraps = any(device.type == NAME for device in devices) if devices else bool(on_device)
    if name == "aten::copy_":
        wraps = isinstance(args[0], DeviceTensor)
    if wraps and name.removeprefix("aten::") in _RANDOM:
        raise RuntimeError(f"{name}: drawn on {NAME}")
    plain_args, plain_kwargs = tree_map(_on_cpu, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if name.endswith("_") and isinstance(args[0], torch.Tensor):
        return args[0]
    if not wraps:
        return out
    return tree_map(lambda value: DeviceTensor(value) if isinstance(value, torch.Tensor) else value, out)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.plain
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


@contextmanager
def fake_device(monkeypatch: Any) -> Iterator[_Mode]:
    """Give torch the second device in this context; the context's value counts the operations on it."""
    monkeypatch.setattr(torch, NAME, SimpleNamespace(synchronize=lambda device: None), raising=False)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # a view in inference mode needs a real tensor
    with _Functions(), _Mode() as mode:
        yield mode
