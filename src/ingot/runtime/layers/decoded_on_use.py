"""A torch tensor that is decoded when its values are used; reading its dtype, shape or device does not decode it.

Importing this module needs torch (``core.border.require`` names the extra); no module imports it at its top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ingot.errors import UsageError


class DecodedOnUse(torch.Tensor):
    """A tensor whose values are computed by ``decode`` for each operation that uses them.

    The tensor has no gradient. Operations that would write to the tensor raise ``UsageError`` ``matmul.weight``,
    because they would not change the packed parts.

    Parameters
    ----------
    shape : sequence of int
    dtype : torch.dtype
    device : torch.device
    decode : callable
        Returns a tensor of this shape, dtype and device.
    """

    _decode: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: Any, dtype: torch.dtype, device: torch.device, decode: Callable[[], torch.Tensor]
    ) -> DecodedOnUse:
        tensor: DecodedOnUse = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined, unused-ignore]
        tensor._decode = decode
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment, unused-ignore]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        _refuse_writing(cls, func, args, keywords)
        args, keywords = tree_map_only(cls, lambda value: value.values_now(), (args, keywords))
        return func(*args, **keywords)

    def values_now(self) -> torch.Tensor:
        """Return the values as an ordinary tensor."""
        with torch.no_grad():
            return self._decode()

    def numpy(self, *, force: bool = False) -> Any:
        """Decode and convert to a NumPy array, as ``torch.Tensor.numpy``."""
        return self.values_now().numpy(force=force)

    def tolist(self) -> Any:
        """Decode and convert to nested lists, as ``torch.Tensor.tolist``."""
        return self.values_now().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.values_now()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values_now().__reduce_ex__(protocol)  # type: ignore[no-untyped-call, unused-ignore]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override, unused-ignore]
        return f"DecodedOnUse({self.values_now()!r})"


def _refuse_writing(cls: type, func: Any, args: Any, keywords: Any) -> None:
    if not func._schema.is_mutable:
        return
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | keywords
    written = (item.name for item in func._schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    if any(isinstance(arguments.get(name), cls) for name in written):
        raise UsageError(
            f"cannot write to the decoded values of a packed layer in {func}: decode the layer, or change the tensor "
            "that it is packed from",
            rule="matmul.weight",
        )
