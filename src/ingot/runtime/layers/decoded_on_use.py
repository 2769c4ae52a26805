"""A tensor of torch that is decoded when its values are used; asking for its type, shape or device costs nothing.

This module needs torch to be imported (``core.extras.require`` names the extra); nothing else imports it at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ingot.errors import UsageError


class DecodedOnUse(torch.Tensor):
    """What ``decode`` returns, made anew for every operation that takes it.

    It has no gradient, and what would write to it raises ``UsageError`` ``matmul.weight``: the values are made of parts
    that this would not change.

    Parameters
    ----------
    shape : sequence of int
    dtype : torch.dtype
    device : torch.device
    decode : callable
        Returns a tensor of that shape, type and device.
    """

    _decode: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: Any, dtype: torch.dtype, device: torch.device, decode: Callable[[], torch.Tensor]
    ) -> DecodedOnUse:
        made: DecodedOnUse = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined, unused-ignore]
        made._decode = decode
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment, unused-ignore]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        _refuse_writing(cls, func, args, named)
        args, named = tree_map_only(cls, lambda value: value.values_now(), (args, named))
        return func(*args, **named)

    def values_now(self) -> torch.Tensor:
        """Return the values as an ordinary tensor."""
        with torch.no_grad():
            return self._decode()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor."""
        return self.values_now().numpy(force=force)

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.values_now().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.values_now()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values_now().__reduce_ex__(protocol)  # type: ignore[no-untyped-call, unused-ignore]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override, unused-ignore]
        return f"DecodedOnUse({self.values_now()!r})"


def _refuse_writing(kind: type, func: Any, args: Any, named: Any) -> None:
    if not func._schema.is_mutable:
        return
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | named
    written = (item.name for item in func._schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    if any(isinstance(given.get(name), kind) for name in written):
        raise UsageError(
            f"expected a tensor that can be written to, found the decoded values of a packed layer in {func}: decode "
            "the layer, or change what it is packed from",
            rule="matmul.weight",
        )
